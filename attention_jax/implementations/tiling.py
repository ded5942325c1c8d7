"""Attention cut into tiles of t queries and s keys: what the tiled implementations share.

`prepare` brings the inputs of one example into tiles: everything that costs O(T + S) happens there,
under plain differentiation. What is left, `(Plan, Arrays, Constants)`, is all that a loop over
tiles needs, and no tile ever meets a NaN that a mask hides.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.core.over_batch import all_over_batch
from attention_jax.core.varying import varying_as
from attention_jax.implementations import bias_tiles
from attention_jax.implementations.bias_tiles import BiasTiles, Grid
from attention_jax.implementations.contract import BlockSizes, Inputs, Options
from attention_jax.implementations.online_softmax import SoftmaxState
from attention_jax.implementations.rounds import Rounds
from attention_jax.implementations.tile_arrays import positions, tiled
from attention_jax.pairwise import dropout
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask, array_field, mask_dataclass, padding_mask
from attention_jax.scores import key_features, masked_pair, stand_in_key, stand_in_query, stand_ins

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known before anything is traced."""

    options: Options
    tile: BlockSizes  # t and s
    query_tiles: int
    key_tiles: int
    ring: Rounds | None = None  # of devices that share the keys; None if all keys are here

    @property
    def grid(self) -> Grid:
        return Grid(self.tile, (self.query_tiles, self.key_tiles))


class Arrays(NamedTuple):
    """What gradients reach, in tiles, in the compute dtype."""

    queries: Any  # [query_tiles, t, Fq] as `project` made them, a pytree if it made one
    keys: Any  # [key_tiles, s, Fk]
    values: Array  # [key_tiles, s, Dv]
    params: Any
    biases: BiasTiles


class TileSchedule(NamedTuple):
    """Which tiles to visit, full ones first: the same for every example of a batch."""

    order: Array  # int [query_tiles, key_tiles] key tiles: full, then partly masked, then empty
    full: Array  # int [query_tiles] how many of them are full
    visited: Array  # int [query_tiles] how many are not empty


class Constants(NamedTuple):
    """What no gradient reaches."""

    mask: Mask | None
    schedule: TileSchedule | None  # None without a mask: all tiles are visited, in their order
    kept: Mask | None  # the weights that dropout keeps; None for all
    bias_integers: tuple[Bias, ...]  # of each function of position among the biases
    stand_ins: tuple[Any, Any] | None = None  # features in place of those of masked pairs


@mask_dataclass
class KeptWeights(Mask):
    """Those that dropout keeps: as a mask is, a function of positions."""

    rate: float
    rng: Array = array_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        return dropout.keep_mask(self.rng, self.rate, query_positions, key_positions)


def prepare(options: Options, inputs: Inputs) -> tuple[Plan, Arrays, Constants]:
    """Tokens that no allowed pair contains replaced, all padded to whole tiles, and projected."""
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    plan = plan_of(options, *lengths)
    whole = plan.query_tiles * plan.tile.query, plan.key_tiles * plan.tile.key

    mask = inputs.mask
    if whole != lengths:
        real = padding_mask(*map(jnp.asarray, lengths[::-1]))
        mask = real if mask is None else mask & real
    schedule, used_queries, used_keys = None, None, None
    if mask is not None:
        schedule = schedule_of(plan.grid, mask)
        used_queries, used_keys = used_tokens(plan, mask, schedule)
    arrays, integers = in_tiles(plan, inputs, used_queries, used_keys)
    instead = None if mask is None else stand_ins_of(inputs, options)
    return plan, arrays, Constants(mask, schedule, kept_of(options, inputs), integers, instead)


def stand_ins_of(inputs: Inputs, options: Options) -> tuple[Any, Any] | None:
    """The features that stand in for those of masked pairs, if the score needs any."""
    dtype = inputs.compute_dtype
    params, query, key = cast_floats((inputs.params, inputs.query, inputs.key), dtype)
    return stand_ins(options.score, params, query, key)


def plan_of(options: Options, query_length: int, key_length: int) -> Plan:
    """Even tiles no larger than the blocks asked for."""
    if is_symbolic_dim(query_length) or is_symbolic_dim(key_length):
        raise NotImplementedError(
            "implementation 'tiled' needs lengths that are known when it is traced; got T ="
            f" {query_length}, S = {key_length}: use 'reference', or export it for each length"
        )
    blocks = options.block_sizes
    tile = BlockSizes(_even_size(query_length, blocks.query), _even_size(key_length, blocks.key))
    return Plan(
        options, tile, math.ceil(query_length / tile.query), math.ceil(key_length / tile.key)
    )


