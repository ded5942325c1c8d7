"""The threshold tau of each row, with which sum_j weight(x_j - tau) = 1.

With x shifted so that its largest entry is 0, and n keys,

    -inverse(1) <= tau <= -inverse(1 / n),

since one key alone reaches the sum 1 at the lower end, and n equal keys at the upper end.

Where G(tau) = inverse(sum_j weight(x_j - tau)) - inverse(1) is convex, Newton's method converges
from the lower end and never passes the root. G is a line where all logits with a positive weight
are equal. (For softmax it is always a line, for sparsemax it is the sum itself, as in Michelot
1986.) For entmax with alpha <= 2, G is a norm of rectified lines.

Elsewhere the floats between the two ends are halved, as the integers that order them, until two
neighbours are left. Where a *steep* weight rises from 0, its slope is infinite, and the rounding of
a logit may be a tenth of the sum. The differences to the smallest logit with a weight are exact
where that matters. A first search finds this logit, and a second one counts tau from it.

The search is not differentiated. The differential of the equation gives

    dtau = sum_j (s_j dx_j + dweight_j) / sum_j s_j,   s_j = weight'(x_j - tau),

with dweight_j through the parameters, and in the same way every higher derivative. The weights are
divided by their sum, a constant for derivatives: with the exact tau it is 1 for all logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.softmax_rows import RowShift

Array = jax.Array
# over_keys(update, carry): the last carry after `carry = update(carry, logits, ...)` for every tile
# of keys. What follows the logits is for the sums of a row; the search leaves it alone.
OverKeys = Callable[[Callable[..., Any], Any], Any]


def shifted_rows(bound: Any, logits: Array) -> Array:
    """Logits [T, S] after the shift by the largest of each row and by its threshold."""
    zeros = varying_as(jnp.zeros(logits.shape[0], logits.dtype), logits, bound.params)
    shift = find_threshold(bound, lambda update, sums: update(sums, logits), zeros, logits.shape[1])
    return shift.shifted(logits)


def find_threshold(bound: Any, over_keys: OverKeys, zeros: Array, num_keys: int) -> RowShift:
    """The largest logit of each of t rows, and the threshold after it, differentiable by JAX.

    Args:
        bound: a `BoundNormalizer` whose weights sum to one.
        over_keys: visits all keys of the rows.
        zeros: [t], of the compute dtype.
        num_keys: an upper bound on the keys of a row.
    """

    def larger(largest: Array, logits: Array, *_: Any) -> Array:
        return jnp.maximum(largest, jax.lax.stop_gradient(jnp.max(logits, 1, initial=-jnp.inf)))

    reference = over_keys(larger, zeros - jnp.inf)
    reference = jnp.where(reference == -jnp.inf, 0, reference)

    def sum_of_weights(reference: Array, tau: Array) -> Array:
        def add(total: Array, logits: Array, *_: Any) -> Array:
            return total + jnp.sum(bound.weight(RowShift(reference, tau).shifted(logits)), axis=1)

        return over_keys(add, zeros)

    ones, normalizer = jnp.ones_like(zeros), bound.normalizer
    most_keys = jnp.maximum(jnp.asarray(num_keys, zeros.dtype), 1)  # `jax.export` may not know it
    lower, upper = zeros - bound.inverse(ones), zeros - bound.inverse(ones / most_keys)
    if normalizer.steep:
        tau = _halve(functools.partial(sum_of_weights, reference), lower, upper)
        first = RowShift(reference, jax.lax.stop_gradient(tau))

        def smaller(smallest: Array, logits: Array, *_: Any) -> Array:
            logits = jax.lax.stop_gradient(logits)
            weighted = jnp.where(first.shifted(logits) > 0, logits, jnp.inf)
            return jnp.minimum(smallest, jnp.min(weighted, 1, initial=jnp.inf))

        smallest = over_keys(smaller, zeros + jnp.inf)
        reference, upper = jnp.where(smallest == jnp.inf, reference, smallest), zeros

    def newton(_: Any, tau: Array) -> Array:
        def add(sums: tuple[Array, Array], logits: Array, *_: Any) -> Any:
            tile = bound.weights_and_slopes(RowShift(reference, tau).shifted(logits))
            return jax.tree.map(lambda old, new: old + jnp.sum(new, axis=1), sums, tile)

        total, slope = over_keys(add, (zeros, zeros))
        valid = (total > 0) & (slope > 0)
        total, slope = jnp.where(valid, total, 1), jnp.where(valid, slope, 1)
        inverse, steepness = jax.jvp(bound.inverse, (total,), (ones,))
        step = (inverse - bound.inverse(ones)) / (steepness * slope)
        return jnp.clip(tau + jnp.where(valid, step, 0), lower, upper)

    total_at = functools.partial(sum_of_weights, reference)

    def search(_: Any, lower: Array) -> Array:
        if normalizer.convex:
            return jax.lax.fori_loop(0, 16 if zeros.dtype == jnp.float64 else 12, newton, lower)
        return _halve(total_at, lower, upper)

    def divide(slope_times: Callable[[Array], Array], numerator: Array) -> Array:
        slope = slope_times(ones)
        return jnp.where(slope != 0, numerator / jnp.where(slope != 0, slope, 1), 0)

    tau = jax.lax.custom_root(lambda tau: total_at(tau) - 1, lower, search, divide)
    return RowShift(reference, tau)


def _halve(falling: Callable[[Array], Array], lower: Array, upper: Array) -> Array:
    """The largest float from `lower` to `upper` at which a falling function is at least 1."""
    bits = 8 * lower.dtype.itemsize

    def ordered(bits: Array) -> Array:  # the order of floats below 0 is that of their negatives
        return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)

    def visit(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = (low & high) + ((low ^ high) >> 1)  # their sum could overflow
        below = falling(jax.lax.bitcast_convert_type(ordered(middle), lower.dtype)) >= 1
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    bracket = (ordered(jax.lax.bitcast_convert_type(x, f"int{bits}")) for x in (lower, upper))
    low, _ = jax.lax.fori_loop(0, bits, visit, tuple(bracket))
    return jax.lax.bitcast_convert_type(ordered(low), lower.dtype)
