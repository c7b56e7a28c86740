"""The room `order`; its README says what belongs here."""
