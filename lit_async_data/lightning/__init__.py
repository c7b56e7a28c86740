"""The room `lightning`; its README lists the modules."""
