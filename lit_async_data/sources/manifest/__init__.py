"""The table behind a dataset of files: one row per sample."""
