"""The room `device`; its README says what belongs here."""
