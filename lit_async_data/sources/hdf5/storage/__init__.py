"""The room `storage`; its README says what belongs here."""
