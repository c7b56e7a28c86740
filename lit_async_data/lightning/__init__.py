"""The room `lightning`; its README says what belongs here."""
