"""The inputs of tiled attention cut into tiles of t queries and s keys, and the order of the tiles.

`prepare` does all work outside of the main loop over tiles, for one example. It replaces, pads,
projects and cuts tokens, at a cost of O(T + S); JAX differentiates this. Finding the tokens that no
allowed pair contains (`used_tokens`) takes a loop of its own over the partly masked tiles. The
results `(Plan, Arrays)` are all that the main loop needs. They contain no NaN that a mask hides.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from attention_jax.core.arrays import cast_floats
from attention_jax.core.batches import all_over_batch
from attention_jax.core.meshes import varying_as
from attention_jax.positions.contract import Bias, DenseBias, Mask, SumBias, TileStatus, members
from attention_jax.positions.dropout import DropoutMask
from attention_jax.positions.masks import padding_mask
from attention_jax.tiles.features import project_tokens, stand_in_features
from attention_jax.tiles.options import Inputs, Options

Array = jax.Array
# (arrays, what travels with their keys, carry) -> (what travels with the keys, carry)
Round = Callable[[Any, Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static part of a tiled computation."""

    options: Options
    tile: tuple[int, int]  # t and s
    lengths: tuple[int, int]  # T and S
    dtype: Any  # float64 or float32, of logits, weights, sums and gradients
    ring: Any = None  # the `Ring` of devices that share the keys; None for a single device

    @property
    def query_tiles(self) -> int:
        """The number of tiles of queries."""
        return math.ceil(self.lengths[0] / self.tile[0])

    @property
    def key_tiles(self) -> int:
        """The number of tiles of keys."""
        return math.ceil(self.lengths[1] / self.tile[1])

    @property
    def padded_lengths(self) -> tuple[int, int]:
        """T and S, padded to whole tiles."""
        return self.query_tiles * self.tile[0], self.key_tiles * self.tile[1]

    def positions(self, i: Array, j: Array) -> tuple[Array, Array]:
        """The positions of the queries and of the keys of a tile, int [t] and [s]."""
        t, s = self.tile
        return i * t + jnp.arange(t), j * s + jnp.arange(s)

    def over_rounds(
        self, arrays: "Arrays", of_keys: Any, carry: Any, one_round: Round
    ) -> tuple[Any, Any]:
        """`one_round(arrays, of_keys, carry)`; in a ring of devices once for the keys of each.

        `of_keys` travels with the keys: their gradients in the backward pass, None in the forward
        pass.
        """
        rounds = one_round if self.ring is None else functools.partial(self.ring.rounds, one_round)
        return rounds(arrays, of_keys, carry)


class BiasTiles(NamedTuple):
    """The summands of a bias: tables are cut, functions of position are evaluated tile by tile.

    Each tile adds to its own part of a table's gradient, while every tile adds to the gradient of a
    function's few arrays.
    """

    tables: tuple[Array, ...]  # each [query_tiles or 1, key_tiles or 1, t or 1, s or 1]
    functions: tuple[Bias, ...]


class Shared(NamedTuple):
    """What all pairs share, in the compute dtype."""

    # of the score, with what `tile_params` adds (for `Additive` two bools, whose gradient is 0)
    params: Any
    biases: BiasTiles
    normalizer_params: Any
    damping: BiasTiles


class TileSchedule(NamedTuple):
    """The order in which each tile of queries visits tiles of keys, shared by the whole batch."""

    order: Array  # int [query_tiles, key_tiles] key tiles: full, then partly masked, then empty
    full: Array  # int [query_tiles] the number of full key tiles
    visited: Array  # int [query_tiles] the number of key tiles that are not empty


class Arrays(NamedTuple):
    """The arrays in tiles. Features and values keep 16 bits, in which they are multiplied."""

    queries: Any  # [query_tiles, t, Fq] features from `project_query`, or a pytree of such arrays
    keys: Any  # [key_tiles, s, Fk] features from `project_key`, or a pytree of such arrays
    values: Array  # [key_tiles, s, Dv]
    shared: Shared
    # What follows is not differentiated.
    mask: Any = None  # a `Mask`, or None
    schedule: TileSchedule | None = None  # None without a mask: all keys are visited in order
    dropout_mask: Mask | None = None  # True for the weights that dropout keeps
    stand_ins: tuple[Any, Any] | None = None  # features that replace those of masked pairs
    num_keys: Array | None = None  # [query_tiles, t] if the normaliser reads it


def prepare(options: Options, inputs: Inputs) -> tuple[Plan, Arrays]:
    """Replaces tokens that no allowed pair contains, pads to whole tiles, projects and cuts."""
    lengths = inputs.query.shape[0], inputs.key.shape[0]
    plan = make_plan(options, lengths, inputs.compute_dtype)
    mask = mask_with_padding(plan, inputs.mask)
    schedule, used = None, None
    if mask is not None:
        schedule = schedule_of(tile_statuses(plan, mask))
        used = used_tokens(plan, mask, schedule)
    return plan, cut_inputs(plan, inputs, mask, schedule, used or (None, None), lengths[1])


