"""Projections of attention's output, at rows whose query may attend to nothing."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp

Array = jax.Array


def project_rows(projection: Callable[[Array], Array], rows: Array, feature_ndim: int) -> Array:
    """projection(rows), whose parameters get no NaN from rows that are 0.

    The row of a query without keys is 0. If a NaN or inf comes back there, because the loss leaves
    the row out only after a division or a logarithm, it must not reach the projection's parameters,
    whose gradient is a sum over rows. Every finite cotangent passes unchanged.

    Args:
        projection: from [*B, T, ...] to [*B, T, D].
        rows: float [*B, T, ...], what attention gave.
        feature_ndim: how many axes of `rows` follow T.
    """
    zero = jnp.all(rows == 0, axis=tuple(range(-feature_ndim, 0)))
    return _finite_where(projection(rows), zero)


def _same(output: Array, zero: Array) -> Array:
    del zero
    return output


_finite_where = custom_vjp(_same, twin=_same)
_finite_where.defvjp(
    lambda output, zero: (output, zero),
    lambda zero, doutput: (jnp.where(zero[..., None] & ~jnp.isfinite(doutput), 0, doutput), None),
)
