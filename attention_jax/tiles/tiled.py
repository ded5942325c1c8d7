"""Tiled attention with a hand-written gradient: memory linear in T and S, for every score.

The forward pass folds the state of a normaliser over tiles of keys: for softmax, the online
softmax; for a normaliser with a threshold, first the search for it. It saves its inputs, the
output, and a few numbers of each row, from which the backward pass recomputes the weights of every
tile: for softmax, the largest logit and the sum of exponentials. (The logsumexp alone would
suffice, but its rounding error at logits of 1e4 is 1e-3 of the weights in float32.) All other
derivatives are those of `twin`, in linear memory as well.

`ring` runs the same code on many devices: there both passes visit the keys once per round, those
that the device holds then.

Source: Dao et al. 2022, algorithms 1 and 4, there for scaled dot and without statistics.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.core.meshes import varying_as
from attention_jax.core.products import einsum, tall_product
from attention_jax.normalizers import AttentionStatistics
from attention_jax.normalizers.contract import BoundNormalizer
from attention_jax.normalizers.fold import FinalRows, RowSums, sums_over_keys
from attention_jax.normalizers.softmax_rows import RowShift, RowSummary
from attention_jax.tiles import twin
from attention_jax.tiles.features import pair_logits_vjp
from attention_jax.tiles.options import Inputs, Options, results_of_rows
from attention_jax.tiles.prepare import Arrays, Plan, Shared, over_key_tiles, prepare, uncut
from attention_jax.tiles.tile import Tile, add_at, empty_sums

Array = jax.Array


def attend(options: Options, inputs: Inputs) -> tuple[Array, AttentionStatistics | None]:
    """One example: output [T, Dv] in the query's dtype, and statistics in the compute dtype."""
    target_length = inputs.query.shape[0]
    if 0 in (target_length, inputs.key.shape[0]):  # no tiles
        zeros = jnp.zeros((target_length, inputs.value.shape[-1]), inputs.compute_dtype)
        sums = RowSums.empty(options.normalizer, zeros, entropy=options.return_statistics)
        rows = sums.finalize(options.normalizer)
        return results_of_rows(options, inputs, rows.output, rows.summary)
    rows = attend_tiles(*prepare(options, inputs))
    output, summary = jax.tree.map(lambda tiles: uncut(tiles, target_length), rows)
    return results_of_rows(options, inputs, output, summary)


@functools.partial(
    custom_vjp,
    nondiff_argnums=(0,),
    twin=twin.attend_tiles,
    linear=lambda plan, arrays: arrays.values,
)
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


# --- forward ---


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once for value and gradient
def _forward(plan: Plan, arrays: Arrays) -> FinalRows:
    """The results of all rows: one tile of queries after the other, each over its tiles of keys."""
    normalizer = plan.options.normalizer
    bound = BoundNormalizer(normalizer, arrays.shared.normalizer_params)

    def one_round(arrays: Arrays, of_keys: None, sums: RowSums) -> tuple[None, RowSums]:
        """Every tile of queries, over the keys of `arrays`."""

        def one_query_tile(slices: tuple[Array, Any, RowSums]) -> RowSums:
            i, queries, sums = slices

            def over_keys(add: Callable[..., Any], carry: Any) -> Any:
                def one_key_tile(j: Array, masked: bool, carry: Any) -> Any:
                    tile = Tile(plan, arrays, i, j, masked)
                    keys, values = tile.keys_and_values
                    logits = bound.transform(tile.logits(queries, keys), tile.num_keys)
                    return add(carry, logits, values, tile.factors_of_values)

                return over_key_tiles(plan, arrays.schedule, i, one_key_tile, carry)

            # `add` is `RowSums.with_tile`; before, for a threshold, what its search adds up.
            return sums_over_keys(sums, bound, over_keys, plan.padded_lengths[1])

        of_tiles = jnp.arange(plan.query_tiles), arrays.queries, sums
        return of_keys, jax.lax.map(one_query_tile, of_tiles)

    _, sums = plan.over_rounds(arrays, None, empty_sums(plan, arrays), one_round)
    return sums.finalize(normalizer)


# --- backward ---


class RowCotangents(NamedTuple):
    """The shift of each row, and its cotangents, which are divided by the row's divisor once.

    The gradient of a pair is its undivided weight times these.
    """

    shift: RowShift  # [t] with the reference +inf for a row without weights
    # [t] by which each tile divides what it makes of `doutput`; None if that is divided already. In
    # bfloat16 dO is exact and dO / n is not: in a saturated row, dO . v_j - dO . mean would be that
    # rounding.
    divisor: Array | None
    doutput: Array  # [t, Dv]
    doffset: Array | None  # [t] c - dO . mean - dH (H - log n), see below; None if it is 0
    dentropy: Array | None  # [t]


