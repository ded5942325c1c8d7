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
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.meshes import varying_as
from attention_jax.normalizers.row_state import RowShift, weights_and_slopes

Array = jax.Array

REFINEMENTS = 3  # differentiable steps: derivatives up to the seventh order


def find_shift(
    normalizer: Any,
    params: Any,
    fold: Any,
    zeros: Array,
    num_keys: int,
    differentiable: bool,
) -> RowShift:
    """The largest logit of each of t rows, and the threshold after it.

    Args:
        normalizer: a `Normalizer` that sums to one.
        params: its parameters.
        fold: `fold(update, carry)` visits all keys of the rows.
        zeros: [t], of the compute dtype.
        num_keys: an upper bound on the keys of a row.
        differentiable: whether JAX differentiates the result, in linear memory.
    """
    constants = jax.lax.stop_gradient(params)

    def constant_fold(update: Any, carry: Any) -> Any:
        def constant_update(carry: Any, logits: Array) -> Any:
            return update(carry, jax.lax.stop_gradient(logits))

        return jax.lax.stop_gradient(fold(constant_update, carry))

    def sums_at(params: Any, fold: Any, shift: RowShift) -> tuple[Array, Array]:
        def add(sums: tuple[Array, Array], logits: Array) -> tuple[Array, Array]:
            tile = weights_and_slopes(normalizer, params, shift.shifted(logits))
            total, slope = (old + jnp.sum(new, axis=1) for old, new in zip(sums, tile, strict=True))
            return total, slope

        return fold(add, (zeros, zeros))

    largest = constant_fold(
        lambda largest, logits: jnp.maximum(largest, jnp.max(logits, axis=1)), zeros - jnp.inf
    )
    reference = jnp.where(largest == -jnp.inf, 0, largest)

    def visit(index: Array, bracket: Any) -> Any:
        tau = bracket[2]
        sums = sums_at(constants, constant_fold, RowShift(reference, tau))
        return next_bracket(normalizer, constants, bracket, sums, index)

    start = first_bracket(normalizer, constants, zeros, num_keys)
    visits = normalizer.visits(zeros.dtype)
    _, _, tau = jax.lax.fori_loop(0, visits, visit, start)
    tau = jax.lax.stop_gradient(tau)
    if differentiable:

        def refine(tau: Array, _: None) -> tuple[Array, None]:
            sums = sums_at(params, fold, RowShift(reference, tau))
            return tau + newton_step(normalizer, params, *sums), None

        tau, _ = jax.lax.scan(refine, tau, None, length=REFINEMENTS)
    return RowShift(reference, tau)


def first_bracket(
    normalizer: Any, params: Any, zeros: Array, num_keys: int
) -> tuple[Array, Array, Array]:
    """(lower end, upper end, first tau) for each row of the shape of `zeros`."""
    one = jnp.ones_like(zeros)
    lower = -normalizer.inverse(params, one)
    upper = -normalizer.inverse(params, one / max(num_keys, 1))
    return lower, upper, lower


def next_bracket(
    normalizer: Any,
    params: Any,
    bracket: tuple[Array, Array, Array],
    sums: tuple[Array, Array],
    index: Array,
) -> tuple[Array, Array, Array]:
    """The bracket and the next tau, after a visit with the sums of weights and slopes at tau."""
    lower, upper, tau = bracket
    below = sums[0] >= 1
    lower, upper = jnp.where(below, tau, lower), jnp.where(below, upper, tau)
    middle = lower + (upper - lower) / 2
    newton = tau + newton_step(normalizer, params, *sums)
    inside = (newton >= lower) & (newton <= upper)
    if not normalizer.convex:  # every other visit halves the bracket; the last one does not
        inside &= index % 2 == 1
    return lower, upper, jnp.where(inside, newton, middle)


def newton_step(normalizer: Any, params: Any, total: Array, slope: Array) -> Array:
    """The step of tau, from the sums of weights and of slopes at tau; 0 where they are 0."""
    valid = (total > 0) & (slope > 0)
    total, slope = jnp.where(valid, total, 1), jnp.where(valid, slope, 1)

    def inverse(weight: Array) -> Array:
        return normalizer.inverse(params, weight)

    got, steepness = jax.jvp(inverse, (total,), (jnp.ones_like(total),))
    step = (got - inverse(jnp.ones_like(total))) / (steepness * slope)
    return jnp.where(valid, step, 0)


# --- rows that are materialised ---


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def threshold_of_rows(normalizer: Any, params: Any, logits: Array) -> Array:
    """The thresholds [T] of logits [T, S] whose largest entries are 0, differentiable by JAX."""
    zeros = varying_as(jnp.zeros(logits.shape[0], logits.dtype), logits, params)

    def visit(index: Array, bracket: Any) -> Any:
        shifted = logits - bracket[2][:, None]
        weights, slopes = weights_and_slopes(normalizer, params, shifted)
        sums = jnp.sum(weights, axis=1), jnp.sum(slopes, axis=1)
        return next_bracket(normalizer, params, bracket, sums, index)

    start = first_bracket(normalizer, params, zeros, logits.shape[1])
    visits = normalizer.visits(logits.dtype)
    return jax.lax.fori_loop(0, visits, visit, start)[2]


@threshold_of_rows.defjvp
def _threshold_jvp(normalizer, primals, tangents):
    params, logits = primals
    tau = threshold_of_rows(normalizer, params, logits)

    def total(params, logits):
        return jnp.sum(normalizer.safe_weight(params, logits - tau[:, None]), axis=1)

    _, dtotal = jax.jvp(total, primals, tangents)
    _, slopes = weights_and_slopes(normalizer, params, logits - tau[:, None])
    slope = jnp.sum(slopes, axis=1)
    return tau, jnp.where(slope != 0, dtotal / jnp.where(slope != 0, slope, 1), 0)
