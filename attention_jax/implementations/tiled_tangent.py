"""The tangent of tiled attention for forward mode, in one pass over the tiles.

The forward pass saves the largest logit M and the normaliser n of each row, so a tile's weights are
e_j / n with e_j = exp(x_j - M), without rescaling. With x the logits of a row, w its
weights, u = dropout(w), O = sum_j u_j v_j, logsumexp Z and entropy H, and with tangents dx and dv,

    dZ = sum_j w_j dx_j,
    dO = sum_j u_j (dx_j v_j + dv_j) - dZ O,
    dH = -sum_j w_j dx_j (x_j - M) + dZ (log n - H),

since dw_j = w_j (dx_j - dZ), and log w_j = x_j - M - log n.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.partial_jvp import partial_jvp
from attention_jax.core.varying import varying_as
from attention_jax.implementations import bias_tiles, tile_arrays, tiling
from attention_jax.implementations.bias_tiles import BiasTiles
from attention_jax.implementations.rounds import map_query_tiles
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.pairwise import dropout
from attention_jax.scores import masked_pair_jvp

Array = jax.Array


class _Sums(NamedTuple):
    """Sums over the keys visited so far, with e = exp(x - M)."""

    doutput: Array  # [t, Dv] dropout(e) (dx v + dv)
    dlogsumexp: Array  # [t] e dx
    dentropy: Array | None  # [t] e dx (x - M); None without statistics


def tangent(
    plan: Plan, residuals: Any, tangents: Arrays
) -> tuple[Array, AttentionStatistics | None]:
    """The tangents of output and statistics, in tiles.

    Args:
        plan: the sizes and numbers of tiles.
        residuals: `tiled.Residuals`.
        tangents: those of `residuals.arrays`; None for each array that is constant.
    """
    arrays, constants, output, largest, normalizer, entropy = residuals
    # The tangent of a row without keys is 0.
    empty = normalizer == 0
    largest = jnp.where(empty, jnp.inf, largest)
    normalizer = jnp.where(empty, 1, normalizer)

    def start() -> _Sums:
        zeros = jnp.zeros_like(largest[0])
        sums = _Sums(
            doutput=jnp.zeros((*zeros.shape, arrays.values.shape[-1]), zeros.dtype),
            dlogsumexp=zeros,
            dentropy=None if entropy is None else zeros,
        )
        return varying_as(sums, largest)

    def attend(constants: Constants, keys_and_tangents, tile, sums: _Sums) -> _Sums:
        i, queries, dqueries, largest = tile

        def visit(masked, j, sums):
            (keys, values), (dkeys, dvalues) = tile_arrays.tile_of(keys_and_tangents, j)
            logits, dlogits = _tile_jvp(
                plan,
                constants,
                (i, j),
                (arrays.params, queries, keys, arrays.biases),
                (tangents.params, dqueries, dkeys, tangents.biases),
                masked,
            )
            logits = logits.astype(largest.dtype)
            dlogits = None if dlogits is None else dlogits.astype(largest.dtype)
            shifted = logits - largest[:, None]
            exponentials = jnp.exp(shifted)
            if masked:
                assert constants.mask is not None  # a schedule with masked tiles implies a mask
                allowed = tiling.allowed_pairs(plan, constants.mask, i, j)
                exponentials = jnp.where(allowed, exponentials, 0)
                dlogits = None if dlogits is None else jnp.where(allowed, dlogits, 0)
            keep = tiling.kept_pairs(plan, constants, i, j)

            def apply_dropout(weights):
                if keep is None:
                    return weights
                return dropout.drop(weights, keep, plan.options.dropout_rate)

            doutput, dlogsumexp, dentropy = sums
            if dlogits is not None:
                products = exponentials * dlogits
                doutput = doutput + jnp.matmul(apply_dropout(products), values, precision="highest")
                dlogsumexp = dlogsumexp + jnp.sum(products, axis=1)
                if dentropy is not None:
                    # A term with e = 0 is 0: 0 * -inf would be NaN.
                    terms = products * jnp.where(exponentials > 0, shifted, 0)
                    dentropy = dentropy + jnp.sum(terms, axis=1)
            if dvalues is not None:
                doutput = doutput + jnp.matmul(
                    apply_dropout(exponentials), dvalues, precision="highest"
                )
            return _Sums(doutput, dlogsumexp, dentropy)

        return tiling.for_visited_keys(plan, constants, i, visit, sums)

    sums = map_query_tiles(
        plan.ring,
        constants,
        ((arrays.keys, arrays.values), (tangents.keys, tangents.values)),
        (jnp.arange(plan.query_tiles), arrays.queries, tangents.queries, largest),
        start=start,
        attend=attend,
        finish=lambda sums: sums,
    )
    # In a row without keys the sums hold a NaN that another row may see, as 0 * NaN.
    sums = _Sums(
        doutput=jnp.where(empty[..., None], 0, sums.doutput),
        dlogsumexp=jnp.where(empty, 0, sums.dlogsumexp),
        dentropy=None if sums.dentropy is None else jnp.where(empty, 0, sums.dentropy),
    )
    dlogsumexp = sums.dlogsumexp / normalizer
    doutput = sums.doutput / normalizer[..., None] - dlogsumexp[..., None] * output
    if entropy is None or sums.dentropy is None:
        return doutput, None
    dentropy = dlogsumexp * (jnp.log(normalizer) - entropy) - sums.dentropy / normalizer
    statistics = AttentionStatistics(dlogsumexp, dentropy, jnp.zeros_like(dlogsumexp))
    return doutput, statistics


def _tile_jvp(
    plan: Plan,
    constants: Constants,
    tile: tuple[Array, Array],
    primals: tuple[Any, Any, Any, BiasTiles],
    tangents: tuple[Any, Any, Any, BiasTiles],
    masked: bool,
) -> tuple[Array, Array | None]:
    """The logits [t, s] of one tile with the bias, and their tangent, None if it is 0."""
    logits, dlogits = masked_pair_jvp(
        plan.options.score,
        primals[:3],
        tangents[:3],
        tiling.pairs_to_replace(plan, constants, *tile, masked),
        constants.stand_ins,
    )
    if primals[3].tables or primals[3].functions:
        bias, dbias = partial_jvp(
            lambda biases: bias_tiles.tile_values(
                biases, constants.bias_integers, plan.grid, *tile
            ),
            primals[3:],
            tangents[3:],
        )
        logits = logits.astype(bias.dtype) + bias
        if dbias is not None:
            dbias = jnp.broadcast_to(dbias, logits.shape)
            dlogits = dbias if dlogits is None else dlogits.astype(dbias.dtype) + dbias
    return logits, dlogits
