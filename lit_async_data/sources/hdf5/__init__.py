"""HDF5 files as sources; the README of this folder says what belongs here."""
