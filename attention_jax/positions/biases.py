"""Biases of the logits as functions of position: ALiBi, tables of distances, forget gates.

A `Bias` never stores its [T, S] table: it computes the values of a tile from the tile's positions,
forward and backward, and its arrays are differentiable. Biases add up with `+`, are pytrees, and
can replace a float array [*B, T, S] with every score. Your own is a class with one method: `Bias`.
"""

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import accumulator_dtype, float_array, pad_rank, same_rank
from attention_jax.core.checks import check_integer
from attention_jax.positions.buckets import check_buckets, relative_position_bucket
from attention_jax.positions.contract import Bias
from attention_jax.positions.function import array_field, position_dataclass, take

Array = jax.Array


class RelativeBias(Bias):
    """Base of biases that depend only on the distance j - i: define `of_distance`.

    A tile of t queries and s keys has t + s - 1 distances. `of_distance` computes only these, and
    its gradient is a sum along diagonals, without a scatter.
    """

    def of_distance(self, distances: Array) -> Array:
        """The bias at each distance j - i, int [n] -> float [..., n]."""
        raise NotImplementedError(f"{type(self).__name__} must define of_distance(distances)")

    def at(self, query_positions: Array, key_positions: Array) -> Array:
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


@position_dataclass
class AlibiBias(Bias):
    """b_ij = -slope |i - j|"""

    slopes: Array = array_field()

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        # Not a `RelativeBias`: a value for each pair costs no more than its distance.
        dtype = accumulator_dtype(self.slopes)  # 16-bit floats do not hold every distance
        distances = jnp.abs(query_positions[:, None] - key_positions[None, :]).astype(dtype)
        slopes, distances = same_rank(self.slopes.astype(dtype)[..., None, None], distances)
        return -slopes * distances


@position_dataclass
class TableBias(RelativeBias):
    """b_ij = table[clip(j - i, -R, R) + R], a table of 2 R + 1 entries"""

    table: Array = array_field("2 R + 1")

    def of_distance(self, distances: Array) -> Array:
        radius = self.table.shape[-1] // 2
        return take(self.table, jnp.clip(distances, -radius, radius) + radius, axis=-1)


@position_dataclass
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


@position_dataclass
class ForgettingBias(Bias):
    """b_ij = c_i - c_j"""

    sums: Array = array_field("T")  # c

    def check(self, batch_shape: tuple[int, ...], target_length: int, source_length: int) -> None:
        if len(sizes := {self.sums.shape[-1], target_length, source_length}) > 1:
            raise ValueError(f"log_gates must be [*B, T] with T = S; got different sizes {sizes}")
        super().check(batch_shape, target_length, source_length)

    def at(self, query_positions: Array, key_positions: Array) -> Array:
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
    check_buckets(table.shape[-1] if table.ndim else 0, max_distance, bidirectional)
    return BucketBias(bool(bidirectional), int(max_distance), table)


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
