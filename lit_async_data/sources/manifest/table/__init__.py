"""The room `table`; its README says what belongs here."""
