"""The room `readers`; its README says what belongs here."""
