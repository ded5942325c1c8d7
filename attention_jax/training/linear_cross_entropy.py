"""The output layer and its cross entropy in one, a piece of the tokens at a time.

A vocabulary of V makes logits of size tokens x V, and their gradient is as large. Neither is ever
whole here: each piece's logits give its loss, and at once its gradient, and are forgotten.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import check_integer, checked_fraction

Array = jax.Array

CHUNK = 512  # tokens: on 2 CPU cores at V = 4,000, 128 to 1,278 took the same time; memory grows


class LinearCrossEntropy(NamedTuple):
    """Sums over tokens, each times its weight; float32 [] (float64 if the features are)."""

    loss: Array  # in nats, with label smoothing
    negative_log_likelihood: Array  # in nats, without; no gradient
    right: Array  # tokens whose logit no other exceeds; no gradient


def linear_cross_entropy(
    features: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    weights: Array,
    *,
    label_smoothing: float = 0.0,
    chunk: int = CHUNK,
) -> LinearCrossEntropy:
    """Cross entropy of `features @ kernel + bias` in memory linear in the tokens.

        l_m  = features_m kernel + bias
        loss = sum_m weights_m (logsumexp(l_m) - (1 - s) l_m[targets_m] - s mean(l_m))

    with s the label smoothing: the cross entropy to a distribution of 1 - s on the target and s
    on all tokens alike. The gradient is made with the loss, so that logits are computed once.
    Reverse mode of any order, and forward mode over it; no forward mode of its own.

    Args:
        features: float [M, D].
        kernel: float [D, V].
        bias: float [V], or None.
        targets: int [M], 0 to V - 1.
        weights: float [M], which get no gradient; 0 for padding, whose features get none.
        label_smoothing: 0 <= s < 1.
        chunk: tokens taken at a time.

    Returns:
        `LinearCrossEntropy`.

    Raises:
        ValueError: label_smoothing or chunk is out of range.

    >>> found = linear_cross_entropy(
    ...     jnp.ones((3, 2)), jnp.zeros((2, 4)), None, jnp.array([1, 0, 2]), jnp.ones(3)
    ... )
    >>> found.loss.round(4)  # 3 log 4
    Array(4.1589, dtype=float32)

    Source: Szegedy et al. 2016, section 7, for label smoothing (their epsilon is s).
    """
    check_integer("chunk", chunk)
    smoothing = checked_fraction("label_smoothing", label_smoothing)
    dtype = accumulator_dtype(features)
    bias = jnp.zeros(kernel.shape[1], kernel.dtype) if bias is None else bias
    weights = jax.lax.stop_gradient(weights.astype(dtype))
    features = jnp.where((weights != 0)[:, None], features, 0)  # 0 * NaN would be NaN
    arrays = (features, kernel, bias)
    chunk = max(1, min(chunk, len(targets)))
    return LinearCrossEntropy(*_sums(smoothing, chunk, arrays, targets, weights))


class _Pieces(NamedTuple):
    """Tokens in pieces of `chunk`, the last filled up with tokens of weight 0."""

    features: Array  # [n, chunk, D]
    targets: Array  # int [n, chunk]
    weights: Array  # [n, chunk]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sums(smoothing, chunk, arrays, targets, weights):
    features, kernel, bias = arrays

    def add(sums, piece):
        _, found = _of_piece(smoothing, kernel, bias, piece)
        return jax.tree.map(jnp.add, sums, found), None

    zeros = (jnp.zeros((), weights.dtype),) * 3
    return jax.lax.scan(add, zeros, _pieces(chunk, features, targets, weights))[0]


# With p = softmax(l) and q the smoothed target distribution,
#     d loss / d l_m = weights_m (p_m - q),
# from which dfeatures = dl kernel^T, dkernel = features^T dl and dbias = sum_m dl_m. The loss is a
# scalar: what comes back to it is a factor, and all of this can be made on the way.
def _sums_fwd(smoothing, chunk, arrays, targets, weights):
    features, kernel, bias = arrays
    dtype = weights.dtype

    def add(carried, piece):
        sums, dkernel, dbias = carried
        dlogits, found = _of_piece(smoothing, kernel, bias, piece)
        dfeatures = _product("cv,dv->cd", dlogits.astype(kernel.dtype), kernel, dtype)
        dlogits_as_features = dlogits.astype(features.dtype)
        dkernel += _product("cd,cv->dv", piece.features, dlogits_as_features, dtype)
        sums = jax.tree.map(jnp.add, sums, found)
        return (sums, dkernel, dbias + jnp.sum(dlogits, axis=0)), dfeatures.astype(features.dtype)

    zeros = (jnp.zeros((), dtype),) * 3
    carried = (zeros, jnp.zeros(kernel.shape, dtype), jnp.zeros(bias.shape, dtype))
    pieces = _pieces(chunk, features, targets, weights)
    (sums, dkernel, dbias), dfeatures = jax.lax.scan(add, carried, pieces)
    dfeatures = dfeatures.reshape(-1, features.shape[1])[: len(features)]
    return sums, (dfeatures, dkernel.astype(kernel.dtype), dbias.astype(bias.dtype))


def _sums_bwd(smoothing, chunk, gradients, dsums):
    del smoothing, chunk
    dloss, _, _ = dsums
    return jax.tree.map(lambda leaf: dloss.astype(leaf.dtype) * leaf, gradients), None, None


_sums.defvjp(_sums_fwd, _sums_bwd)


def _of_piece(smoothing: float, kernel: Array, bias: Array, piece: _Pieces):
    """d loss / d logits [chunk, V], and the three sums."""
    dtype = piece.weights.dtype
    logits = _product("cd,dv->cv", piece.features, kernel, dtype) + bias.astype(dtype)[None, :]
    size = logits.shape[1]
    largest = jnp.max(logits, axis=1)
    exponentials = jnp.exp(logits - largest[:, None])
    normalizer = jnp.sum(exponentials, axis=1)
    logsumexp = jnp.log(normalizer) + largest
    at_target = jnp.take_along_axis(logits, piece.targets[:, None], axis=1)[:, 0]
    nats = logsumexp - at_target
    smoothed = logsumexp - (1 - smoothing) * at_target - smoothing * jnp.mean(logits, axis=1)
    factor = (piece.weights / normalizer)[:, None]
    numbers = jnp.arange(size, dtype=piece.targets.dtype)
    is_target = numbers[None, :] == piece.targets[:, None]
    wanted = jnp.where(is_target, 1 - smoothing + smoothing / size, smoothing / size)
    dlogits = exponentials * factor - piece.weights[:, None] * wanted
    right = (at_target >= largest).astype(dtype)
    found = (smoothed, jax.lax.stop_gradient(nats), right)  # of the second order neither
    return dlogits, tuple(jnp.sum(piece.weights * one) for one in found)


def _pieces(chunk: int, features: Array, targets: Array, weights: Array) -> _Pieces:
    missing = -len(targets) % chunk

    def cut(array: Array) -> Array:
        padded = jnp.pad(array, ((0, missing),) + ((0, 0),) * (array.ndim - 1))
        return padded.reshape(-1, chunk, *array.shape[1:])

    return _Pieces(cut(features), cut(targets), cut(weights))


def _product(equation: str, left: Array, right: Array, dtype: jnp.dtype) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=dtype)
