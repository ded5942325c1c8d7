"""Benchmarks: one file each, a function that returns races; scripts/benchmark.py names them."""
