"""Digests of a state: equal digests mean equal bits, on whatever devices the states are.

Each 32-bit word w_i of a leaf goes through a bijection that depends on its index i, and two sums of
the results are taken modulo 2^32. With G and `mix` of `bits.py`,

    m_i = mix(w_i + i G),    digest = (sum_i m_i, sum_i (2 i + 1) m_i).

Integer sums do not depend on their order, so the digest does not depend on how a leaf is sharded,
and each device sums its own part. A change of one word is always detected. A change of more words
goes undetected with probability 2^-63, or 2^-(63 - k) for two words whose distance is a multiple of
2^k and of no higher power. The digest protects against damage, not against an adversary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.bits import GOLDEN, mix

Array = jax.Array
Description = dict[str, Any]  # of a leaf: {"shape", "dtype"}, and perhaps "digest"


def describe(tree: Any) -> dict[str, Description]:
    """Each leaf by path, for example {"params.embedding": {"shape": [...], "dtype": "float32"}}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def digests(tree: Any) -> dict[str, Description]:
    """The descriptions of `describe`, each with a "digest" of 16 hexadecimal digits.

    Args:
        tree: a pytree of arrays of any dtype, PRNG keys included, on any devices.

    >>> digests({"x": jnp.zeros(3)})["x"]["digest"] == digests({"x": -jnp.zeros(3)})["x"]["digest"]
    False
    """
    described, leaves = describe(tree), jax.tree.leaves(tree)
    for description, sums in zip(described.values(), _sums(leaves), strict=True):
        description["digest"] = "".join(f"{int(word):08x}" for word in np.asarray(sums))
    return described


def _sums(leaves: list[Array]) -> list[Array]:
    """Uint32 [2] of each leaf, computed on the leaf's devices and replicated."""
    meshes = [leaf.sharding.mesh for leaf in leaves if hasattr(leaf.sharding, "mesh")]
    return _sums_on(meshes[0] if meshes else None)(leaves)


@functools.cache
def _sums_on(mesh: jax.sharding.Mesh | None) -> Callable[[list[Array]], list[Array]]:
    replicated = None
    if mesh is not None:
        replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda leaves: [_sum(leaf) for leaf in leaves], out_shardings=replicated)


def _sum(leaf: Array) -> Array:
    words = _words(leaf)
    # The index of each word, without a reshape, which would communicate between devices.
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index + along * jnp.uint32(stride)
    mixed = mix(words + index * jnp.uint32(GOLDEN))
    # One pass for both sums: on a CPU about twenty times as fast as two passes.
    sums = jax.lax.reduce(
        (mixed, mixed * (2 * index + 1)),
        (jnp.uint32(0), jnp.uint32(0)),
        lambda left, right: (left[0] + right[0], left[1] + right[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def _words(leaf: Array) -> Array:
    """The bits of a leaf as uint32; 64-bit entries get a last axis of size 2."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    bits = _bits(leaf.dtype)
    if bits == 64:
        return jax.lax.bitcast_convert_type(leaf, jnp.uint32)
    unsigned = jax.lax.bitcast_convert_type(leaf, f"uint{bits}")
    return unsigned.astype(jnp.uint32)


def _bits(dtype: jnp.dtype) -> int:
    info = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return int(info(dtype).bits)