# For softmax, with its weights w, the output O = sum_j w_j value_j of a row and a cotangent dO,
#     dvalue_j = w_j dO,    dx_j = w_j (dO . value_j - dO . O),
# and the score pulls the dx back. A hidden pair has w = exp(-inf) = 0, so its gradients are 0.
#
# In general, with x the transformed logits of a row, w its weights, w' their derivatives (w for
# softmax), a damping d (0 without one), u = dropout(w) exp(d) and O = sum_j u_j value_j,
#     dvalue_j = u_j dO,    dd_j = u_j dO . value_j,
#     dx_j = w'_j (dropout(dO . value_j) exp(d_j) - dO . mean),
# with the mean by slopes of `normalizers.contract`: O for softmax, 0 for weights that do not sum to
# 1. The parameters of the normaliser and of its transform get what the same cotangent of the
# weights, the bracket, gives them. For softmax with the sum n of exponentials and the entropy H,
# and the cotangents c of log n and dH, the bracket also has the terms
#     c - dH (log w_j + H),
# since dlog(n)/dx_j = w_j and dH/dx_j = -w_j (log w_j + H). No tile forms w = exp(x - M) / n: it
# has exp(x - M), and the cotangents of each row are divided by its divisor n once.
def _attend_bwd(plan: Plan, residuals: Residuals, cotangents: Any) -> tuple[Arrays]:
    arrays, all_drows = residuals.arrays, _row_cotangents(plan, residuals, cotangents)

    def one_round(arrays: Arrays, dkeys_values: Any, others: Any) -> tuple[Any, Any]:
        """Adds what every tile of queries gives to the gradients, over the keys of `arrays`.

        Args:
            arrays: with the keys that are on this device.
            dkeys_values: the gradients of these keys' features and values, [key_tiles, s, ...].
            others: those of the queries, [query_tiles, t, ...], and of what all pairs share.
        """

        def one_query_tile(carry: Any, slices: Any) -> tuple[Any, Any]:
            i, queries, (shift, divisor, *cotangents), dqueries = slices
            scale = _scale_of_float16(arrays, cotangents)
            if scale is not None:
                cotangents = jax.tree.map(lambda leaf: leaf * scale, cotangents)
            drows = RowCotangents(shift, divisor, *cotangents)

            def one_key_tile(j: Array, masked: bool, carry: Any) -> Any:
                dqueries, dkeys_values, dshared = carry
                tile = Tile(plan, arrays, i, j, masked)
                dq, dkv, of_shared = _tile_gradients(tile, queries, drows, scale)
                dparams, dlogits, dnormalizer, ddamping = of_shared
                shared = arrays.shared
                dshared = Shared(
                    params=jax.tree.map(jnp.add, dshared.params, dparams),
                    biases=tile.add_bias_gradient(dshared.biases, shared.biases, dlogits),
                    normalizer_params=jax.tree.map(jnp.add, dshared.normalizer_params, dnormalizer),
                    damping=tile.add_bias_gradient(dshared.damping, shared.damping, ddamping),
                )
                dqueries = jax.tree.map(jnp.add, dqueries, dq)
                dkeys_values = jax.tree.map(
                    lambda total, of_tile: add_at(total, (j,), of_tile), dkeys_values, dkv
                )
                return dqueries, dkeys_values, dshared

            carry = varying_as((dqueries, *carry), arrays, drows)
            dqueries, *carry = over_key_tiles(plan, arrays.schedule, i, one_key_tile, carry)
            return tuple(carry), dqueries

        dqueries, dshared = others
        of_tiles = jnp.arange(plan.query_tiles), arrays.queries, all_drows, dqueries
        carry = dkeys_values, dshared
        (dkeys_values, dshared), dqueries = jax.lax.scan(one_query_tile, carry, of_tiles)
        return dkeys_values, (dqueries, dshared)

    def zeros(leaf: Array) -> Array:
        """In at least float32, for the sum of gradients of tiles; a leaf that is no float stays."""
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.zeros_like(leaf, dtype=plan.dtype) if is_float else leaf

    floats = (arrays.keys, arrays.values), (arrays.queries, arrays.shared)
    of_keys, others = jax.tree.map(zeros, floats)
    totals = plan.over_rounds(arrays, of_keys, others, one_round)
    gradients = jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), totals, floats)
    (dkeys, dvalues), (dqueries, dshared) = gradients
    return (Arrays(dqueries, dkeys, dvalues, dshared),)


attend_tiles.defvjp(_attend_fwd, _attend_bwd)


