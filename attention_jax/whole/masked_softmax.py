"""The masked softmax as a function of its own."""

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import accumulator_dtype, bool_array, float_array
from attention_jax.normalizers.softmax_rows import softmax_of_rows
from attention_jax.positions.contract import Mask
from attention_jax.positions.function import check_batch_axes

Array = jax.Array


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
    if mask is not None:
        wide = jnp.where(mask, wide, -jnp.inf)
    return softmax_of_rows(wide, axis).astype(logits.dtype)
