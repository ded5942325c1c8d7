"""The tangent of tiled attention for forward mode, in one pass over the tiles.

The forward pass saves the shift and the divisor n of each row, so a tile's weights are e_j / n
without rescaling. With e'_j the tangent of e_j at a fixed shift and divisor, u = f(w) the weights
after dropout and damping, the output O = sum_j u_j v_j and the mean of `normalizers.contract` (O
for softmax, 0 for weights that do not sum to 1), and with tangents dv,

    dO = (sum_j f(e_j)' v_j + f(e_j) dv_j) / n - (sum_j e'_j / n) mean,

For softmax, with M the largest logit, log n = Z and entropy H,

    dZ = sum_j e'_j / n,
    dH = -sum_j e'_j (x_j - M) / n + dZ (log n - H),

since dw_j = w_j (dx_j - dZ), and log w_j = x_j - M - log n.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.partial_jvp import partial_jvp
from attention_jax.core.products import einsum
from attention_jax.core.varying import varying_as
from attention_jax.implementations import bias_tiles, tile_arrays, tiling
from attention_jax.implementations.bias_tiles import BiasTiles
from attention_jax.implementations.rounds import map_query_tiles
from attention_jax.implementations.tile import Tile
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.normalizers import FinalRows, RowSummary
from attention_jax.normalizers.contract import family_of
from attention_jax.scores import masked_pair_jvp

Array = jax.Array

_SUM = "ts,sd->td"  # the weighted sum of values


class _Sums(NamedTuple):
    """Sums over the keys visited so far, with e the weights before the divisor, and e' = de."""

    doutput: Array  # [t, Dv] f(e)' v + f(e) dv
    dtotal: Array  # [t] e'
    dentropy: Array | None  # [t] e' (x - M); None without statistics


def tangent(
    plan: Plan, arrays: Arrays, constants: Any, rows: FinalRows, tangents: Arrays
) -> tuple[Array, RowSummary | None]:
    """The tangents of output and statistics, in tiles.

    Args:
        plan: the sizes and numbers of tiles.
        arrays, constants, rows: as in `tiled.Residuals`.
        tangents: those of `arrays`; None for each array that is constant.
    """
    normalizer = plan.options.normalizer
    dtype = rows.output.dtype

    def start() -> _Sums:
        zeros = jnp.zeros_like(rows.shift.reference[0])
        sums = _Sums(
            doutput=jnp.zeros((*zeros.shape, arrays.values.shape[-1]), zeros.dtype),
            dtotal=zeros,
            dentropy=zeros if plan.options.return_statistics else None,
        )
        return varying_as(sums, rows.shift)

    def attend(constants: Constants, keys_and_tangents, query_tile, sums: _Sums) -> _Sums:
        i, queries, dqueries, shift = query_tile

        def visit(masked, j, sums):
            tile = Tile(plan, arrays, constants, i, j, masked)
            (keys, values), (dkeys, dvalues) = tile_arrays.tile_of(keys_and_tangents, j)
            logits, dlogits = _tile_jvp(
                plan,
                constants,
                (i, j),
                tile.allowed(),
                (arrays.params, queries, keys, arrays.biases),
                (tangents.params, dqueries, dkeys, tangents.biases),
            )
            logits = logits.astype(dtype)
            dlogits = None if dlogits is None else dlogits.astype(dtype)
            if masked:
                allowed = tile.allowed()
                assert allowed is not None
                logits = jnp.where(allowed, logits, -jnp.inf)
                dlogits = None if dlogits is None else jnp.where(allowed, dlogits, 0)

            def weights_of(params: Any, logits: Array) -> tuple[Array, Array]:
                shifted = shift.shifted(tile.transformed(params, logits))
                return family_of(normalizer, params).weight(shifted), shifted

            (weights, shifted), dresults = partial_jvp(
                weights_of,
                (arrays.normalizer_params, logits),
                (tangents.normalizer_params, dlogits),
            )
            dweights = None if dresults is None else dresults[0]

            def factors_of_values(weights: Array, damping: BiasTiles) -> Array:
                of_tile = tile._replace(arrays=arrays._replace(damping=damping))
                return of_tile.factors_of_values(weights)

            factors, dfactors = partial_jvp(
                factors_of_values, (weights, arrays.damping), (dweights, tangents.damping)
            )
            doutput, dtotal, dentropy = sums
            if dfactors is not None:
                doutput = doutput + einsum(_SUM, dfactors, values)
            if dweights is not None:
                dtotal = dtotal + jnp.sum(dweights, axis=1)
                if dentropy is not None:
                    # A term with weight 0 is 0: 0 * -inf would be NaN.
                    terms = dweights * jnp.where(weights > 0, shifted, 0)
                    dentropy = dentropy + jnp.sum(terms, axis=1)
            if dvalues is not None:
                doutput = doutput + einsum(_SUM, factors, dvalues)
            return _Sums(doutput, dtotal, dentropy)

        return tiling.for_visited_keys(plan, constants, i, visit, sums)

    sums = map_query_tiles(
        plan.ring,
        constants,
        ((arrays.keys, arrays.values), (tangents.keys, tangents.values)),
        (jnp.arange(plan.query_tiles), arrays.queries, tangents.queries, rows.shift),
        start=start,
        attend=attend,
        finish=lambda sums: sums,
    )
    # In a row without keys the sums hold a NaN that another row may see, as 0 * NaN.
    sums = _Sums(
        doutput=jnp.where(rows.empty[..., None], 0, sums.doutput),
        dtotal=jnp.where(rows.empty, 0, sums.dtotal),
        dentropy=None if sums.dentropy is None else jnp.where(rows.empty, 0, sums.dentropy),
    )
    doutput, dtotal = sums.doutput, sums.dtotal
    if rows.divisor is not None:
        doutput, dtotal = doutput / rows.divisor[..., None], dtotal / rows.divisor
    if normalizer.family.sums_to_one:
        mean = rows.output if rows.mean is None else rows.mean
        doutput = doutput - dtotal[..., None] * mean
    if rows.summary is None:
        return doutput, None
    assert rows.divisor is not None  # only softmax has a summary
    dentropy = None
    if sums.dentropy is not None and rows.summary.entropy is not None:
        dentropy = dtotal * (rows.summary.log_sum - rows.summary.entropy)
        dentropy = dentropy - sums.dentropy / rows.divisor
    return doutput, RowSummary(jnp.zeros_like(dtotal), dtotal, dentropy)


def _tile_jvp(
    plan: Plan,
    constants: Constants,
    tile: tuple[Array, Array],
    allowed: Array | None,
    primals: tuple[Any, Any, Any, BiasTiles],
    tangents: tuple[Any, Any, Any, BiasTiles],
) -> tuple[Array, Array | None]:
    """The logits [t, s] of one tile with the bias, and their tangent, None if it is 0."""
    logits, dlogits = masked_pair_jvp(
        plan.options.score,
        primals[:3],
        tangents[:3],
        allowed,
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