def make_plan(options: Options, lengths: tuple[int, int], dtype: Any) -> Plan:
    """Cuts T and S into tiles of equal size, no larger than `options.block_sizes`."""
    if any(map(is_symbolic_dim, lengths)):
        raise NotImplementedError(
            "implementation 'tiled' needs lengths that are known at tracing time; got T ="
            f" {lengths[0]}, S = {lengths[1]}: use 'reference', or export it for each length"
        )

    def even_size(length: int, block: int) -> int:
        """The smallest equal size of tiles that needs no more of them than the size `block`."""
        count = max(math.ceil(length / block), 1)
        size = math.ceil(length / count)
        # A multiple of 8 fills the vector registers; the padding is masked.
        return max(size, 1) if count == 1 else min(8 * math.ceil(size / 8), block)

    blocks = options.block_sizes
    tile = even_size(lengths[0], blocks.query), even_size(lengths[1], blocks.key)
    return Plan(options, tile, lengths, dtype)


def mask_with_padding(plan: Plan, mask: Mask | None) -> Mask | None:
    """The mask, which also hides the padding of T and S to whole tiles; None: all are allowed."""
    if plan.padded_lengths == plan.lengths:
        return mask
    unpadded = padding_mask(*map(jnp.asarray, plan.lengths[::-1]))
    return unpadded if mask is None else mask & unpadded


# --- which tiles are visited, and which tokens are used ---


def tile_statuses(plan: Plan, mask: Mask) -> TileStatus:
    """Whether the mask leaves each tile empty, and whether full: bool [query_tiles, key_tiles]."""

    def status(query_tile, key_tile):
        return mask.tile_status(*plan.positions(query_tile, key_tile))

    def row(query_tile):
        """One row at a time: a user's status may evaluate the mask, bool [key_tiles, t, s]."""
        return jax.vmap(status, (None, 0))(query_tile, jnp.arange(plan.key_tiles))

    return jax.lax.map(row, jnp.arange(plan.query_tiles))


def schedule_of(statuses: TileStatus) -> TileSchedule:
    """The order of visits for these statuses, the same for all examples of the batch."""
    # One stacked array: a batch that is sharded over devices then needs one small reduction.
    empty, full = all_over_batch(jnp.stack(statuses))
    full &= ~empty
    rank = jnp.where(full, 0, jnp.where(empty, 2, 1))
    order = jnp.argsort(rank, axis=-1, stable=True)
    return TileSchedule(order, jnp.sum(full, axis=-1), jnp.sum(~empty, axis=-1))


def key_tile_loops(
    plan: Plan, schedule: TileSchedule | None, i: Array
) -> tuple[Array, list[tuple[bool, Any, Any]]]:
    """The tiles of keys that the i-th tile of queries attends to.

    Full and partly masked tiles have a loop each. A branch in a single loop would copy the carry.
    The visit of a single tile is no loop: XLA:CPU would run what remains in it on one thread.

    Returns:
        the order of the tiles, int [key_tiles]; and (whether the mask may hide pairs, the first and
        the end of the places in this order) of each loop.
    """
    if schedule is None:
        return jnp.arange(plan.key_tiles), [(False, 0, plan.key_tiles)]
    order, full, visited = tile_of(schedule, i)
    if plan.query_tiles == plan.key_tiles == 1 and plan.ring is None:
        return order, [(True, 0, 1)]
    return order, [(False, 0, full), (True, full, visited)]


def over_key_tiles(
    plan: Plan,
    schedule: TileSchedule | None,
    i: Array,
    one_key_tile: Callable[[Array, bool, Any], Any],
    carry: Any,
) -> Any:
    """`carry = one_key_tile(j, masked, carry)` for each j that the i-th tile of queries visits."""
    order, loops = key_tile_loops(plan, schedule, i)
    for masked, first, end in loops:

        def step(n: Array, carry: Any, masked: bool = masked) -> Any:
            return one_key_tile(tile_of(order, n), masked, carry)

        carry = jax.lax.fori_loop(first, end, step, carry)
    return carry


