"""Tiled attention with a hand-written gradient: memory linear in T and S, for every score.

The forward pass is an online softmax over tiles of keys. It saves its inputs, the output, and the
largest logit and the normaliser of each row, from which the backward pass recomputes the weights of
every tile. (The logsumexp alone would suffice, but its rounding error at logits of 1e4 is 1e-3 of
the weights in float32.) The tangent of forward mode recomputes the weights too. The derivatives of
both are those of `plain_tiles`, in linear memory as well.

`ring` runs the same code on many devices: `rounds` loops over the keys of all devices.

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
    plain_tiles,
    reference,
    tile_arrays,
    tiled_tangent,
    tiling,
)
from attention_jax.implementations.contract import Inputs, Options
from attention_jax.implementations.online_softmax import SoftmaxState
from attention_jax.implementations.rounds import fold_rounds, map_query_tiles
from attention_jax.implementations.softmax import AttentionStatistics
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.pairwise import dropout
from attention_jax.scores import masked_pair_vjp, tall_product

Array = jax.Array


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in the compute dtype."""
    target_length = inputs.query.shape[0]
    if 0 in (target_length, inputs.key.shape[0]):
        return reference.attend(options, inputs)  # no tiles
    output, statistics = attend_tiles(*tiling.prepare(options, inputs))
    output, statistics = jax.tree.map(
        lambda tiles: tile_arrays.untiled(tiles, target_length), (output, statistics)
    )
    return output.astype(inputs.query.dtype), statistics


@functools.partial(custom_vjp, nondiff_argnums=(0,), twin=plain_tiles.attend_tiles)
def attend_tiles(
    plan: Plan, arrays: Arrays, constants: Any
) -> tuple[Array, AttentionStatistics | None]:
    """Output [query_tiles, t, Dv], and statistics [query_tiles, t] if they are requested.

    Args:
        plan: the sizes and numbers of tiles, and the ring if the keys are on many devices.
        arrays: the differentiable arrays.
        constants: `Constants`, or `ring.RingConstants` in a ring.
    """
    output, statistics, _ = _forward(plan, arrays, constants)
    return output, statistics


class Residuals(NamedTuple):
    """The arrays that the forward pass saves for the backward pass and the tangent."""

    arrays: Arrays
    constants: Any  # the `constants` of `attend_tiles`
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


attend_tiles.defvjp(_attend_fwd, _attend_bwd, _attend_tangent)


def _forward(plan: Plan, arrays: Arrays, constants: Any):
    """Output, statistics (or None), and (largest, normalizer), all in tiles."""

    def attend_to_keys(constants: Constants, keys_and_values, tile, state: SoftmaxState):
        i, queries = tile

        def visit(masked, j, state):
            keys, values = tile_arrays.tile_of(keys_and_values, j)
            logits = tiling.tile_logits(plan, arrays, constants, i, j, queries, keys, masked)
            keep = tiling.kept_pairs(plan, constants, i, j)
            return state.update(logits, values, keep, plan.options.dropout_rate)

        return tiling.for_visited_keys(plan, constants, i, visit, state)

    return map_query_tiles(
        plan.ring,
        constants,
        (arrays.keys, arrays.values),
        (jnp.arange(plan.query_tiles), arrays.queries),
        start=lambda: tiling.empty_state(plan, arrays),
        attend=attend_to_keys,
        finish=lambda state: (*state.finalize(), (state.largest, state.normalizer)),
    )


