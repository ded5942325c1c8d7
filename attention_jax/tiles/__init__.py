"""Implementations of attention that run on every device, with every option: one file each.

The table of all implementations by name stands in `attention_jax/kernels/__init__.py`.
"""

from attention_jax.tiles.options import BlockSizes, Inputs, Options

# The names of the implementations that run on any device.
PORTABLE = ("reference", "tiled")

__all__ = ["PORTABLE", "BlockSizes", "Inputs", "Options"]
