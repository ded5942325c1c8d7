"""The cotangents of rows in kernels: what a backward kernel reads for each row, and does on a tile.

With x_j the logits of a row, M the largest of them, and

    total = sum_j exp(x_j - M),    moment = sum_j exp(x_j - M) (x_j - M),

the results are logsumexp Z = M + log total and entropy H = log total - moment / total. With weights
w, output O = sum_j w_j v_j and cotangents dO, dZ and dH,

    dv_j = w_j dO,    dx_j = w_j (dO . v_j - dO . O + dZ - dH (log w_j + H)),

since dZ/dx_j = w_j and dH/dx_j = -w_j (log w_j + H), and log w_j + H = x_j - M - moment / total. A
tile has exp(x_j - M) = w_j total, so the cotangents are divided by the total once.

The sums, and the step from tile to tile, are those of `normalizers/softmax_rows.py`. The cotangents
are not those of `tiled`, which serves every normaliser: it divides by the divisor of a row, and JAX
differentiates the weights. A kernel knows softmax alone, and multiplies by 1 / total.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.normalizers.softmax_rows import SoftmaxSums, where_positive

Array = jax.Array


class RowTerms(NamedTuple):
    """What a backward kernel reads for each row: arrays, or the kernel's references to them."""

    reference: Any  # [T] subtracted from the logits; +inf for a row without keys
    offset: Any  # [T] added to the cotangents of the weights
    dentropy: Any = None  # [T]; None without statistics
    dlogsumexp: Any = None  # [T] the sum of the dx_j, 0 without statistics; no kernel reads it


def row_terms(sums: SoftmaxSums, output: Array, cotangents: Any) -> tuple[Array, RowTerms]:
    """(dO / total, float32 [T, Dv]; the other terms of the rows).

    A row without keys sends 0, whatever its cotangent is, NaN included.

    Args:
        sums: of the forward kernel.
        output: [T, Dv].
        cotangents: of output and statistics.
    """
    doutput, dstatistics = cotangents
    empty = sums.total == 0
    scale = inverse_totals(sums.total)
    doutput = doutput.astype(jnp.float32)
    offset = -jnp.sum(doutput * output.astype(jnp.float32), axis=-1)
    dentropy, dlogsumexp = None, jnp.zeros_like(offset)
    if sums.moment is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy * scale)
        dlogsumexp = jnp.where(empty, 0, dstatistics.logsumexp)
        offset = offset + dlogsumexp + dentropy * sums.moment
    offset = jnp.where(empty, 0, offset * scale)
    reference = jnp.where(empty, jnp.inf, sums.largest)
    doutput = jnp.where(empty[:, None], 0, doutput * scale[:, None])
    return doutput, RowTerms(reference, offset, dentropy, dlogsumexp)


# --- in a kernel, on a tile ---


def inverse_totals(total: Array) -> Array:
    """1 / total; 0 for a row without keys, and NaN for NaN, which `total > 0` would hide."""
    has_keys = total != 0
    return jnp.where(has_keys, 1 / jnp.where(has_keys, total, 1.0), 0.0)


def tile_cotangents(logits: Array, products: Array, terms: RowTerms) -> tuple[Array, Array]:
    """(exp(x_j - M), dx_j) of a tile, given dO . v_j and terms that are spread to its shape."""
    shifted = logits - terms.reference
    exponentials = jnp.exp(shifted)
    dweights = products + terms.offset
    if terms.dentropy is not None:
        dweights = dweights - terms.dentropy * where_positive(exponentials, shifted)
    return exponentials, exponentials * dweights
