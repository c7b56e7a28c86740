"""Predictions with their samples and locations, as Parquet and HDF5 files."""
