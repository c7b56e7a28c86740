"""Threads: waits, interrupts, what another thread does meanwhile, what is left behind."""
