"""Rows and columns of tables; see the README."""
