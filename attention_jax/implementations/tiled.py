"""Tiled attention with a hand-written gradient: memory linear in T and S, for every score.

The forward pass folds the state of a normaliser over tiles of keys: for softmax, the online
softmax; for a normaliser with a threshold, first the search for it. It saves its inputs, the
output, and a few numbers of each row, from which the backward pass recomputes the weights of every
tile: for softmax, the largest logit and the sum of exponentials. (The logsumexp alone would
suffice, but its rounding error at logits of 1e4 is 1e-3 of the weights in float32.) All other
derivatives are those of `plain_tiles`, in linear memory as well.

`ring` runs the same code on many devices: `rounds` loops over the keys of all devices.

Source: Dao et al. 2022, algorithms 1 and 4, there for scaled dot and without statistics.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.core.meshes import varying_as
from attention_jax.core.products import einsum, tall_product
from attention_jax.implementations import plain_tiles, reference, tile_arrays, tiling
from attention_jax.implementations.bias_tiles import add_gradient
from attention_jax.implementations.contract import Inputs, Options, results
from attention_jax.implementations.rounds import Plan, fold_rounds, map_query_tiles
from attention_jax.implementations.tile import Tile, add_keys
from attention_jax.implementations.tiling import Arrays
from attention_jax.normalizers import AttentionStatistics
from attention_jax.normalizers.contract import family_of
from attention_jax.normalizers.rows import FinalRows, RowShift, RowSummary, RowSums
from attention_jax.scores.stand_ins import pair_vjp_with_stand_ins

Array = jax.Array


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in the compute dtype."""
    target_length = inputs.query.shape[0]
    if 0 in (target_length, inputs.key.shape[0]):
        return reference.attend(options, inputs)  # no tiles
    rows = attend_tiles(*tiling.prepare(options, inputs))
    output, summary = jax.tree.map(lambda tiles: tile_arrays.joined(tiles, target_length), rows)
    return results(options, inputs, output, summary)


@functools.partial(custom_vjp, nondiff_argnums=(0,), twin=plain_tiles.attend_tiles)
def attend_tiles(plan: Plan, arrays: Arrays) -> tuple[Array, RowSummary | None]:
    """Output [query_tiles, t, Dv], and the summary of rows [query_tiles, t] of softmax.

    The summary leaves out a sink. It has an entropy if statistics are requested.

    Args:
        plan: the sizes and numbers of tiles, and the ring if the keys are on many devices.
        arrays: in a ring with the positions of the first round, and the schedules of all rounds.
    """
    rows = _forward(plan, arrays)
    return rows.output, rows.summary


class Residuals(NamedTuple):
    """The arrays that the forward pass saves for the backward pass."""

    arrays: Arrays
    rows: FinalRows  # [query_tiles, t, ...]


def _attend_fwd(plan, arrays):
    rows = _forward(plan, arrays)
    results = rows.output, rows.summary
    if rows.summary is not None:  # `jax_debug_infs` would refuse an infinity
        rows = rows._replace(summary=rows.summary._replace(largest=None))
    return results, Residuals(arrays, rows)


def _forward(plan: Plan, arrays: Arrays) -> FinalRows:
    """The results of all rows, in tiles."""

    def attend_to_keys(arrays: Arrays, query_tile, sums: RowSums) -> RowSums:
        i, queries = query_tile

        def fold(update, carry):
            def visit(masked, j, carry):
                tile = Tile(plan, arrays, i, j, masked)
                keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
                logits = tile.transformed(arrays.normalizer_params, tile.logits(queries, keys))
                return update(carry, logits, values, tile.factors_of_values)

            return tiling.for_visited_keys(plan, arrays.schedule, i, visit, carry)

        return add_keys(plan, arrays, fold, sums)

    tiles = jnp.arange(plan.query_tiles), arrays.queries
    return map_query_tiles(plan, arrays, tiles, attend_to_keys, recompute=False)


