"""The threshold tau of each row, with which sum_j weight(x_j - tau) = 1.

With x shifted so that its largest entry is 0, and n keys,

    -inverse(1) <= tau <= -inverse(1 / n),

since one key alone reaches the sum 1 at the lower end, and n equal keys at the upper end. Newton's
method runs on G(tau) = inverse(sum_j weight(x_j - tau)) - inverse(1), which is a line where all
logits with a positive weight are equal. (For softmax it is always a line, for sparsemax it is the
sum itself, as in Michelot 1986.) For entmax with alpha <= 2, G is convex: it is a norm of rectified
lines. Then the method converges from the lower end and never passes the root.

The search is not differentiated. The differential of the equation gives

    dtau = sum_j (s_j dx_j + dweight_j) / sum_j s_j,   s_j = weight'(x_j - tau),

with dweight_j through the parameters, and in the same way every higher derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.normalizers.rows import Family, RowShift

Array = jax.Array
# fold(update, carry): the last carry after `carry = update(carry, logits)` for every tile of keys.
Fold = Callable[[Callable[[Any, Array], Any], Any], Any]


def num_visits(normalizer: Any, dtype: Any) -> int:
    """How often the search for the thresholds visits all keys; 0 where there is no search.

    The threshold of softmax, the logsumexp, needs none.
    """
    family = normalizer.family
    if family.is_softmax or not family.sums_to_one:
        return 0
    double = jnp.dtype(dtype) == jnp.float64
    if family.convex:
        return 16 if double else 12
    return 72 if double else 36


def find_shift(family: Family, fold: Fold, zeros: Array, num_keys: int) -> RowShift:
    """The largest logit of each of t rows, and the threshold after it, differentiable by JAX.

    Args:
        family: makes the weights, which sum to one.
        fold: visits all keys of the rows.
        zeros: [t], of the compute dtype.
        num_keys: an upper bound on the keys of a row.
    """

    def larger(largest: Array, logits: Array) -> Array:
        return jnp.maximum(largest, jax.lax.stop_gradient(jnp.max(logits, 1, initial=-jnp.inf)))

    reference = fold(larger, zeros - jnp.inf)
    reference = jnp.where(reference == -jnp.inf, 0, reference)

    def total_above_one(tau: Array) -> Array:
        def add(total: Array, logits: Array) -> Array:
            shifted = RowShift(reference, tau).shifted(logits)
            return total + jnp.sum(family.weight(shifted), axis=1)

        return fold(add, zeros) - 1

    def visit(index: Array, bracket: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        def add(sums: tuple[Array, Array], logits: Array) -> Any:
            tile = family.weights_and_slopes(RowShift(reference, tau).shifted(logits))
            return jax.tree.map(lambda old, new: old + jnp.sum(new, axis=1), sums, tile)

        lower, upper, tau = bracket
        total, slope = fold(add, (zeros, zeros))
        below = total >= 1
        lower, upper = jnp.where(below, tau, lower), jnp.where(below, upper, tau)
        after = tau + _newton_step(family, total, slope)
        inside = (after >= lower) & (after <= upper)
        if not family.normalizer.convex:  # every other visit halves the bracket; the last does not
            inside &= index % 2 == 1
        return lower, upper, jnp.where(inside, after, lower + (upper - lower) / 2)

    def search(_: Any, lower: Array) -> Array:
        upper = -family.inverse(jnp.full_like(zeros, 1 / max(num_keys, 1)))
        visits = num_visits(family.normalizer, zeros.dtype)
        return jax.lax.fori_loop(0, visits, visit, (lower, upper, lower))[2]

    def divide(slope_times: Callable[[Array], Array], numerator: Array) -> Array:
        slope = slope_times(jnp.ones_like(numerator))
        return jnp.where(slope != 0, numerator / jnp.where(slope != 0, slope, 1), 0)

    lower = -family.inverse(jnp.ones_like(zeros))
    return RowShift(reference, jax.lax.custom_root(total_above_one, lower, search, divide))


def _newton_step(family: Family, total: Array, slope: Array) -> Array:
    """The step of tau, from the sums of weights and of slopes at tau; 0 where they are 0."""
    valid = (total > 0) & (slope > 0)
    total, slope = jnp.where(valid, total, 1), jnp.where(valid, slope, 1)
    one = jnp.ones_like(total)
    inverse, steepness = jax.jvp(family.inverse, (total,), (one,))
    return jnp.where(valid, (inverse - family.inverse(one)) / (steepness * slope), 0)
