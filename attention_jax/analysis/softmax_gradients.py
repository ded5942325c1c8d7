"""The gradient of the softmax, row by row: its Jacobian, the Jacobian's norm, and its products.

A row of weights a = softmax(l) has the Jacobian

    J = da / dl = diag(a) - a a^T,    J_jk = a_j (delta_jk - a_k),

symmetric and singular (J 1 = 0: adding a constant to all logits changes nothing), so that a
cotangent da of the weights becomes

    dl = J da,    dl_j = a_j (da_j - sum_k a_k da_k).

J is largest, |J|_F = 1/2, where two keys have equal weights 1/2, and 0 where one key has weight 1:
the row is saturated. All of these are 0 for a row of zeros, a query that may attend to no key.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, float_array

Array = jax.Array


def softmax_jacobian(weights: Array) -> Array:
    """The derivative of each weight of a row with respect to each logit of the row, materialised.

        J_jk = d weights_j / d logits_k = weights_j (delta_jk - weights_k)

    Args:
        weights: float [..., S], rows that sum to 1, or are 0.

    Returns:
        J [..., S, S] in float32, or float64 if the weights are.

    Raises:
        ValueError: weights are not floating-point, or have no axis.

    >>> softmax_jacobian(jnp.array([0.75, 0.25]))
    Array([[ 0.1875, -0.1875],
           [-0.1875,  0.1875]], dtype=float32)

    Source: Dao et al. 2022, appendix B.2 (their P_i: is a row of weights).
    """
    weights = _float_rows("weights", weights)
    outer = weights[..., :, None] * weights[..., None, :]
    diagonal = weights * (1 - weights)
    eye = jnp.broadcast_to(jnp.eye(weights.shape[-1], dtype=bool), outer.shape)
    return jnp.where(eye, diagonal[..., None, :], -outer)


def softmax_jacobian_norm(weights: Array) -> Array:
    """The Frobenius norm of each row's Jacobian, in O(S), without forming the Jacobian.

        |J|_F^2 = sum_j a_j^2 - 2 sum_j a_j^3 + (sum_j a_j^2)^2

    It lies between 0 and 1/2. Its relative error is a few roundings, also for rows that are nearly
    one-hot, where the sums above would cancel.

    Args:
        weights: float [..., S], rows that sum to 1, or are 0.

    Returns:
        [...] in float32, or float64 if the weights are.

    Raises:
        ValueError: weights are not floating-point, or have no axis.

    >>> weights = jnp.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [1.0, 1e-20, 0.0]])
    >>> jax.jit(softmax_jacobian_norm)(weights)
    Array([5.e-01, 0.e+00, 2.e-20], dtype=float32)

    Source: the norm of the Jacobian in Dao et al. 2022, appendix B.2.
    """
    weights = _float_rows("weights", weights)
    if weights.shape[-1] == 0:
        return jnp.zeros(weights.shape[:-1], weights.dtype)
    # |J|_F^2 = sum_j a_j^2 ((1 - a_j)^2 + P - a_j^2) with P = sum_k a_k^2 has no negative term. But
    # for the largest weight a_m, 1 - a_m and P - a_m^2 would be rounding errors at saturation, and
    # are computed from the remainder r = 1 - a_m of the row. With a_j = r b_j for j != m,
    #     |J|_F^2 = r^2 (a_m^2 (1 + sum_j b_j^2) + sum_j b_j^2 ((1 - a_j)^2 + P - a_j^2)),
    # where nothing underflows.
    is_largest = jax.nn.one_hot(jnp.argmax(weights, axis=-1), weights.shape[-1], dtype=bool)
    smaller_weights = jnp.where(is_largest, 0, weights)
    remainder = jnp.sum(smaller_weights, axis=-1, keepdims=True)
    shares = smaller_weights / jnp.where(remainder == 0, 1, remainder)
    squares = weights * weights
    total = jnp.sum(squares, axis=-1, keepdims=True)
    largest_term = jnp.max(squares, axis=-1) * (1 + jnp.sum(shares * shares, axis=-1))
    other_terms = jnp.sum(shares * shares * ((1 - weights) ** 2 + total - squares), axis=-1)
    remainder = remainder[..., 0]
    return remainder * jnp.sqrt(jnp.where(remainder == 0, 1, largest_term + other_terms))


def softmax_vjp(weights: Array, dweights: Array) -> Array:
    """The gradient of the logits, from the gradient of the weights.

        dlogits_j = weights_j (dweights_j - sum_k weights_k dweights_k)

    Args:
        weights: float [..., S], rows that sum to 1, or are 0.
        dweights: float [..., S], as many as weights; any value, including NaN, where the weight is
            0.

    Returns:
        dlogits [..., S] in float32, or float64 if any input is; each row sums to 0.

    Raises:
        ValueError: an argument is not floating-point, or the shapes differ.

    >>> softmax_vjp(jnp.array([0.5, 0.5, 0.0]), jnp.array([-1.0, -3.0, jnp.nan])).tolist()
    [0.5, -0.5, 0.0]

    Source: Dao et al. 2022, appendix B.2 (their dP, dS, D_i are dweights, dlogits and the sum).
    """
    weights, dweights = _float_rows("weights", weights), _float_rows("dweights", dweights)
    if weights.shape != dweights.shape:
        raise ValueError(
            f"dweights must be {list(weights.shape)} to match weights; got {list(dweights.shape)}"
        )
    dtype = accumulator_dtype(weights, dweights)
    weights, dweights = weights.astype(dtype), dweights.astype(dtype)
    dweights = jnp.where(weights > 0, dweights, 0)
    mean = jnp.sum(weights * dweights, axis=-1, keepdims=True)
    return weights * (dweights - mean)


def _float_rows(name: str, value: Any) -> Array:
    array = float_array(name, value)
    if array.ndim < 1:
        raise ValueError(f"{name} must be [..., S]; got a scalar")
    return array.astype(accumulator_dtype(array))