def _row_cotangents(plan: Plan, residuals: Residuals, cotangents: Any) -> RowCotangents:
    """The rows' terms from the saved arrays and the cotangents of output and statistics."""
    doutput, dsummary = cotangents
    rows = residuals.rows
    # A row without keys sends gradient 0, whatever its cotangent is, NaN included.
    doutput = jnp.where(rows.empty[..., None], 0, doutput)
    shift = rows.shift._replace(reference=jnp.where(rows.empty, jnp.inf, rows.shift.reference))
    doffset: Any = None
    dentropy = None
    if plan.options.normalizer.sums_to_one:
        mean = rows.output if rows.mean_by_slopes is None else rows.mean_by_slopes
        doffset = -jnp.sum(doutput * mean, axis=-1)
    if rows.summary is not None:
        doffset = doffset + jnp.where(rows.empty, 0, dsummary.log_sum)
        if rows.summary.entropy is not None:
            dentropy = jnp.where(rows.empty, 0, dsummary.entropy)
            doffset = doffset - dentropy * (rows.summary.entropy - rows.summary.log_sum)
    terms = jax.tree.map(lambda row: row / rows.divisor, (doffset, dentropy))
    if residuals.arrays.values.dtype == jnp.bfloat16:
        return RowCotangents(shift, rows.divisor, doutput, *terms)
    return RowCotangents(shift, None, doutput / rows.divisor[..., None], *terms)


def _scale_of_float16(arrays: Arrays, cotangents: list[Any]) -> Array | None:
    """A power of two that brings the cotangents of t rows to the size 1; None without float16.

    Divided by the divisor of a long row, they underflow in the products of float16.
    """
    tokens = jax.tree.leaves((arrays.queries, arrays.keys, arrays.values))
    if all(leaf.dtype != jnp.float16 for leaf in tokens):
        return None
    largest = functools.reduce(
        jnp.maximum, [jnp.max(jnp.abs(leaf)) for leaf in jax.tree.leaves(cotangents)]
    )
    exponent = jnp.frexp(largest)[1]
    # Neither the power nor its inverse overflows.
    return jnp.ldexp(jnp.ones_like(largest), jnp.clip(-exponent, -100, 100))


def _tile_gradients(
    tile: Tile, queries: Any, drows: RowCotangents, scale: Array | None
) -> tuple[Any, tuple[Any, Array], tuple[Any, Array, Any, Array]]:
    """The gradients of one tile, divided by `scale`.

    Returns:
        those of the queries' features [t, Fq]; of the keys' features [s, Fk] and values [s, Dv];
        and of the score's parameters, the logits [t, s], the normaliser's parameters, and the
        damping [t, s].
    """
    arrays = tile.arrays
    keys, values = tile.keys_and_values
    logits = tile.logits(queries, keys)

    def undivided_weights(params: Any, logits: Array) -> tuple[Array, Array]:
        bound = BoundNormalizer(tile.plan.options.normalizer, params)
        shifted = drows.shift.shifted(bound.transform(logits, tile.num_keys))
        return bound.weight(shifted), shifted

    undivided, pull_back, shifted = jax.vjp(
        undivided_weights, arrays.shared.normalizer_params, logits, has_aux=True
    )
    dfactors, doutput = einsum("td,sd->ts", drows.doutput, values), drows.doutput
    if drows.divisor is not None:
        dfactors, doutput = (each / drows.divisor[:, None] for each in (dfactors, doutput))
    # Factors are weights times numbers of their own, so cotangents pass by the same map.
    factors, dweights = map(tile.factors_of_values, (undivided, dfactors))
    dvalues = tall_product(doutput.astype(values.dtype), factors)
    if drows.doffset is not None:
        dweights = dweights + drows.doffset[:, None]
    if drows.dentropy is not None:
        # A term with weight 0 is 0: 0 * -inf would be NaN.
        dweights = dweights - drows.dentropy[:, None] * jnp.where(undivided > 0, shifted, 0)
    dnormalizer, dlogits = pull_back(dweights)
    dparams, dq, dk = pair_logits_vjp(
        tile.plan.options.score,
        arrays.shared.params,
        queries,
        keys,
        tile.allowed,
        arrays.stand_ins,
        dlogits,
    )
    gradients = dq, (dk, dvalues), (dparams, dlogits, dnormalizer, dfactors * factors)

    def unscaled(gradient: Array) -> Array:
        if scale is None or gradient.dtype == jnp.bool_:  # of a flag in the params, 0
            return gradient
        return (gradient / scale).astype(gradient.dtype)

    return jax.tree.map(unscaled, gradients)
