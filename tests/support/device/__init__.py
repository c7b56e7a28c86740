"""Copies to a simulated device: the loop around them, and the batches."""
