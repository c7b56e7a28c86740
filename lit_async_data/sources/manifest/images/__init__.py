"""Decodes and resizes images; see the README."""