def kept_of(options: Options, inputs: Inputs) -> Mask | None:
    """What dropout keeps; None if it keeps all."""
    if options.dropout_rate == 0:
        return None
    assert inputs.dropout_rng is not None  # the front door has checked
    return KeptWeights(options.dropout_rate, inputs.dropout_rng)


def in_tiles(
    plan: Plan, inputs: Inputs, used_queries: Array | None, used_keys: Array | None
) -> tuple[Arrays, tuple[Bias, ...]]:
    """Tokens that do not count replaced; all padded to whole tiles, projected and cut.

    Args:
        plan: how to cut.
        inputs: of one example.
        used_queries: bool [query_tiles * t], which tokens count; None if all do.
        used_keys: bool [key_tiles * s], the same.

    Returns:
        what gradients reach, and the integers of each function of position among the biases.
    """
    whole = plan.query_tiles * plan.tile.query, plan.key_tiles * plan.tile.key
    dtype = inputs.compute_dtype
    params, query, key, values = cast_floats(
        (inputs.params, inputs.query, inputs.key, inputs.value), dtype
    )
    # Padded before they are projected, so that the score sees nothing but plausible tokens.
    query = _filled(query, whole[0], used_queries, stand_in_query(query))
    key = jax.tree.map(
        lambda tokens: _filled(tokens, whole[1], used_keys, stand_in_key(tokens)), key
    )
    values = _filled(values, whole[1], used_keys, 0)
    q_features = plan.options.score.project_query(params, query)
    k_features = key_features(plan.options.score, params, key)
    biases, integers = bias_tiles.prepare(inputs.bias, dtype, plan.grid)
    arrays = Arrays(
        queries=jax.tree.map(functools.partial(tiled, count=plan.query_tiles), q_features),
        keys=jax.tree.map(functools.partial(tiled, count=plan.key_tiles), k_features),
        values=tiled(values, plan.key_tiles),
        params=params,
        biases=biases,
    )
    return arrays, integers


def empty_state(plan: Plan, arrays: Arrays) -> SoftmaxState:
    """The state of a tile of queries that has attended to no key."""
    state = SoftmaxState.empty(
        plan.tile.query,
        arrays.values.shape[-1],
        arrays.values.dtype,
        statistics=plan.options.return_statistics,
    )
    return varying_as(state, arrays)


def for_visited_keys(
    plan: Plan,
    constants: Constants,
    query_tile: Array,
    visit: Callable[[bool, Array, Any], Any],
    carry: Any,
) -> Any:
    """`carry = visit(masked, key_tile, carry)` for every tile of keys that is not empty.

    Two loops rather than a branch in one: a branch would copy what it passes through.
    """
    if constants.schedule is None:
        return jax.lax.fori_loop(0, plan.key_tiles, lambda j, carry: visit(False, j, carry), carry)
    order, full, visited = (array[query_tile] for array in constants.schedule)
    for masked, first, last in ((False, 0, full), (True, full, visited)):
        step = functools.partial(visit, masked)
        carry = jax.lax.fori_loop(
            first, last, lambda n, carry, step=step: step(order[n], carry), carry
        )
    return carry


def pair_logits(
    plan: Plan,
    params: Any,
    queries: Any,
    keys: Any,
    allowed: Array | None = None,
    stand_ins: tuple[Any, Any] | None = None,
) -> Array:
    """Logits [t, s] of one tile's features; see `scores.masked_pair` for the last two."""
    score = plan.options.score
    logits = masked_pair(score, params, queries, keys, allowed, stand_ins)
    if logits.shape != (plan.tile.query, plan.tile.key):
        raise ValueError(
            f"score {score} must give logits [t, s], here {[plan.tile.query, plan.tile.key]};"
            f" got {list(logits.shape)}"
        )
    return logits


def tile_logits(
    plan: Plan,
    arrays: Arrays,
    constants: Constants,
    i: Array,
    j: Array,
    queries: Any,
    keys: Any,
    masked: bool,
) -> Array:
    """Logits [t, s] of one tile, -inf where masked."""
    logits = pair_logits(plan, arrays.params, queries, keys).astype(arrays.values.dtype)
    bias = bias_tiles.tile_values(arrays.biases, constants.bias_integers, plan.grid, i, j)
    if bias is not None:
        logits = logits + bias
    if masked:
        assert constants.mask is not None  # no tile is masked without one
        logits = jnp.where(allowed_pairs(plan, constants.mask, i, j), logits, -jnp.inf)
    return logits


