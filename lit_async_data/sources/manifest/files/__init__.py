"""The room `files`; its README says what belongs here."""
