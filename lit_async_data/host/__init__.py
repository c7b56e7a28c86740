"""The room `host`; its README says what belongs here."""
