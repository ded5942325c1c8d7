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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

LOWEST = float(jnp.finfo(jnp.float32).min)


class Sums(NamedTuple):
    """What a forward kernel saves for each row: arrays, or a kernel's references to them."""

    largest: Any  # [T] M; `LOWEST` without keys: -inf minus -inf would be NaN
    total: Any  # [T]; 0 without keys
    excess: Any  # [T]; None without statistics


class RowTerms(NamedTuple):
    """What a backward kernel reads for each row: arrays, or the kernel's references to them."""

    reference: Any  # [T] subtracted from the logits; +inf for a row without keys
    scale: Any  # [T] 1 / total, which multiplies dO; 0 for a row without keys
    offset: Any  # [T] added to the cotangents of the weights
    dentropy: Any  # [T]; None without statistics
    dlogsumexp: Any  # [T] the sum of the cotangents of the logits; 0 without statistics


def row_terms(sums: Sums, output: Array, cotangents: Any) -> RowTerms:
    """The terms of the rows. A row without keys sends 0, whatever its cotangent is, NaN included.

    Args:
        sums: of the forward kernel.
        output: [T, Dv].
        cotangents: of output and statistics.
    """
    doutput, dstatistics = cotangents
    empty = sums.total == 0
    scale = inverse_totals(sums.total)
    offset = -jnp.sum(doutput.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    dentropy, dlogsumexp = None, jnp.zeros_like(offset)
    if sums.excess is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy * scale)
        dlogsumexp = jnp.where(empty, 0, dstatistics.logsumexp)
        offset = offset + dlogsumexp + dentropy * sums.excess
    offset = jnp.where(empty, 0, offset * scale)
    reference = jnp.where(empty, jnp.inf, sums.largest)
    return RowTerms(reference, scale, offset, dentropy, dlogsumexp)


# --- in a kernel, on a tile ---


def with_tile(
    sums: Sums,
    logits: Array,
    largest: Array,
    spread: Callable[[Array], Array],
    sum_of_rows: Callable[[Array], Array],
) -> tuple[Sums, Array, Array]:
    """(the sums with a tile of keys, its exp(x - M), the factor of what was summed before).

    Args:
        sums: of the tiles before, in any form of rows.
        logits: [t, s]; -inf where masked.
        largest: rows of the largest logits of this tile.
        spread: rows -> tile.
        sum_of_rows: tile -> rows.
    """
    largest = jnp.maximum(sums.largest, largest)
    rise = sums.largest - largest
    shrink = jnp.exp(rise)
    shifted = logits - spread(largest)
    exponentials = jnp.exp(shifted)
    excess = sums.excess
    if excess is not None:
        # 0 where the exponential is 0: 0 * -inf would be NaN.
        excess = shrink * (excess + jnp.where(shrink > 0, rise, 0.0) * sums.total)
        excess = excess + sum_of_rows(exponentials * _where_positive(exponentials, shifted))
    total = shrink * sums.total + sum_of_rows(exponentials)
    return Sums(largest, total, excess), exponentials, shrink


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
        dweights = dweights - terms.dentropy * _where_positive(exponentials, shifted)
    return exponentials, exponentials * dweights


def _where_positive(exponentials: Array, shifted: Array) -> Array:
    return jnp.where(exponentials > 0, shifted, 0.0)
