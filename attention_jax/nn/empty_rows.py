"""Functions, gates and projections of the output of attention, at queries without keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp

Array = jax.Array


def project_rows(projection: Callable[[Array], Array], rows: Array, feature_ndim: int) -> Array:
    """projection(rows), where rows of zeros send no NaN to the gradient of the parameters.

    The output of attention is 0 for a query without keys. A loss that masks this row only after a
    division or a logarithm sends a NaN or inf cotangent there. It must not reach the parameters of
    the projection, whose gradient is a sum over rows. Every finite cotangent passes unchanged.

    Args:
        projection: from [*B, T, ...] to [*B, T, D].
        rows: float [*B, T, ...], the output of attention.
        feature_ndim: number of axes of `rows` after T.
    """
    zero = jnp.all(rows == 0, axis=tuple(range(-feature_ndim, 0)))
    return _finite_where(projection(rows), zero)


def gated_rows(logits: Array, rows: Array, feature_ndim: int) -> Array:
    """rows * sigmoid(logits), which is 0 for rows of zeros, also where the logits are NaN.

    Args:
        logits: float [*B, T, ...], those of the gate, computed from the queries.
        rows: float [*B, T, ...], the output of attention.
        feature_ndim: number of axes of `rows` after T.

    Source: Qiu et al. 2025, section 2.2.
    """
    zero = jnp.all(rows == 0, axis=tuple(range(-feature_ndim, 0)), keepdims=True)
    return rows * jax.nn.sigmoid(jnp.where(zero & ~jnp.isfinite(logits), 0, logits))


def modified_rows(modify: Callable[..., Array], rows: Array, values: Array) -> Array:
    """modify(rows, values) of each token, and 0 for rows of zeros, whatever the values are.

    Args:
        modify: from the output [N, D] and the value [N, D] of a token to another output [N, D].
        rows: float [*B, T, N, D], the output of attention.
        values: float [*B, T, N, D], those of the queries' own tokens.
    """
    zero = jnp.all(rows == 0, axis=(-2, -1), keepdims=True)
    for _ in range(rows.ndim - 2):
        modify = jax.vmap(modify)
    # Ones stand in for the tokens of empty rows: a division by a length of 0 would send NaN.
    rows = modify(*(jnp.where(zero, 1, array.astype(rows.dtype)) for array in (rows, values)))
    return jnp.where(zero, 0, rows)


def _same(output: Array, zero: Array) -> Array:
    return output


_finite_where = custom_vjp(_same, twin=_same)
_finite_where.defvjp(
    lambda output, zero: (output, zero),
    lambda zero, doutput: (jnp.where(zero[..., None] & ~jnp.isfinite(doutput), 0, doutput), None),
)
