"""How inputs are cut into tiles, and which tiles are visited."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import OwnCosine, quick_jit
from score_cases import features_of

import attention_jax as aj
from attention_jax.implementations import (
    BlockSizes,
    Inputs,
    Options,
    bias_tiles,
    tile_arrays,
    tiling,
)
from attention_jax.pairwise.biases import as_bias
from attention_jax.pairwise.masks import Mask, mask_dataclass, submask_field

T, S, DQ, DK, DV = 5, 7, 3, 11, 2
RNG = np.random.default_rng(9)


def inputs_of(target=T, source=S, mask=None, bias=None, score=None):
    score = OwnCosine() if score is None else score
    arrays = (RNG.normal(size=shape) for shape in ((target, DQ), (source, DK), (source, DV)))
    params = score.init(jax.random.key(0), DQ, DK)
    return Inputs(
        *(jnp.asarray(x, jnp.float32) for x in arrays),
        params,
        mask,
        None if bias is None else as_bias(bias),
        None,
    )


def prepared(blocks, inputs):
    """Returns (plan, arrays, constants)."""
    plans = []

    def arrays_and_constants(inputs):
        plan, *rest = tiling.prepare(Options(OwnCosine(), BlockSizes(*blocks)), inputs)
        plans.append(plan)
        return rest

    arrays, constants = quick_jit(arrays_and_constants)(inputs)
    return plans[0], arrays, constants


def equations(jaxpr):
    """Of a jaxpr and of all that it contains."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(value)


# --- the cut ---