def allowed_pairs(plan: Plan, mask: Mask, query_tile: Array, key_tile: Array) -> Array:
    """Bool [t, s]."""
    where = positions(query_tile, plan.tile.query), positions(key_tile, plan.tile.key)
    return jnp.broadcast_to(mask.allowed(*where), (plan.tile.query, plan.tile.key))


def pairs_to_replace(
    plan: Plan, constants: Constants, query_tile: Array, key_tile: Array, masked: bool
) -> Array | None:
    """`allowed_pairs` where stand-ins have to replace masked pairs; None where none has to be."""
    if not masked or constants.stand_ins is None:
        return None
    assert constants.mask is not None  # no tile is masked without one
    return allowed_pairs(plan, constants.mask, query_tile, key_tile)


def kept_weights(
    plan: Plan, constants: Constants, query_tile: Array, key_tile: Array
) -> Array | None:
    """Bool [t, s], which weights dropout keeps; None if it keeps all."""
    if constants.kept is None:
        return None
    return allowed_pairs(plan, constants.kept, query_tile, key_tile)


# --- what `prepare` is made of ---


def _even_size(length: int, block: int) -> int:
    """The size of as few tiles as blocks of this size make, all as small as that number allows."""
    count = max(math.ceil(length / block), 1)
    size = math.ceil(length / count)
    # Whole vectors of a CPU or GPU; what it adds is masked.
    return max(size, 1) if count == 1 else min(8 * math.ceil(size / 8), block)


def schedule_of(grid: Grid, mask: Mask) -> TileSchedule:
    """The order of visits: the mask says for each tile whether it is empty, full or mixed."""

    def status(query_tile, key_tile):
        where = positions(query_tile, grid.tile.query), positions(key_tile, grid.tile.key)
        return mask.tile_status(*where)

    over_keys = jax.vmap(status, in_axes=(None, 0))
    status_of = jax.vmap(over_keys, in_axes=(0, None))
    empty, full = status_of(*map(jnp.arange, grid.tiles))
    # Together: on a batch that is cut up over devices it is one small reduction.
    empty, full = all_over_batch(jnp.stack([empty, full]))
    full &= ~empty
    rank = jnp.where(full, 0, jnp.where(empty, 2, 1))
    order = jnp.argsort(rank, axis=1, stable=True)
    return TileSchedule(order, jnp.sum(full, axis=1), jnp.sum(~empty, axis=1))


def used_tokens(plan: Plan, mask: Mask, schedule: TileSchedule) -> tuple[Array, Array]:
    """Bool [query_tiles * t] and [key_tiles * s]: which tokens an allowed pair contains."""
    constants = Constants(mask, schedule, None, ())

    def of_query_tile(used_keys, i):
        def visit(masked, j, carry):
            rows, used_keys = carry
            allowed = allowed_pairs(plan, mask, i, j) if masked else jnp.ones((1, 1), bool)
            return rows | allowed.any(1), used_keys.at[j].set(used_keys[j] | allowed.any(0))

        carry = varying_as((jnp.zeros(plan.tile.query, bool), used_keys), mask)
        rows, used_keys = for_visited_keys(plan, constants, i, visit, carry)
        return used_keys, rows

    none = varying_as(jnp.zeros((plan.key_tiles, plan.tile.key), bool), mask)
    used_keys, used_queries = jax.lax.scan(of_query_tile, none, jnp.arange(plan.query_tiles))
    return used_queries.reshape(-1), used_keys.reshape(-1)


def _filled(tokens: Array, length: int, used: Array | None, filler: Array | float) -> Array:
    """Tokens [length, ...] with `filler`, [1, ...] or one number, for those that are not used."""
    if used is None:
        return tokens
    # Replaced before it is padded, so that no operation meets a NaN that a mask hides.
    count, *rest = tokens.shape
    filler = jnp.broadcast_to(jnp.asarray(filler, tokens.dtype), (1, *rest))
    tokens = jnp.where(used[:count].reshape(count, *[1] * len(rest)), tokens, filler)
    return jnp.concatenate([tokens, jnp.broadcast_to(filler, (length - count, *rest))])
