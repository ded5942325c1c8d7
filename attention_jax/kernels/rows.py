"""The algebra of rows: how the sums of all keys become results, and cotangents terms of a kernel.

With x_j the logits of a row, M the largest of them, and

    total = sum_j exp(x_j - M),    excess = sum_j exp(x_j - M) (x_j - M),

the results are logsumexp Z = M + log total and entropy H = log total - excess / total. With weights
w, output O = sum_j w_j v_j and cotangents dO, dZ and dH,

    dv_j = w_j dO,    dx_j = w_j (dO . v_j - dO . O + dZ - dH (log w_j + H)),

since dZ/dx_j = w_j and dH/dx_j = -w_j (log w_j + H), and log w_j + H = x_j - M - excess / total. A
tile has exp(x_j - M) = w_j total, so the cotangents are divided by the total once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.normalizers.rows import AttentionStatistics, RowSummary

Array = jax.Array


class Sums(NamedTuple):
    """What a forward kernel saves of each row: arrays, or a kernel's references to them."""

    largest: Any  # [T] M; a lowest float without keys
    total: Any  # [T]; 0 without keys
    excess: Any  # [T]; None without statistics


class RowTerms(NamedTuple):
    """What a backward kernel reads of each row: arrays, or the kernel's references to them."""

    reference: Any  # [T] subtracted from the logits; +inf for a row without keys
    scale: Any  # [T] 1 / total, which multiplies dO; 0 for a row without keys
    offset: Any  # [T] added to the cotangents of the weights
    dentropy: Any  # [T]; None without statistics
    dlogsumexp: Any  # [T] the sum of the cotangents of the logits; 0 without statistics


def statistics_of(sums: Sums) -> AttentionStatistics | None:
    """The statistics of the rows, if the kernel has summed the excess."""
    if sums.excess is None:
        return None
    return RowSummary.of_sums(*sums).statistics()


def row_terms(sums: Sums, output: Array, cotangents: Any) -> RowTerms:
    """The terms of the rows. A row without keys sends 0, whatever its cotangent is, NaN included.

    Args:
        sums: of the forward kernel.
        output: [T, Dv].
        cotangents: of output and statistics.
    """
    doutput, dstatistics = cotangents
    empty = sums.total == 0
    scale = jnp.where(empty, 0, 1 / jnp.where(empty, 1, sums.total))
    offset = -jnp.sum(doutput.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    dentropy, dlogsumexp = None, jnp.zeros_like(offset)
    if sums.excess is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy * scale)
        dlogsumexp = jnp.where(empty, 0, dstatistics.logsumexp)
        offset = offset + dlogsumexp + dentropy * sums.excess
    offset = jnp.where(empty, 0, offset * scale)
    reference = jnp.where(empty, jnp.inf, sums.largest)
    return RowTerms(reference, scale, offset, dentropy, dlogsumexp)


# --- in a kernel, on a tile; the numbers of rows are spread to its shape ---


def excess_terms(exponentials: Array, shifted: Array) -> Array:
    """exp(x - M) (x - M), and 0 where the exponential is 0: 0 * -inf would be NaN."""
    return exponentials * jnp.where(exponentials > 0, shifted, 0.0)


def risen_excess(shrink: Array, rise: Array, total: Array, excess: Array) -> Array:
    """The excess after M has risen by -`rise`: shrink (excess + rise total), shrink = exp(rise)."""
    return shrink * (excess + jnp.where(shrink > 0, rise, 0.0) * total)


def logit_cotangents(
    exponentials: Array, shifted: Array, dweights: Array, dentropy: Array | None
) -> Array:
    """dx_j, given dO . v_j plus the offset, and x_j - M."""
    if dentropy is not None:
        dweights = dweights - dentropy * jnp.where(exponentials > 0, shifted, 0.0)
    return exponentials * dweights
