"""Benchmarks: one file each, with a `run(options) -> Report`; scripts/benchmark.py names them."""
