"""T5's buckets of distances: how far a key is from its query, to a logarithmic precision.

Source: Raffel et al. 2020, section 2.1, and their published code.
"""

import functools

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import integer_array
from attention_jax.core.checks import check_integer

Array = jax.Array


def relative_position_bucket(
    distances: Array, *, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> Array:
    """T5's buckets: a bucket for each of the shortest distances, then logarithmically wider ones.

    With n buckets per side and m = n // 2, distance d >= 0 has, in exact arithmetic, the bucket

        d                                                                   for d < m,
        min(m + floor(log(d / m) / log(max_distance / m) (n - m)), n - 1)   for d >= m.

    Args:
        distances: int, j - i.
        buckets: number of buckets, both sides together; those for j > i are the last.
        max_distance, bidirectional: as in `t5_bias`.

    Returns:
        int32, 0 <= bucket < `buckets`, same shape.

    Raises:
        ValueError: distances are not integers, there are fewer than 2 buckets per side, or
            `max_distance` is not greater than the distances that have their own bucket.

    >>> relative_position_bucket(jnp.array([0, -1, -9, -500, 1])).tolist()
    [0, 1, 8, 15, 17]
    """
    side, max_distance = check_buckets(buckets, max_distance, bidirectional), int(max_distance)
    distances = integer_array("distances", distances)  # the least integer has no negative
    distances = jnp.clip(distances, -max_distance, max_distance).astype(jnp.int32)
    sizes = jnp.abs(distances) if bidirectional else jnp.maximum(-distances, 0)
    starts = jnp.array(_bucket_starts(side, max_distance), jnp.int32)
    bucket = jnp.searchsorted(starts, sizes, side="right", method="compare_all")
    return bucket + jnp.where(distances > 0, side, 0) if bidirectional else bucket


@functools.lru_cache(maxsize=64)
def _bucket_starts(side: int, max_distance: int) -> list[int]:
    """The smallest distance in each bucket of one direction after the first, in integers.

    Bucket m + i starts at the smallest d with (d / m)^(n - m) >= (max_distance / m)^i.
    """
    exact = side // 2
    wide, starts = side - exact, list(range(1, exact + 1))
    for i in range(1, wide):
        start = round(exact * (max_distance / exact) ** (i / wide))  # or one too small
        starts.append(start + (start**wide * exact**i < max_distance**i * exact**wide))
    return starts


def check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The number of buckets for each direction."""
    buckets = check_integer("buckets", buckets, least=0)
    max_distance = check_integer("max_distance", max_distance, most=2**31 - 1)
    side = buckets // 2 if bidirectional else buckets
    if side < 2 or (bidirectional and buckets % 2):
        raise ValueError(
            "buckets must be at least 2 per side, and even if bidirectional; got"
            f" {buckets} with bidirectional={bidirectional}"
        )
    if max_distance <= side // 2:
        raise ValueError(
            f"max_distance must be greater than {side // 2}, the number of distances with their own"
            f" bucket; got {max_distance}"
        )
    return side
