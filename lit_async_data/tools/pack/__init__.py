"""Packs samples of any source into one HDF5 file that is fast to read at random."""