def test_tiles_are_as_few_as_the_block_allows_and_even():
    for block in range(1, 40):
        for length in range(1, 90):
            size = tiling._even_size(length, block)
            count = -(-length // size)
            assert size <= block
            assert count == -(-length // block)
            assert size <= 8 * -(-length // (8 * count))  # no more padding than whole vectors need
    assert tiling._even_size(13, 512) == 13
    assert tiling._even_size(1025, 512) == 344  # and not 512: three even tiles, in eights
    assert tiling._even_size(0, 512) == 1


@pytest.mark.parametrize("blocks", [(2, 3), (1, 1), (3, 2), (64, 64)])
def test_arrays_come_in_tiles_and_back(blocks):
    inputs = inputs_of()
    plan, arrays, _ = prepared(blocks, inputs)
    assert plan.tile.query <= blocks[0]
    assert plan.tile.key <= blocks[1]
    assert arrays.values.shape == (plan.key_tiles, plan.tile.key, DV)
    queries, keys = features_of(OwnCosine(), inputs.params, inputs.query, inputs.key)
    for tiles, whole in (
        (arrays.queries, queries),
        (arrays.keys, keys),
        (arrays.values, inputs.value),
    ):
        np.testing.assert_allclose(tile_arrays.untiled(tiles, len(whole)), whole, rtol=1e-6)


@pytest.mark.parametrize("shape", [(T, S), (1, S), (T, 1), (1, 1)])
def test_a_tile_of_the_bias_is_a_block_of_it(shape):
    bias = jnp.asarray(RNG.normal(size=shape), jnp.float32)
    plan, arrays, _ = prepared((2, 3), inputs_of(bias=bias))
    assert arrays.biases.tables[0].size <= bias.size * 2
    whole = np.broadcast_to(bias, (T, S))
    for i in range(plan.query_tiles):
        for j in range(plan.key_tiles):
            block = whole[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]
            tile = np.broadcast_to(
                bias_tiles.tile_values(arrays.biases, (), plan.grid, i, j), (2, 3)
            )
            np.testing.assert_array_equal(tile[: len(block), : block.shape[1]], block)


def test_no_tile_meets_what_the_mask_hides():
    mask = aj.padding_mask(jnp.array(4), jnp.array(3))
    inputs = inputs_of(mask=mask)
    inputs = inputs._replace(
        query=inputs.query.at[3:].set(jnp.nan),
        key=inputs.key.at[4:].set(jnp.inf),
        value=inputs.value.at[4:].set(jnp.nan),
    )
    plan, arrays, constants = prepared((2, 3), inputs)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays))
    assert not tile_arrays.untiled(arrays.values, 9)[4:].any()
    # Nor do tokens of padding up to whole tiles, without any mask.
    plan, arrays, constants = prepared((2, 3), inputs_of())
    np.testing.assert_allclose(np.linalg.norm(arrays.keys, axis=-1), np.ones((3, 3)), rtol=1e-6)
    allowed = [
        [tiling.allowed_pairs(plan, constants.mask, i, j) for j in range(3)] for i in range(3)
    ]
    expected = np.zeros((6, 9), bool)
    expected[:T, :S] = True
    np.testing.assert_array_equal(np.block(allowed), expected)


# --- the schedule ---


def test_schedule_of_a_causal_mask_by_hand():
    _, _, constants = prepared((2, 3), inputs_of(6, 9, aj.causal_mask(1)))
    schedule = constants.schedule
    # Queries 0, 1 see keys up to 1, 2; queries 2, 3 up to 3, 4; queries 4, 5 up to 5, 6.
    np.testing.assert_array_equal(schedule.full, [0, 1, 2])
    np.testing.assert_array_equal(schedule.visited, [1, 2, 3])
    np.testing.assert_array_equal(schedule.order, [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    # Of a window, the full tiles come first.
    window = aj.local_mask(0, 4)  # queries 0, 1 see keys 0..4 and 1..5
    _, _, constants = prepared((2, 2), inputs_of(2, 8, window))
    np.testing.assert_array_equal(constants.schedule.order, [[1, 0, 2, 3]])
    np.testing.assert_array_equal(constants.schedule.full, [1])
    np.testing.assert_array_equal(constants.schedule.visited, [3])
    assert prepared((2, 3), inputs_of(6, 9))[2].schedule is None


def test_a_batch_shares_its_schedule():
    inputs = inputs_of(6, 9)

    def schedule(lengths):
        mask = aj.padding_mask(*lengths) & aj.causal_mask(20)
        options = Options(OwnCosine(), BlockSizes(2, 3))
        return tiling.prepare(options, inputs._replace(mask=mask))[2].schedule

    # `out_axes=None` is an error for what has a batch axis.
    lengths = jnp.array([[2, 6, 4], [2, 4, 3]])
    of_batch = quick_jit(jax.vmap(schedule, in_axes=1, out_axes=None))
    shared = of_batch(lengths)
    np.testing.assert_array_equal(shared.visited, [2, 2, 0])  # what any example needs
    np.testing.assert_array_equal(shared.full, [0, 0, 0])  # what is full for every one
    lengths = jnp.array([[3, 6, 4], [2, 4, 3]])
    shared = of_batch(lengths)
    np.testing.assert_array_equal(shared.full, [1, 0, 0])


def test_no_loop_or_branch_of_a_batch_is_decided_example_by_example():
    """Such a loop copies all it carries in every step, such a branch runs both its sides."""
    query, key, value = (jnp.ones((3, 6, 2)) for _ in range(3))

    def run(query, lengths):
        return aj.attention(
            query, key, value, mask=aj.padding_mask(lengths, lengths) & aj.causal_mask(),
            implementation="tiled", block_sizes=BlockSizes(2, 3),
        ).sum()  # fmt: skip

    def pushed(query, lengths):
        return jax.jvp(lambda query: run(query, lengths), (query,), (query,))[1]

    for function, fewest in ((jax.grad(run), 4), (pushed, 4), (jax.grad(pushed), 6)):
        program = jax.jit(function).lower(query, jnp.array([1, 6, 3])).as_text()
        conditions = re.findall(r"\bcond \{(.*?)\} do \{", program, re.DOTALL)
        assert len(conditions) >= fewest
        for condition in conditions:
            operations = set(re.findall(r"stablehlo\.(\w+)", condition))
            assert operations <= {"compare", "constant", "return"}, condition  # no reduction
    # A branch for each example would have become a choice between the results of both sides.
    assert "stablehlo.case" in program


@dataclasses.dataclass(frozen=True)
class Watched(aj.Dot):
    """Its logits are 0, and it writes down the tiles it is asked for."""

    pair_vjp = aj.Score.pair_vjp
    round_query = aj.Dot.round_query
    round_key = aj.Dot.round_key
    finite_slopes = aj.Dot.finite_slopes

    def pair(self, params, q_features, k_features):
        # By the second query: the very first may see no key, and what stands there is not its own.
        first = q_features[1, 0] - 1, k_features[0, 0]
        jax.debug.callback(lambda i, j: PAIRED.add((int(i), int(j))), *first)
        return jnp.zeros((len(q_features), len(k_features))) * first[0]


@mask_dataclass
class WatchedMask(Mask):
    mask: Mask = submask_field()

    def allowed(self, query_positions, key_positions):
        first = query_positions[0], key_positions[0]
        jax.debug.callback(lambda i, j: MASKED.add((int(i), int(j))), *first)
        return self.mask.allowed(query_positions, key_positions)

    def tile_status(self, query_positions, key_positions):
        return self.mask.tile_status(query_positions, key_positions)


PAIRED: set = set()
MASKED: set = set()


def test_empty_tiles_are_not_computed_and_full_ones_not_masked():
    mask = aj.causal_mask(-1) & aj.padding_mask(jnp.array(7))
    positions = [jnp.arange(n, dtype=jnp.float32)[:, None] for n in (8, 9)]
    value = jnp.asarray(RNG.normal(size=(9, DV)), jnp.float32)

    def run(value, query):
        return aj.attention(
            query, positions[1], value, score=Watched(), mask=WatchedMask(mask),
            implementation="tiled", block_sizes=BlockSizes(2, 3),
        ).sum()  # fmt: skip

    tiles = np.asarray(mask.materialize(8, 9)).reshape(4, 2, 3, 3)
    corners = np.meshgrid(range(0, 8, 2), range(0, 9, 3), indexing="ij")
    some, every = tiles.any((1, 3)), tiles.all((1, 3))
    needed = {(int(i), int(j)) for i, j in np.stack(corners, -1)[some]}
    partial = {(int(i), int(j)) for i, j in np.stack(corners, -1)[some & ~every]}
    assert partial < needed
    assert some.sum() < some.size
    run(value, positions[0])  # the score is checked on tokens of its own in the first call
    for function in (run, jax.grad(run, (0, 1))):
        PAIRED.clear()
        MASKED.clear()
        jax.block_until_ready(quick_jit(function)(value, positions[0]))
        jax.effects_barrier()
        assert needed == PAIRED
        assert partial == MASKED
