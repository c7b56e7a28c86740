"""What the benchmarks share: the program around the parts, memory, the page cache."""
