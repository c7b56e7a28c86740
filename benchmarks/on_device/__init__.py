"""Benchmarks of the way to a device, real or simulated."""
