"""The room `reference`; its README says what belongs here."""
