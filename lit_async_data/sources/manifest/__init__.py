"""Samples that a table names; see the README."""
