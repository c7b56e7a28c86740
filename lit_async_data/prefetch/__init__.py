"""The room `prefetch`; its README says what belongs here."""
