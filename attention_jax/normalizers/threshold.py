"""The threshold tau of each row, with which sum_j weight(x_j - tau) = 1.

With x shifted so that its largest entry is 0, and n keys,

    -inverse(1) <= tau <= -inverse(1 / n),

since one key alone reaches the sum 1 at the lower end, and n equal keys at the upper end. Newton's
method runs on G(tau) = inverse(sum_j weight(x_j - tau)) - inverse(1), which is a line where all
logits with a positive weight are equal. (For softmax it is always a line, for sparsemax it is the
sum itself, as in Michelot 1986.) For entmax with alpha <= 2, G is convex: it is a norm of rectified
lines. Then the method converges from the lower end and never passes the root.

Derivatives: the differential of the equation gives

    dtau = sum_j (s_j dx_j + dweight_j) / sum_j s_j,   s_j = weight'(x_j - tau),

with dweight_j through the parameters. One step of Newton's method from a constant tau at the root
has exactly this derivative; k steps have the right derivatives up to order 2^k - 1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.family import Family
from attention_jax.normalizers.row_sums import RowShift

Array = jax.Array
# fold(update, carry): the last carry after `carry = update(carry, logits)` for every tile of keys.
Fold = Callable[[Callable[[Any, Array], Any], Any], Any]

REFINEMENTS = 3  # differentiable steps: derivatives up to the seventh order


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


def find_shift(
    family: Family, fold: Fold, zeros: Array, num_keys: int, *, differentiable: bool
) -> RowShift:
    """The largest logit of each of t rows, and the threshold after it.

    Args:
        family: makes the weights, which sum to one.
        fold: visits all keys of the rows.
        zeros: [t], of the compute dtype.
        num_keys: an upper bound on the keys of a row.
        differentiable: whether JAX differentiates the result, in linear memory.
    """
    constant, one = family.constant(), jnp.ones_like(zeros)

    def constant_fold(update: Callable[[Any, Array], Any], carry: Any) -> Any:
        def constant_update(carry: Any, logits: Array) -> Any:
            return update(carry, jax.lax.stop_gradient(logits))

        return jax.lax.stop_gradient(fold(constant_update, carry))

    def newton(family: Family, fold: Fold, tau: Array) -> tuple[Array, Array]:
        """The sum of the weights at tau, and tau after a step."""

        def add(sums: tuple[Array, Array], logits: Array) -> Any:
            tile = family.weights_and_slopes(RowShift(reference, tau).shifted(logits))
            return jax.tree.map(lambda old, new: old + jnp.sum(new, axis=1), sums, tile)

        total, slope = fold(add, (zeros, zeros))
        return total, tau + _newton_step(family, total, slope)

    def visit(index: Array, bracket: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        lower, upper, tau = bracket
        total, after = newton(constant, constant_fold, tau)
        below = total >= 1
        lower, upper = jnp.where(below, tau, lower), jnp.where(below, upper, tau)
        inside = (after >= lower) & (after <= upper)
        if not family.normalizer.convex:  # every other visit halves the bracket; the last does not
            inside &= index % 2 == 1
        return lower, upper, jnp.where(inside, after, lower + (upper - lower) / 2)

    def refine(tau: Array, _: None) -> tuple[Array, None]:
        return newton(family, fold, tau)[1], None

    largest = constant_fold(
        lambda largest, logits: jnp.maximum(largest, jnp.max(logits, 1, initial=-jnp.inf)),
        zeros - jnp.inf,
    )
    reference = jnp.where(largest == -jnp.inf, 0, largest)
    lower, upper = (-constant.inverse(weight) for weight in (one, one / max(num_keys, 1)))
    visits = num_visits(family.normalizer, zeros.dtype)
    tau = jax.lax.fori_loop(0, visits, visit, (lower, upper, lower))[2]
    tau = jax.lax.stop_gradient(tau)
    if differentiable:
        tau, _ = jax.lax.scan(refine, tau, None, length=REFINEMENTS)
    return RowShift(reference, tau)


def _newton_step(family: Family, total: Array, slope: Array) -> Array:
    """The step of tau, from the sums of weights and of slopes at tau; 0 where they are 0."""
    valid = (total > 0) & (slope > 0)
    total, slope = jnp.where(valid, total, 1), jnp.where(valid, slope, 1)
    one = jnp.ones_like(total)
    inverse, steepness = jax.jvp(family.inverse, (total,), (one,))
    return jnp.where(valid, (inverse - family.inverse(one)) / (steepness * slope), 0)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def threshold_of_rows(normalizer: Any, params: Any, logits: Array) -> Array:
    """The thresholds [T] of logits [T, S] whose largest entries are 0, differentiable by JAX."""
    zeros = varying_as(jnp.zeros(logits.shape[0], logits.dtype), logits, params)

    shift = find_shift(
        Family(normalizer, params),
        lambda update, carry: update(carry, logits),
        zeros,
        logits.shape[1],
        differentiable=False,
    )
    assert shift.threshold is not None  # the weights sum to one
    return shift.threshold


@threshold_of_rows.defjvp
def _threshold_jvp(normalizer, primals, tangents):
    params, logits = primals
    tau = threshold_of_rows(normalizer, params, logits)

    def total(params, logits):
        return jnp.sum(Family(normalizer, params).weight(logits - tau[:, None]), axis=1)

    _, dtotal = jax.jvp(total, primals, tangents)
    _, slopes = Family(normalizer, params).weights_and_slopes(logits - tau[:, None])
    slope = jnp.sum(slopes, axis=1)
    return tau, jnp.where(slope != 0, dtotal / jnp.where(slope != 0, slope, 1), 0)