# With x the logits of a row, w its weights, u = dropout(w), O = sum_j u_j v_j, logsumexp Z and
# entropy H, and cotangents dO, dZ, dH:
#     dv_j = u_j dO,
#     dx_j = w_j (dropout(dO . v_j) - dO . O + dZ - dH (log w_j + H)),
# since dZ/dx_j = w_j and dH/dx_j = -w_j (log w_j + H). The sum over the row that the softmax
# needs, sum_k u_k (dO . v_k), is dO . O; the score pulls back the rest. A tile has
# exp(x_j - largest) = w_j normalizer, so the rows' cotangents are divided by the normaliser once.
def _backward(plan: Plan, residuals: Residuals, cotangents: Any) -> Arrays:
    """The cotangents of `arrays`."""
    arrays, constants = residuals.arrays, residuals.constants
    rows = _rows_of(residuals, cotangents)

    def visit(constants: Constants, keys_and_gradients, carry):
        (keys, values), (dkeys, dvalues) = keys_and_gradients
        gradients, dqueries = carry
        gradients, dqueries = _add_gradients(
            plan,
            arrays._replace(keys=keys, values=values),
            constants,
            rows,
            gradients._replace(keys=dkeys, values=dvalues),
            dqueries,
        )
        keys_and_gradients = (keys, values), (gradients.keys, gradients.values)
        return keys_and_gradients, (gradients._replace(keys=None, values=None), dqueries)

    # The gradients of keys and values travel with them; those of queries add up over the rounds.
    zeros: Any = jax.tree.map(jnp.zeros_like, arrays)
    keys = (arrays.keys, arrays.values), (zeros.keys, zeros.values)
    dqueries = None if plan.ring is None else zeros.queries
    carry = zeros._replace(queries=None, keys=None, values=None), dqueries
    keys, (gradients, dqueries) = fold_rounds(plan.ring, constants, keys, carry, visit)
    _, (dkeys, dvalues) = keys
    return gradients._replace(queries=dqueries, keys=dkeys, values=dvalues)


def _add_gradients(
    plan: Plan, arrays: Arrays, constants: Constants, rows: Rows, gradients: Any, dqueries: Any
) -> tuple[Any, Any]:
    """Adds the gradients of all tiles to `gradients` (without queries) and `dqueries` (None: 0)."""

    def visit_query_tile(gradients, tile):
        i, queries, rows, dqueries = tile
        if dqueries is None:
            dqueries = jax.tree.map(jnp.zeros_like, queries)

        def visit(masked, j, carry):
            dqueries, gradients = carry
            keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
            logits = tiling.tile_logits(plan, arrays, constants, i, j, queries, keys, masked)
            keep = tiling.kept_pairs(plan, constants, i, j)
            dlogits, dvalues = _softmax_vjp(logits, values, rows, keep, plan.options.dropout_rate)
            dparams, dq, dk = masked_pair_vjp(
                plan.options.score,
                arrays.params,
                queries,
                keys,
                tiling.pairs_to_replace(plan, constants, i, j, masked),
                constants.stand_ins,
                dlogits,
            )
            dqueries = jax.tree.map(jnp.add, dqueries, dq)
            gradients = gradients._replace(
                keys=tile_arrays.add_tile(gradients.keys, j, dk),
                values=tile_arrays.add_tile(gradients.values, j, dvalues),
                params=jax.tree.map(jnp.add, gradients.params, dparams),
                biases=bias_tiles.add_gradient(
                    gradients.biases,
                    arrays.biases,
                    constants.bias_integers,
                    plan.grid,
                    i,
                    j,
                    dlogits,
                ),
            )
            return dqueries, gradients

        carry = varying_as((dqueries, gradients), arrays, rows)
        dqueries, gradients = tiling.for_visited_keys(plan, constants, i, visit, carry)
        return gradients, dqueries

    tiles = (jnp.arange(plan.query_tiles), arrays.queries, rows, dqueries)
    return jax.lax.scan(visit_query_tile, gradients, tiles)


class Rows(NamedTuple):
    """The rows' terms in the backward pass; the cotangents are divided by the normaliser."""

    largest: Array  # [t] +inf for a row without keys, whose weights are then 0
    doutput: Array  # [t, Dv]
    doffset: Array  # [t] dZ - dO . O - dH (H - log normalizer)
    dentropy: Array | None  # [t]


def _rows_of(residuals: Residuals, cotangents: Any) -> Rows:
    """The rows' terms from the saved arrays and the cotangents of output and statistics."""
    doutput, dstatistics = cotangents
    entropy = residuals.entropy
    # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
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
        # A term with weight 0 is 0: 0 * -inf would be NaN.
        shifted = jnp.where(exponentials > 0, shifted, 0)
        dweights = dweights - rows.dentropy[:, None] * shifted
    return exponentials * dweights, dvalues
