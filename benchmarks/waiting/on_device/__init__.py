"""Parts of the benchmarks of copies to a device, real or simulated."""
