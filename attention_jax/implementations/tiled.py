"""Tiles and a gradient by hand: memory linear in T and S, forward and backward, for every score.

The forward pass is an online softmax over tiles of keys. It saves its inputs, the output, and of
each row the largest logit and the normaliser; the backward pass makes every tile's weights again
from those. (The logsumexp alone would do, were it not rounded: at logits of 1e4 it knows weights to
1e-3 in float32.) The tangent of forward mode makes the weights again too. The derivatives of both
are those of `plain_tiles`, in linear memory too.

Source: Dao et al. 2022, algorithms 1 and 4, there for scaled dot and without statistics.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.core.varying import varying_as
from attention_jax.implementations import (
    bias_tiles,
    online_softmax,
    plain_tiles,
    reference,
    tile_arrays,
    tiled_tangent,
    tiling,
)
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.implementations.online_softmax import Running
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.pairwise import dropout
from attention_jax.scores import tall_product

Array = jax.Array


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in the compute dtype."""
    target_length = inputs.query.shape[0]
    if 0 in (target_length, inputs.key.shape[0]):
        return reference.attend(options, inputs)  # there is no tile to speak of
    output, statistics = _attend(*tiling.prepare(options, inputs))
    output, statistics = jax.tree.map(
        lambda tiles: tile_arrays.untiled(tiles, target_length), (output, statistics)
    )
    return output.astype(inputs.query.dtype), statistics


@functools.partial(custom_vjp, nondiff_argnums=(0,), twin=plain_tiles.attend_tiles)
def _attend(
    plan: Plan, arrays: Arrays, constants: Constants
) -> tuple[Array, AttentionStatistics | None]:
    output, statistics, _ = _forward(plan, arrays, constants)
    return output, statistics


class Residuals(NamedTuple):
    arrays: Arrays
    constants: Any  # as the forward pass had them
    output: Array  # [query_tiles, t, Dv]
    largest: Array  # [query_tiles, t] the largest logit
    normalizer: Array  # [query_tiles, t] sum of exp(logits - largest)
    entropy: Array | None  # [query_tiles, t]


def _attend_fwd(plan, arrays, constants):
    output, statistics, (largest, normalizer) = _forward(plan, arrays, constants)
    entropy = None if statistics is None else statistics.entropy
    residuals = Residuals(arrays, constants, output, largest, normalizer, entropy)
    return (output, statistics), residuals


def _attend_bwd(plan, residuals, cotangents):
    return _backward(plan, residuals, cotangents), None


def _attend_tangent(plan, residuals, tangents):
    return tiled_tangent.tangent(plan, residuals, tangents[0])


_attend.defvjp(_attend_fwd, _attend_bwd, _attend_tangent)


def _forward(plan: Plan, arrays: Arrays, constants: Constants):
    """Output, statistics if they are asked for, and (largest, normalizer), all in tiles."""

    def of_query_tile(tile):
        i, queries = tile
        running = absorb_keys(plan, arrays, constants, i, queries, tiling.start(plan, arrays))
        return *online_softmax.finish(running), (running.largest, running.normalizer)

    return jax.lax.map(of_query_tile, (jnp.arange(plan.query_tiles), arrays.queries))


def absorb_keys(
    plan: Plan, arrays: Arrays, constants: Constants, i: Array, queries: Any, running: Running
) -> Running:
    """All tiles of keys, for the queries of tile i."""

    def visit(masked, j, running):
        keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
        logits = tiling.tile_logits(plan, arrays, constants, i, j, queries, keys, masked)
        keep = tiling.kept_weights(plan, constants, i, j)
        return online_softmax.absorb(running, logits, values, keep, plan.options.dropout_rate)

    return tiling.for_visited_keys(plan, constants, i, visit, running)


# With x the logits of a row, w its weights, u = dropout(w), O = sum_j u_j v_j, logsumexp Z and
# entropy H, and cotangents dO, dZ, dH:
#     dv_j = u_j dO,
#     dx_j = w_j (dropout(dO . v_j) - dO . O + dZ - dH (log w_j + H)),
# since dZ/dx_j = w_j and dH/dx_j = -w_j (log w_j + H). The sum over the row that the softmax
# needs, sum_k u_k (dO . v_k), is dO . O; the rest is for the score to pull back. A tile has
# exp(x_j - largest) = w_j normalizer, so the rows' cotangents are divided by the normaliser once.
def _backward(plan: Plan, residuals: Residuals, cotangents: Any) -> Arrays:
    """The cotangents of `arrays`."""
    arrays, constants, _, _, _, _ = residuals
    others = jax.tree.map(jnp.zeros_like, arrays._replace(queries=None))
    rows = rows_of(residuals, cotangents)
    others, dqueries = add_gradients(plan, arrays, constants, rows, others)
    return others._replace(queries=dqueries)


