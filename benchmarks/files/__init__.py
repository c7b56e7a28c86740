"""The files that benchmarks write."""
