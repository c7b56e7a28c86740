"""Reads and decodes the files of samples; see the README."""