def add_gradients(
    plan: Plan, arrays: Arrays, constants: Constants, rows: Rows, others: Arrays
) -> tuple[Arrays, Any]:
    """`others`, cotangents of all but the queries, with those of all tiles; and of the queries."""

    def of_query_tile(others, tile):
        i, queries, rows = tile

        def visit(masked, j, carry):
            dqueries, others = carry
            keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
            logits = tiling.tile_logits(plan, arrays, constants, i, j, queries, keys, masked)
            keep = tiling.kept_weights(plan, constants, i, j)
            dlogits, dvalues = _softmax_vjp(logits, values, rows, keep, plan.options.dropout_rate)
            dparams, dq, dk = _pair_vjp(
                plan, arrays.params, constants, i, j, queries, keys, masked, dlogits
            )
            dqueries = jax.tree.map(jnp.add, dqueries, dq)
            others = others._replace(
                keys=tile_arrays.add_tile(others.keys, j, dk),
                values=tile_arrays.add_tile(others.values, j, dvalues),
                params=jax.tree.map(jnp.add, others.params, dparams),
                biases=bias_tiles.add_gradient(
                    others.biases, arrays.biases, constants.bias_integers, plan.grid, i, j, dlogits
                ),
            )
            return dqueries, others

        carry = varying_as((jax.tree.map(jnp.zeros_like, queries), others), arrays, rows)
        dqueries, others = tiling.for_visited_keys(plan, constants, i, visit, carry)
        return others, dqueries

    tiles = (jnp.arange(plan.query_tiles), arrays.queries, rows)
    return jax.lax.scan(of_query_tile, others, tiles)


class Rows(NamedTuple):
    """What the backward pass needs of each query; cotangents are divided by the normaliser."""

    largest: Array  # [t] +inf for a row without keys, whose weights are then 0
    doutput: Array  # [t, Dv]
    doffset: Array  # [t] dZ - dO . O - dH (H - log normalizer)
    dentropy: Array | None  # [t]


def rows_of(residuals: Residuals, cotangents: Any) -> Rows:
    doutput, dstatistics = cotangents
    entropy = residuals.entropy
    # A row without keys sends nothing, whatever comes, NaN included.
    empty = residuals.normalizer == 0
    doutput = jnp.where(empty[..., None], 0, doutput)
    normalizer = jnp.where(empty, 1, residuals.normalizer)
    doffset = -jnp.sum(doutput * residuals.output, axis=-1)
    dentropy = None
    if entropy is not None:
        dentropy = jnp.where(empty, 0, dstatistics.entropy)
        constant = entropy - jnp.log(normalizer)
        doffset = doffset + jnp.where(empty, 0, dstatistics.logsumexp) - dentropy * constant
        dentropy = dentropy / normalizer
    return Rows(
        largest=jnp.where(empty, jnp.inf, residuals.largest),
        doutput=doutput / normalizer[..., None],
        doffset=doffset / normalizer,
        dentropy=dentropy,
    )


def _pair_vjp(
    plan: Plan,
    params: Any,
    constants: Constants,
    i: Array,
    j: Array,
    queries: Any,
    keys: Any,
    masked: bool,
    dlogits: Array,
) -> tuple[Any, Any, Any]:
    """The score's own, except where a masked pair might have an infinite slope."""
    if not masked or constants.stand_ins is None:
        cotangents = plan.options.score.pair_vjp(params, queries, keys, dlogits)
    else:
        assert constants.mask is not None  # no tile is masked without one
        allowed = tiling.allowed_pairs(plan, constants.mask, i, j)
        logits, pull_back = jax.vjp(
            lambda params, queries, keys: tiling.pair_logits(
                plan, params, queries, keys, allowed, constants.stand_ins
            ),
            *(params, queries, keys),
        )
        cotangents = pull_back(dlogits.astype(logits.dtype))
    # Integer features have none.
    return jax.tree.map(
        lambda own, leaf: jnp.zeros_like(leaf) if own.dtype == jax.dtypes.float0 else own,
        cotangents,
        (params, queries, keys),
    )


def _softmax_vjp(
    logits: Array, values: Array, rows: Rows, keep: Array | None, dropout_rate: float
) -> tuple[Array, Array]:
    """(dlogits [t, s], dvalues [s, Dv]) of one tile."""
    shifted = logits - rows.largest[:, None]
    exponentials = jnp.exp(shifted)
    dweights = jnp.matmul(rows.doutput, values.T, precision="highest")
    kept = exponentials
    if keep is not None:
        kept = dropout.drop(exponentials, keep, dropout_rate)
        dweights = dropout.drop(dweights, keep, dropout_rate)
    dvalues = tall_product(rows.doutput, kept)
    dweights = dweights + rows.doffset[:, None]
    if rows.dentropy is not None:
        # Where the weight is 0, so is the term: 0 * -inf would be NaN.
        shifted = jnp.where(exponentials > 0, shifted, 0)
        dweights = dweights - rows.dentropy[:, None] * shifted
    return exponentials * dweights, dvalues
