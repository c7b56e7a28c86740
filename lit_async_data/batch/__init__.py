"""The room `batch`; its README says what belongs here."""
