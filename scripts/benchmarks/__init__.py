"""Benchmarks: one file each, with a `check` and a `run`; scripts/benchmark.py names them."""
