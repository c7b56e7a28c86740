"""The room `hooks`; its README says what belongs here."""
