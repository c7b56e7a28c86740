"""The room `conf`; its README lists the modules. Hydra finds the groups here as ``pkg://lit_async_data.conf``."""
