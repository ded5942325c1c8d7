"""Biases of the logits as functions of position: ALiBi, T5's buckets, tables, forget gates.

A `Bias` never stores its [T, S] table: it computes the values of a tile from the tile's positions,
forward and backward, and its arrays are differentiable. Biases add up with `+`, are pytrees, and
can replace a float array [*B, T, S] with every score. Your own is a class with one method: `Bias`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import accumulator_dtype, float_array, integer_array
from attention_jax.core.checks import check_integer
from attention_jax.positions.position_functions import (
    Joined,
    PositionFunction,
    Shifted,
    Stored,
    array_field,
    check_decorated,
    pad_rank,
    same_rank,
    take,
)
from attention_jax.positions.position_functions import position_dataclass as bias_dataclass

Array = jax.Array


class Bias(PositionFunction):
    """Base of all biases: a float function of (query position, key position).

    A subclass, decorated with `bias_dataclass`, defines `values`. Its fields made by `array_field`
    are differentiable. Biases add: `alibi_bias(slopes) + bias`, with arrays [*B, T, S] too.

    >>> @bias_dataclass
    ... class Late(Bias):
    ...     rate: Array = array_field()
    ...     def values(self, query_positions, key_positions):
    ...         return self.rate * key_positions[None, :].astype(float)
    >>> Late(jnp.array(0.5)).materialize(2, 3).tolist()
    [[0.0, 0.5, 1.0], [0.0, 0.5, 1.0]]
    >>> float(jax.grad(lambda rate: Late(rate).materialize(2, 3).sum())(0.5))
    6.0
    """

    kind = "bias"
    __array_ufunc__ = None  # so that `numpy_array + bias` calls `__radd__`

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        """The bias of the logit of query i and key j.

        Args:
            query_positions: int [t], i >= 0, consecutive; T or larger in a padded tile.
            key_positions: int [s], j >= 0, consecutive.

        Returns:
            float, broadcastable to [..., t, s]; its leading axes are those of the bias's arrays.
        """
        raise NotImplementedError(f"{type(self).__name__} must define values(query, key)")

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.values(query_positions, key_positions)

    def __add__(self, other: Bias | Array) -> Bias:
        return SumBias(self, as_bias(other))

    def __radd__(self, other: Array) -> Bias:
        return SumBias(as_bias(other), self)


@bias_dataclass
class DenseBias(Stored, Bias):
    """A stored table; axes T and S may have size 1."""

    values = Stored.at


@bias_dataclass
class SumBias(Joined, Bias):
    """The sum of two biases."""

    values, join = Joined.at, staticmethod(jnp.add)


@bias_dataclass
class ShiftedBias(Shifted, Bias):
    """A bias of longer sequences, at the positions of `shifts`."""

    values = Shifted.at


class RelativeBias(Bias):
    """Base of biases that depend only on the distance j - i: define `of_distance`.

    A tile of t queries and s keys has t + s - 1 distances. `of_distance` computes only these, and
    its gradient is a sum along diagonals, without a scatter.
    """

    def of_distance(self, distances: Array) -> Array:
        """The bias at each distance j - i, int [n] -> float [..., n]."""
        raise NotImplementedError(f"{type(self).__name__} must define of_distance(distances)")

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        t, s = query_positions.size, key_positions.size
        if 0 in (t, s):
            return jnp.zeros((t, s))
        by_pair = is_symbolic_dim(t) or is_symbolic_dim(s)
        if by_pair:
            distances = (key_positions[None, :] - query_positions[:, None]).reshape(t * s)
        else:
            distances = key_positions[0] - query_positions[-1] + jnp.arange(t + s - 1)
        values = self.of_distance(distances)
        # `take` returns one entry for a table with one entry.
        values = jnp.broadcast_to(values, (*values.shape[:-1], *distances.shape))
        if by_pair:
            return values.reshape(*values.shape[:-1], t, s)
        return _from_diagonals(values, t, s)


def _from_diagonals(diagonals: Array, t: int, s: int) -> Array:
    """[..., t + s - 1] -> [..., t, s] with entry (i, j) = diagonals[j - i + t - 1].

    Row i is the diagonals shifted by i: in rows of length t + s - 1 read from a sequence of period
    t + s, each row begins one entry earlier than the row before.
    """
    batch = diagonals.shape[:-1]
    period = jnp.pad(diagonals, [(0, 0)] * len(batch) + [(0, 1)])
    rows = jnp.broadcast_to(period[..., None, :], (*batch, t, t + s))
    rows = rows.reshape(*batch, t * (t + s))[..., : t * (t + s - 1)]
    return rows.reshape(*batch, t, t + s - 1)[..., t - 1 :]


@bias_dataclass
class AlibiBias(Bias):
    """b_ij = -slope |i - j|"""

    slopes: Array = array_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        # Not a `RelativeBias`: a value for each pair costs no more than its distance.
        dtype = accumulator_dtype(self.slopes)  # 16-bit floats do not hold every distance
        distances = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(dtype)
        slopes, distances = same_rank(self.slopes.astype(dtype)[..., None, None], distances)
        return -slopes * distances


@bias_dataclass
class TableBias(RelativeBias):
    """b_ij = table[clip(j - i, -R, R) + R], a table of 2 R + 1 entries"""

    table: Array = array_field("2 R + 1")

    def of_distance(self, distances: Array) -> Array:
        radius = self.table.shape[-1] // 2
        return take(self.table, jnp.clip(distances, -radius, radius) + radius, axis=-1)


@bias_dataclass
class BucketBias(RelativeBias):
    """b_ij = table[bucket(j - i)], with wider buckets for larger distances"""

    bidirectional: bool
    max_distance: int
    table: Array = array_field("buckets")

    def of_distance(self, distances: Array) -> Array:
        buckets = relative_position_bucket(
            distances,
            buckets=self.table.shape[-1],
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )
        return take(self.table, buckets, axis=-1)


@bias_dataclass
class ForgettingBias(Bias):
    """b_ij = c_i - c_j"""

    sums: Array = array_field("T")  # c

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        if len(sizes := {self.sums.shape[-1], target_length, source_length}) > 1:
            raise ValueError(f"log_gates must be [*B, T] with T = S; got different sizes {sizes}")
        super().check(batch_shape, target_length, source_length)

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        queries = take(self.sums, query_positions, axis=-1)[..., :, None]
        return queries - take(self.sums, key_positions, axis=-1)[..., None, :]


def alibi_bias(slopes: Array) -> Bias:
    """Attention with linear biases: b_ij = -slope |i - j|

    Args:
        slopes: float, with axes that broadcast to *B: `alibi_slopes(N)` [N] for inputs
            [B, N, T, D].

    Returns:
        a `Bias`, differentiable in the slopes. Distances and values are float32, or float64.

    Raises:
        ValueError: slopes are not floating-point.

    >>> alibi_bias(jnp.array(0.5)).materialize(2, 3).tolist()
    [[-0.0, -0.5, -1.0], [-0.5, -0.0, -0.5]]

    Source: Press, Smith and Lewis 2022, section 3 (for causal attention, where |i - j| is i - j).
    """
    return AlibiBias(float_array("slopes", slopes))


def alibi_slopes(num_heads: int) -> Array:
    """A slope for each head, a geometric sequence down to 2^-8.

        slope_n = 2^(-8 n / N), n = 1 ... N

    for N a power of two. For other N, the slopes of the next lower power of two, and then every
    second slope of the next higher power of two.

    Args:
        num_heads: N, at least 1.

    Returns:
        float32 [N].

    Raises:
        ValueError: `num_heads` is not a positive integer.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press, Smith and Lewis 2022, section 3; for other N their published code.
    """
    num_heads = check_integer("num_heads", num_heads)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * n / lower) for n in range(1, lower + 1)]
    slopes += [2.0 ** (-8 * n / (2 * lower)) for n in range(1, 2 * (num_heads - lower) + 1, 2)]
    return jnp.array(slopes, jnp.float32)


def relative_bias(table: Array) -> Bias:
    """A learned number for each distance: b_ij = table[clip(j - i, -R, R) + R]

    Args:
        table: float [*B, 2 R + 1], from distance -R (the key is R positions before the query) to
            R; [N, 2 R + 1] for inputs [B, N, T, D], a table for each head.

    Returns:
        a `Bias`, differentiable in the table.

    Raises:
        ValueError: the table is not floating-point, or has an even number of entries.

    >>> relative_bias(jnp.array([-1.0, 0.0, 2.0])).materialize(2, 3).tolist()
    [[0.0, 2.0, 2.0], [-1.0, 0.0, 2.0]]

    Source: Shaw, Uszkoreit and Vaswani 2018, section 3.1, with numbers instead of their relative
    vectors (as in T5); their k is R.
    """
    table = float_array("table", table)
    if table.ndim == 0 or table.shape[-1] % 2 == 0:
        raise ValueError(
            f"table must be [*B, 2 R + 1], with an odd last axis; got {list(table.shape)}"
        )
    return TableBias(table)


def t5_bias(table: Array, *, bidirectional: bool = True, max_distance: int = 128) -> Bias:
    """A learned number for each bucket of distances: b_ij = table[bucket(j - i)]

    Args:
        table: float [*B, buckets]; [N, 32] for inputs [B, N, T, D] and 32 buckets.
        bidirectional: half of the buckets are for keys after the query. False, for a causal mask:
            all buckets are for keys before it, and keys after it share the bucket of distance 0.
        max_distance: distances from this one on share the last bucket.

    Returns:
        a `Bias`, differentiable in the table.

    Raises:
        ValueError: the table is not floating-point; or as `relative_position_bucket`.

    >>> t5_bias(jnp.arange(4.0), max_distance=8).materialize(1, 4).tolist()
    [[0.0, 3.0, 3.0, 3.0]]

    Source: Raffel et al. 2020, section 2.1.
    """
    table = float_array("table", table)
    _check_buckets(table.shape[-1] if table.ndim else 0, max_distance, bidirectional)
    return BucketBias(bool(bidirectional), int(max_distance), table)


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

    Source: Raffel et al. 2020, section 2.1, and their published code.
    """
    side, max_distance = _check_buckets(buckets, max_distance, bidirectional), int(max_distance)
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


