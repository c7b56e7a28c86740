"""The room `images`; its README says what belongs here."""