def used_tokens(plan: Plan, mask: Mask, schedule: TileSchedule) -> tuple[Array, Array]:
    """How many keys each query may attend to, and which keys an allowed pair contains.

    It evaluates the mask on every tile that is partly masked, [t, s] at a time.

    Returns:
        (int [query_tiles * t], bool [key_tiles * s]).
    """
    t, s = plan.tile
    set_tile = functools.partial(
        jax.lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False
    )

    def one_query_tile(used_keys: Array, i: Array) -> tuple[Array, Array]:
        def one_key_tile(j: Array, masked: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            counts, used_keys = carry
            if not masked:
                return counts + s, set_tile(used_keys, jnp.ones(s, bool), j)
            allowed = jnp.broadcast_to(mask.at(*plan.positions(i, j)), (t, s))
            used_keys = set_tile(used_keys, tile_of(used_keys, j) | allowed.any(0), j)
            return counts + allowed.sum(1), used_keys

        carry = varying_as((jnp.zeros(t, int), used_keys), mask)
        counts, used_keys = over_key_tiles(plan, schedule, i, one_key_tile, carry)
        return used_keys, counts

    used_keys = varying_as(jnp.zeros((plan.key_tiles, s), bool), mask)
    used_keys, counts = jax.lax.scan(one_query_tile, used_keys, jnp.arange(plan.query_tiles))
    return counts.reshape(-1), used_keys.reshape(-1)


# --- cutting ---


def cut_inputs(
    plan: Plan,
    inputs: Inputs,
    mask: Mask | None,
    schedule: TileSchedule | None,
    used: tuple[Array | None, Array | None],
    source_length: int,
) -> Arrays:
    """Replaces unused tokens, pads to whole tiles, projects and cuts.

    Args:
        plan: the sizes and numbers of tiles.
        inputs: the arrays of one example.
        mask: that of the tiles, which hides padding too.
        schedule: of the tiles, for this mask.
        used: see `used_tokens`; None if every query has all keys, and None if all keys are used.
        source_length: the number of all keys, those of other devices included.
    """
    options = plan.options
    keys_per_query, used_keys = used
    queries, keys, values, params = project_tokens(
        options.score,
        inputs,
        plan.padded_lengths,
        (None if keys_per_query is None else keys_per_query > 0, used_keys),
        plan.ring and plan.ring.axis,
    )
    dropout_mask, num_keys = None, None
    if options.dropout_rate > 0:
        dropout_mask = DropoutMask(options.dropout_rate, inputs.dropout_rng)
    if options.normalizer.uses_num_keys:
        counts = jnp.asarray(source_length) if keys_per_query is None else keys_per_query
        num_keys = cut(jnp.broadcast_to(counts, plan.padded_lengths[:1]), plan.query_tiles)
        num_keys = num_keys.astype(plan.dtype)
    return Arrays(
        queries=jax.tree.map(functools.partial(cut, count=plan.query_tiles), queries),
        keys=jax.tree.map(functools.partial(cut, count=plan.key_tiles), keys),
        values=cut(values, plan.key_tiles),
        shared=Shared(
            params=options.score.tile_params(params, queries),
            biases=_cut_bias(plan, inputs.bias),
            normalizer_params=cast_floats(inputs.normalizer_params, plan.dtype),
            damping=_cut_bias(plan, inputs.damping),
        ),
        mask=mask,
        schedule=schedule,
        dropout_mask=dropout_mask,
        stand_ins=None if mask is None else stand_in_features(options.score, inputs),
        num_keys=num_keys,
    )


def cut(array: Array, count: int) -> Array:
    """[length, ...] -> [count, length / count, ...]."""
    # A -1 in the shape would be ambiguous for arrays without features.
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def tile_of(tiles: Any, index: Array) -> Any:
    """The tile at `index` of each leaf; a leaf with a single tile shares it among all indices."""
    never = {"allow_negative_indices": False}  # to trace them would take four operations each
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_index_in_dim(
            leaf, 0 if leaf.shape[0] == 1 else index, keepdims=False, **never
        ),
        tiles,
    )


def uncut(tiles: Array, length: int) -> Array:
    """[count, t, ...] -> [length, ...], which drops the padding at the end."""
    return tiles.reshape(tiles.shape[0] * tiles.shape[1], *tiles.shape[2:])[:length]


def repeated(tiles: Array, count: int) -> Array:
    """Broadcasts a leading axis of size 1 to `count` tiles."""
    return jnp.broadcast_to(tiles, (count, *tiles.shape[1:]))


def _cut_bias(plan: Plan, bias: Bias | None) -> BiasTiles:
    def cut_table(table: Array) -> Array:
        """[T or 1, S or 1] -> a table of `BiasTiles`, zero-padded."""
        counts = plan.query_tiles, plan.key_tiles
        sides = [
            (1, 1, 0) if length == 1 else (count, size, count * size - length)
            for length, count, size in zip(table.shape, counts, plan.tile, strict=True)
        ]
        (query_tiles, t, query_padding), (key_tiles, s, key_padding) = sides
        table = jnp.pad(table, ((0, query_padding), (0, key_padding)))
        return table.reshape(query_tiles, t, key_tiles, s).swapaxes(1, 2)

    summands = members(cast_floats(bias, plan.dtype), SumBias)
    tables = tuple(cut_table(each.table) for each in summands if isinstance(each, DenseBias))
    return BiasTiles(tables, tuple(each for each in summands if not isinstance(each, DenseBias)))