def forgetting_bias(log_gates: Array) -> Bias:
    """Forget gates f between 0 and 1: b_ij = c_i - c_j with c_i = log f_0 + ... + log f_i

    Under `causal_mask()` query i forgets what key j holds by the factor f_j+1 ... f_i, as a
    recurrent network with these gates would. Both are positions of one sequence, T = S. c is
    summed in float32, so a bias has the rounding error of c, eps |c|.

    Args:
        log_gates: finite float [*B, T], log f, such as `jax.nn.log_sigmoid` of projected tokens.

    Returns:
        a `Bias`, differentiable in the gates.

    Raises:
        ValueError: the gates are not floating-point; attention also raises one unless T = S.

    >>> bias = forgetting_bias(jnp.log(jnp.array([0.9, 0.5, 0.25])))
    >>> jnp.exp(bias.materialize(3, 3)[2]).round(3).tolist()  # 0.5 * 0.25, 0.25, 1
    [0.125, 0.25, 1.0]

    Source: Lin et al. 2025, "Forgetting Transformer", arXiv 2503.02130.
    """
    log_gates = pad_rank(float_array("log_gates", log_gates), 1)
    return ForgettingBias(jnp.cumsum(log_gates, axis=-1, dtype=accumulator_dtype(log_gates)))


def as_bias(bias: Bias | Array) -> Bias:
    """A `Bias` unchanged; a float array broadcastable to [*B, T, S] as a `DenseBias`."""
    if isinstance(bias, Bias):
        check_decorated(bias)
        return bias
    return DenseBias(pad_rank(float_array("bias", bias), 2))


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> int:
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
