"""For tests of saved files: every bit of a state, everything in a folder, what is on the disk."""

import os
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np


def assert_bits_equal(left, right):
    """Equal dtypes, shapes and bytes: -0.0 is not 0.0, and one NaN is not another."""

    def bits(leaf):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(leaf) if is_key else leaf
        return np.frombuffer(np.asarray(data).tobytes(), np.uint8)

    chex.assert_trees_all_equal_shapes_and_dtypes(left, right)
    chex.assert_trees_all_equal(*(jax.tree.map(bits, tree) for tree in (left, right)), strict=True)


def without_speed(path):
    """The bytes of a file, without the measured speeds of metrics.jsonl."""
    return re.sub(rb', "(steps|tokens)_per_second": \[[^]]*\]', b"", path.read_bytes())


def snapshot(folder):
    """Returns the names, bytes and modification times of everything in a folder."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in [folder, *folder.rglob("*")]
    }


def fsynced(monkeypatch):
    """A function that says of a path whether `os.fsync` was called with all of its bytes."""
    sizes, fsync = {}, os.fsync

    def recorded(file):
        fsync(file)
        sizes[os.fstat(file).st_ino] = os.fstat(file).st_size

    monkeypatch.setattr(os, "fsync", recorded)
    return lambda path: sizes.get(path.stat().st_ino) == path.stat().st_size
