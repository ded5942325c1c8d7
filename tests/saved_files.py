"""For tests of saved files: every bit of a state, everything in a folder, what is on the disk."""

import os

import jax
import jax.numpy as jnp
import numpy as np


def assert_bits_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


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
