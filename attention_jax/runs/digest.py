"""Digests of a state: two that are equal have the same bits, on whatever devices they lie.

Each 32-bit word w_i of a leaf goes through a bijection that depends on its index i, and two sums of
the results are taken modulo 2^32. With G and `mix` of `bits.py`,

    m_i = mix(w_i + i G),    digest = (sum_i m_i, sum_i (2 i + 1) m_i).

Integer sums do not depend on their order, so that the digest does not depend on how a leaf is cut
up over devices, and each device adds up what it has. A change of any one word is always seen.
Another is missed with a chance of 2^-63, or, if it is of two words whose distance is a multiple of
2^k and of no higher power, of 2^-(63 - k). It guards against damage, not against an adversary.
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
Description = dict[str, Any]  # of a leaf: {"shape", "dtype"} and, once it is known, "digest"


def describe(tree: Any) -> dict[str, Description]:
    """Each leaf under its path, "params.embedding" say: {"shape": [...], "dtype": "float32"}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): {
            "shape": list(leaf.shape),
            "dtype": str(leaf.dtype),
        }
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def digests(tree: Any) -> dict[str, Description]:
    """What `describe` says, and "digest": 16 hexadecimal digits.

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
    """Uint32 [2] of each leaf, computed where it lies and the same on every device."""
    meshes = [leaf.sharding.mesh for leaf in leaves if hasattr(leaf.sharding, "mesh")]
    return _sums_on(meshes[0] if meshes else None)(leaves)


@functools.cache
def _sums_on(mesh: jax.sharding.Mesh | None) -> Callable[[list[Array]], list[Array]]:
    everywhere = None
    if mesh is not None:
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda leaves: [_sum(leaf) for leaf in leaves], out_shardings=everywhere)


def _sum(leaf: Array) -> Array:
    words = _words(leaf)
    # The index, without a reshape that would move what lies on other devices.
    index = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index = index + along * jnp.uint32(stride)
    mixed = mix(words + index * jnp.uint32(GOLDEN))
    # Both in one pass, which a CPU runs some twenty times as fast as two.
    sums = jax.lax.reduce(
        (mixed, mixed * (2 * index + 1)),
        (jnp.uint32(0), jnp.uint32(0)),
        lambda one, other: (one[0] + other[0], one[1] + other[1]),
        tuple(range(words.ndim)),
    )
    return jnp.stack(sums)


def _words(leaf: Array) -> Array:
    """The bits of a leaf as uint32, with an axis of size 2 at the end where an entry has 64."""
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
