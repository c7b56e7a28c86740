"""Runs of several processes, as a user or SLURM starts them."""