class RowCotangents(NamedTuple):
    """The shift of each row, and its cotangents, divided by the row's divisor.

    The gradient of a pair is its undivided weight times these, so the divisor counts once.
    """

    shift: RowShift  # [t] with the reference +inf for a row without weights
    doutput: Array  # [t, Dv]
    doffset: Array | None  # [t] dn' - dO . mean - dH (H - log n); None if it is 0
    dentropy: Array | None  # [t]


# For softmax, with its weights w, the output O = sum_j w_j value_j of a row and a cotangent dO,
#     dvalue_j = w_j dO,    dx_j = w_j (dO . value_j - dO . O),
# and the score pulls the dx back. A hidden pair has w = exp(-inf) = 0, so its gradients are 0.
#
# In general, with x the transformed logits of a row, w its weights, w' their derivatives (w for
# softmax), a damping d (0 without one), u = dropout(w) exp(d) and O = sum_j u_j value_j,
#     dvalue_j = u_j dO,    dd_j = u_j dO . value_j,
#     dx_j = w'_j (dropout(dO . value_j) exp(d_j) - dO . mean),
# with the mean of `normalizers.contract`: O for softmax, 0 for weights that do not sum to 1. The
# parameters of the normaliser and of its transform get what the same cotangent of the weights,
# the bracket, gives them. For softmax with the sum n of exponentials and the entropy H, and the
# cotangents dn' of log n and dH, the bracket also has the terms
#     dn' - dH (log w_j + H),
# since dlog(n)/dx_j = w_j and dH/dx_j = -w_j (log w_j + H). No tile forms w = exp(x - M) / n: it
# has exp(x - M), and the cotangents of each row are divided by its divisor n once.
def _attend_bwd(plan: Plan, residuals: Residuals, cotangents: Any) -> tuple[Arrays]:
    arrays = residuals.arrays
    rows = _row_cotangents(plan, residuals, cotangents)

    def visit(arrays: Arrays, dkeys, gradients):
        gradients = _add_gradients(plan, arrays, rows, gradients._replace(**dkeys))
        dkeys = {name: getattr(gradients, name) for name in dkeys}
        return dkeys, gradients._replace(keys=None, values=None)

    # The gradients of keys and values travel with them; all others add up over the rounds.
    floats = arrays.differentiable
    zeros: Any = tiling.zero_gradients(floats)
    dkeys = {"keys": zeros.keys, "values": zeros.values}
    gradients = zeros._replace(keys=None, values=None)
    dkeys, gradients = fold_rounds(plan.ring, arrays, dkeys, gradients, visit)
    gradients = gradients._replace(**dkeys)
    return (jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), gradients, floats),)


attend_tiles.defvjp(_attend_fwd, _attend_bwd)


def _add_gradients(plan: Plan, arrays: Arrays, rows: RowCotangents, gradients: Any) -> Any:
    """Adds the gradients of all tiles to `gradients`."""

    def visit_query_tile(gradients, query_tile):
        i, queries, rows, dqueries = query_tile
        scale = _scale_of_float16(arrays, rows)
        if scale is not None:
            rows = RowCotangents(rows.shift, *jax.tree.map(lambda leaf: leaf * scale, rows[1:]))

        def visit(masked, j, carry):
            dqueries, gradients = carry
            keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
            tile = Tile(plan, arrays, i, j, masked)
            logits = tile.logits(queries, keys)
            dnormalizer, dlogits, dvalues, ddamping = _weights_vjp(tile, logits, values, rows)
            dparams, dq, dk = pair_vjp_with_stand_ins(
                plan.options.score,
                arrays.params,
                queries,
                keys,
                tile.allowed(),
                arrays.stand_ins,
                dlogits,
            )
            if scale is not None:
                dnormalizer, dlogits, dvalues, ddamping, dparams, dq, dk = jax.tree.map(
                    lambda gradient: (
                        gradient  # of a flag in the params, 0
                        if gradient.dtype == jnp.bool_
                        else (gradient / scale).astype(gradient.dtype)
                    ),
                    (dnormalizer, dlogits, dvalues, ddamping, dparams, dq, dk),
                )
            dqueries = jax.tree.map(jnp.add, dqueries, dq)
            gradients = gradients._replace(
                keys=tile_arrays.add_tile(gradients.keys, j, dk),
                values=tile_arrays.add_tile(gradients.values, j, dvalues),
                params=jax.tree.map(jnp.add, gradients.params, dparams),
                normalizer_params=jax.tree.map(jnp.add, gradients.normalizer_params, dnormalizer),
                biases=add_gradient(gradients.biases, arrays.biases, dlogits, plan, i, j),
                damping=add_gradient(gradients.damping, arrays.damping, ddamping, plan, i, j),
            )
            return dqueries, gradients

        carry = varying_as((dqueries, gradients), arrays, rows)
        dqueries, gradients = tiling.for_visited_keys(plan, arrays.schedule, i, visit, carry)
        return gradients, dqueries

    tiles = (jnp.arange(plan.query_tiles), arrays.queries, rows, gradients.queries)
    gradients, dqueries = jax.lax.scan(visit_query_tile, gradients._replace(queries=None), tiles)
    return gradients._replace(queries=dqueries)


