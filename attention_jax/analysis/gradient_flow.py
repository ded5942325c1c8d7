"""Norms of the logits' gradient by query and by key, in memory linear in T and S.

For every tile of queries, the loop over keys runs twice: first for the rows' largest logits,
normalisers and outputs, and then for the gradient of each tile's logits, whose sums of squares
alone are stored. With A the weights, dA = dO V^T and O = A V,

    dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik) = A_ij (dO_i . V_j - dO_i . O_i).

Source: Dao et al. 2022, section 3.1 and appendix B.2, for the streaming and the second equality.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.gradients import checked_doutput
from attention_jax.core.arrays import cast_floats
from attention_jax.functional.checks import checked_inputs
from attention_jax.implementations import (
    BlockSizes,
    Inputs,
    Options,
    tile_arrays,
    tiling,
)
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.choice import chosen_block_sizes
from attention_jax.implementations.tiling import Arrays, Constants, Plan
from attention_jax.normalizers import RowState
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Params, Score, get_score

Array = jax.Array


class GradientFlow(NamedTuple):
    """Norms of the gradient of the logits, in the compute dtype."""

    by_query: Array  # [*B, T]  sqrt(sum_j dlogits_ij^2)
    by_key: Array  # [*B, S]  sqrt(sum_i dlogits_ij^2)
    total: Array  # [*B]  sqrt(sum_ij dlogits_ij^2)


def gradient_flow(
    query: Array,
    key: Array,
    value: Array,
    doutput: Array,
    *,
    score: str | Score = "scaled",
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
    block_sizes: BlockSizes | None = None,
) -> GradientFlow:
    """The norms of attention's `dlogits` by query, by key and in total, without an array [T, S].

        by_query_i = |dlogits_i:|,    by_key_j = |dlogits_:j|,    total = |dlogits|

    with `dlogits` as in `attention_gradients`. Queries and keys whose norm is 0 learn nothing
    through the weights; a query with a saturated row is an example.

    Forward mode works; reverse mode does not work under a mask.

    Args:
        query, key, value, doutput, score, params, mask, bias: as in `attention_gradients`.
        block_sizes: tile sizes, which affect only time and memory; None chooses them.

    Returns:
        `GradientFlow` in float32, or float64 if any of query, key, value, params and bias is.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((1, 1)), jnp.zeros((2, 1)), jnp.array([[-3.0], [5.0]])
    >>> gradient_flow(query, key, value, jnp.ones((1, 1))).by_key
    Array([2., 2.], dtype=float32)

    Source: Dao et al. 2022, appendix B.2 (their dS is dlogits); the norms are ours.
    """
    score = get_score(score)
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise ValueError(f"block_sizes must be a BlockSizes or None; got {block_sizes!r}")
    score, _, inputs = checked_inputs(score, query, key, value, params, mask, bias)
    doutput = checked_doutput(inputs, doutput)
    options = Options(score, block_sizes or chosen_block_sizes(score, inputs))
    return _flow(options, inputs, doutput)


@functools.partial(jax.jit, static_argnums=0)
def _flow(options: Options, inputs: Inputs, doutput: Array) -> GradientFlow:
    one_example = functools.partial(_one_example, options)
    return vmap_over_batch(options.score, one_example, inputs, (doutput, 2))


def _one_example(options: Options, inputs: Inputs, doutput: Array) -> GradientFlow:
    dtype = inputs.compute_dtype
    target_length, source_length = inputs.query.shape[0], inputs.key.shape[0]
    if 0 in (target_length, source_length):
        by_query, by_key = (jnp.zeros(n, dtype) for n in (target_length, source_length))
        return GradientFlow(by_query, by_key, jnp.zeros((), dtype))
    # The flow is that of the numbers given, without the rounding of 16-bit products.
    inputs = cast_floats(inputs, dtype)
    plan, arrays, constants = tiling.prepare(options, inputs)
    padding = plan.query_tiles * plan.tile.query - target_length
    doutput = jnp.pad(doutput.astype(dtype), ((0, padding), (0, 0)))

    def step(by_key: Array, tile: Any) -> tuple[Array, Array]:
        by_query, by_key = _of_query_tile(plan, arrays, constants, by_key, *tile)
        return by_key, by_query

    tiles = (
        jnp.arange(plan.query_tiles),
        arrays.queries,
        tile_arrays.tiled(doutput, plan.query_tiles),
    )
    zeros = jnp.zeros((plan.key_tiles, plan.tile.key), dtype)
    squares_by_key, squares_by_query = jax.lax.scan(step, zeros, tiles)
    by_query = tile_arrays.untiled(squares_by_query, target_length)
    by_key = tile_arrays.untiled(squares_by_key, source_length)
    return GradientFlow(jnp.sqrt(by_query), jnp.sqrt(by_key), jnp.sqrt(jnp.sum(by_query)))


def _of_query_tile(
    plan: Plan,
    arrays: Arrays,
    constants: Constants,
    by_key: Array,
    i: Array,
    queries: Any,
    doutput: Array,
) -> tuple[Array, Array]:
    """(sums of squares of t queries, `by_key` [key_tiles, s] with their squares added)."""

    def tile(masked: bool, j: Array) -> tuple[Array, Array]:
        keys, values = tile_arrays.tile_of((arrays.keys, arrays.values), j)
        return tiling.tile_logits(plan, arrays, constants, i, j, queries, keys, masked), values

    normalizer, params = plan.options.normalizer, arrays.normalizer_params

    def attend(masked: bool, j: Array, state: RowState) -> RowState:
        return state.update(normalizer, params, *tile(masked, j), None, 0.0)

    state = tiling.for_visited_keys(plan, constants, i, attend, tiling.empty_state(plan, arrays))
    rows = state.finalize(normalizer, params)
    assert rows.divisor is not None  # of softmax

    # A row without keys sends gradient 0 for any doutput: its exponentials and its dO become 0.
    doutput = jnp.where(rows.empty[:, None], 0, doutput) / rows.divisor[:, None]
    mean = jnp.sum(doutput * rows.output, axis=-1)

    def add_squares(masked: bool, j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        by_query, by_key = carry
        logits, values = tile(masked, j)
        dweights = jnp.matmul(doutput, values.T, precision="highest")
        exponentials = jnp.exp(rows.shift.shifted(logits))
        # A masked value may be infinite, which makes its dweights NaN.
        dlogits = exponentials * jnp.where(exponentials == 0, 0, dweights - mean[:, None])
        squares = dlogits * dlogits
        by_key = tile_arrays.add_tile(by_key, j, jnp.sum(squares, axis=0))
        return by_query + jnp.sum(squares, axis=1), by_key

    carry = (jnp.zeros_like(mean), by_key)
    return tiling.for_visited_keys(plan, constants, i, add_squares, carry)
