"""The room `reference`; its README lists the modules."""