def _row_cotangents(plan: Plan, residuals: Residuals, cotangents: Any) -> RowCotangents:
    """The rows' terms from the saved arrays and the cotangents of output and statistics."""
    doutput, dsummary = cotangents
    rows = residuals.rows
    # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
    doutput = jnp.where(rows.empty[..., None], 0, doutput)
    shift = rows.shift._replace(reference=jnp.where(rows.empty, jnp.inf, rows.shift.reference))
    doffset: Any = None
    dentropy = None
    if plan.options.normalizer.family.sums_to_one:
        mean = rows.output if rows.mean is None else rows.mean
        doffset = -jnp.sum(doutput * mean, axis=-1)
    if rows.summary is not None:
        doffset = doffset + jnp.where(rows.empty, 0, dsummary.log_sum)
        if rows.summary.entropy is not None:
            dentropy = jnp.where(rows.empty, 0, dsummary.entropy)
            doffset = doffset - dentropy * (rows.summary.entropy - rows.summary.log_sum)
    terms = jax.tree.map(lambda row: row / rows.divisor, (doffset, dentropy))
    return RowCotangents(shift, doutput / rows.divisor[..., None], *terms)


def _scale_of_float16(arrays: Arrays, rows: RowCotangents) -> Array | None:
    """A power of two that brings the cotangents of t rows to the size 1; None without float16.

    Divided by the divisor of a long row, they underflow in the products of float16.
    """
    tokens = jax.tree.leaves((arrays.queries, arrays.keys, arrays.values))
    if all(leaf.dtype != jnp.float16 for leaf in tokens):
        return None
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(rows[1:])]
    )
    exponent = jnp.frexp(largest)[1]
    return jnp.ldexp(jnp.ones_like(largest), jnp.minimum(-exponent, 100))  # below overflow


def _weights_vjp(
    tile: Tile, logits: Array, values: Array, rows: RowCotangents
) -> tuple[Any, Array, Array, Array]:
    """The gradients of one tile.

    Returns:
        those of the normaliser's parameters, of the logits [t, s], of the values [s, Dv], and of
        the damping [t, s].
    """

    def undivided_weights(params: Any, logits: Array) -> tuple[Array, Array]:
        shifted = rows.shift.shifted(tile.transformed(params, logits))
        return family_of(tile.plan.options.normalizer, params).weight(shifted), shifted

    undivided, pull_back, shifted = jax.vjp(
        undivided_weights, tile.arrays.normalizer_params, logits, has_aux=True
    )
    dfactors = einsum("td,sd->ts", rows.doutput, values)
    factors, dweights = map(tile.factors_of_values, (undivided, dfactors))
    dvalues = tall_product(rows.doutput.astype(values.dtype), factors)
    if rows.doffset is not None:
        dweights = dweights + rows.doffset[:, None]
    if rows.dentropy is not None:
        # A term with weight 0 is 0: 0 * -inf would be NaN.
        dweights = dweights - rows.dentropy[:, None] * jnp.where(undivided > 0, shifted, 0)
    return *pull_back(dweights), dvalues, dfactors * factors
