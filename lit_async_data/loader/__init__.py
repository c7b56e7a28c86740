"""The room `loader`; its README says what belongs here."""
