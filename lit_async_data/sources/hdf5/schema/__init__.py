"""The room `schema`; its README says what belongs here."""
