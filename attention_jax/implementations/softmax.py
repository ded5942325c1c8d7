"""The masked softmax, its gradient, and the statistics of its rows."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from attention_jax.core.arrays import accumulator_dtype, bool_array, float_array
from attention_jax.pairwise.masks import Mask
from attention_jax.pairwise.position_functions import check_batch_axes

Array = jax.Array


class AttentionStatistics(NamedTuple):
    """Statistics of each row of attention, that is of each query."""

    logsumexp: Array  # [*B, T]  log sum_j exp(logits_j) over allowed keys; -inf without keys
    entropy: Array  # [*B, T]  -sum_j w_j log w_j in nats, before dropout; 0 without keys
    max_logit: Array  # [*B, T]  largest allowed logit, without gradient; -inf without keys


export.register_namedtuple_serialization(
    AttentionStatistics, serialized_name="attention_jax.AttentionStatistics"
)


def masked_softmax(logits: Array, mask: Mask | Array | None = None, axis: int = -1) -> Array:
    """Softmax over the allowed entries; a row without any is 0, and its gradient is 0.

        w_j = m_j exp(l_j) / sum_k m_k exp(l_k)

    Args:
        logits: float [..., T, S], any finite size; -inf entries count as masked. Masked entries
            may hold anything, NaN included.
        mask: bool [..., T, S] with all axes of `logits` (size 1 where shared), or with its last two
            or fewer; or a `Mask` over its last two axes. True = may attend.
        axis: the axis whose weights sum to 1.

    Returns:
        weights [..., T, S] in the dtype of `logits`, computed in at least float32.

    Raises:
        ValueError: `logits` is not floating-point, `mask` is not boolean or does not broadcast to
            `logits`, or `logits` has no axis `axis`.

    >>> masked_softmax(jnp.array([0.0, 0.0, 9.0]), jnp.array([True, True, False])).tolist()
    [0.5, 0.5, 0.0]

    Source: Vaswani et al. 2017, section 3.2.1 (there the mask is -inf added before the softmax).
    """
    logits = float_array("logits", logits)
    if isinstance(mask, Mask):
        if logits.ndim < 2:
            raise ValueError(f"logits must be [..., T, S] for a Mask; got {list(logits.shape)}")
        *batch_shape, target_length, source_length = logits.shape
        mask.check(tuple(batch_shape), target_length, source_length)
        mask = mask.materialize(target_length, source_length)
    if mask is not None:
        mask = bool_array("mask", mask, "may attend")
        check_batch_axes("mask", mask.shape, 2, logits.shape[:-2])
        try:
            mask = jnp.broadcast_to(mask, logits.shape)
        except ValueError:
            raise ValueError(
                f"mask must broadcast to logits {list(logits.shape)}; got {list(mask.shape)}"
            ) from None
    if not isinstance(axis, int | np.integer) or not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"axis must be one of logits {list(logits.shape)}; got {axis!r}")
    wide = logits.astype(accumulator_dtype(logits))
    return _masked_softmax(wide, mask, axis).astype(logits.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _masked_softmax(logits: Array, mask: Array | None, axis: int) -> Array:
    _, exponentials, normalizer = _shifted(logits, mask, axis)
    return exponentials / jnp.where(normalizer == 0, 1, normalizer)


# The Jacobian of one row is dw_j / dl_k = w_j (delta_jk - w_k), so a tangent dl becomes
#     dw_j = w_j (dl_j - sum_k w_k dl_k).
# The Jacobian is symmetric, so the same formula is the vector-Jacobian product. It is a function of
# w, so JAX can differentiate it again. It is 0 for a row without allowed keys (all w are 0), and it
# does not read the dl of masked entries.
@_masked_softmax.defjvp
def _masked_softmax_jvp(axis, primals, tangents):
    logits, mask = primals
    dlogits = tangents[0]
    weights = _masked_softmax(logits, mask, axis)
    dlogits = jnp.where(weights > 0, dlogits, 0)
    mean = jnp.sum(weights * dlogits, axis=axis, keepdims=True)
    return weights, weights * (dlogits - mean)


def row_statistics(logits: Array, mask: Array | None = None) -> AttentionStatistics:
    """The statistics of each row of `logits` over its allowed entries.

    With p = softmax(l) and Z = sum_j exp(l_j), entropy = log Z - sum_j p_j l_j. Both terms are
    computed after subtracting the largest logit, which avoids cancellation at logits of +-1e4.

    Args:
        logits: float32 or wider, [..., T, S].
        mask: bool of the same shape, or None.

    Returns:
        `AttentionStatistics` of shape [..., T]; differentiable except `max_logit`.
    """
    largest, exponentials, normalizer = _shifted(logits, mask, -1)
    any_allowed = normalizer != 0  # `> 0` would hide a NaN
    log_normalizer = jnp.log(jnp.where(any_allowed, normalizer, 1))
    weights = _masked_softmax(logits, mask, -1)
    # l_j - max, or 0 where the weight is 0: 0 * -inf would be NaN, while x log x goes to 0.
    shifted = jnp.where(exponentials > 0, logits - largest, 0)
    mean = jnp.sum(weights * shifted, axis=-1, keepdims=True)
    negative_infinity = jnp.asarray(-jnp.inf, logits.dtype)
    return AttentionStatistics(
        logsumexp=jnp.where(any_allowed, log_normalizer + largest, negative_infinity)[..., 0],
        entropy=jnp.where(any_allowed, log_normalizer - mean, 0)[..., 0],
        max_logit=jnp.where(any_allowed, largest, negative_infinity)[..., 0],
    )


def _shifted(logits: Array, mask: Array | None, axis: int) -> tuple[Array, Array, Array]:
    """The largest allowed logit M (0 without keys), exp(logits - M), and the sum of those."""
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    largest = jnp.max(logits, axis=axis, keepdims=True, initial=-jnp.inf)
    largest = jax.lax.stop_gradient(jnp.where(largest == -jnp.inf, 0, largest))
    exponentials = jnp.exp(logits - largest)
    return largest, exponentials, jnp.sum(exponentials, axis=axis, keepdims=True)
