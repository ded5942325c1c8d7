"""The choice of implementation and tile sizes, by size and score, unless the caller gives them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax import attention as front_door
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.kernels import choice
from attention_jax.scores import Concat, Cosine, NegativeSquaredDistance, SoftCap

ADDITIVE, SCALED = aj.Additive(), aj.ScaledDot()


@dataclasses.dataclass(frozen=True)
class Shifted(aj.Dot):
    """Its pair is Dot's."""

    def project_query(self, params, query):
        return query + 1


@dataclasses.dataclass(frozen=True)
class Cubed(aj.Dot):
    """Its pair is its own, and so is its cost."""

    tile_cost = "materialized"
    pair_vjp = aj.Score.pair_vjp
    round = aj.Dot.round
    finite_slopes = aj.Dot.finite_slopes

    def pair(self, params, q_features, k_features):
        return super().pair(params, q_features, k_features) ** 3


@dataclasses.dataclass(frozen=True)
class Euclidean(aj.Score):
    """A distance, whose slope is infinite where query and key are equal."""

    tile_cost = "elementwise"

    def pair(self, params, q_features, k_features):
        squares = jnp.sum((q_features[:, None] - k_features[None]) ** 2, axis=-1)
        return -jnp.sqrt(squares)


def inputs_of(*batch, target, source, dim=64):
    shapes = ((*batch, length, dim) for length in (target, source, source))
    return Inputs(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), {}, None, None, None)


def test_a_cost_is_how_pair_is_computed():
    elementwise = (ADDITIVE, Concat(), SoftCap(ADDITIVE))
    matmul = (SCALED, aj.General(), aj.Dot(), Shifted(), aj.ScaledDot(0.3), Cosine(),
              NegativeSquaredDistance(), SoftCap(), SoftCap(SoftCap(Shifted())))  # fmt: skip
    materialized = (aj.Score(), Cubed(), SoftCap(Cubed()))
    for scores, cost in (
        (elementwise, "elementwise"),
        (matmul, "matmul"),
        (materialized, "materialized"),
    ):
        assert {aj.get_score(score).tile_cost for score in scores} == {cost}


def test_an_unknown_cost_is_refused():
    class Quick(aj.Score):
        tile_cost = "quick"

    expected = "tile_cost of Quick must be one of matmul, elementwise, materialized; got 'quick'"
    with pytest.raises(ValueError, match=expected):
        aj.get_score(Quick())


def test_small_is_materialised_and_large_is_tiled():
    """Kernels that no device has run are not chosen."""
    for score, least in ((ADDITIVE, 2**10), (SCALED, 2**18), (Cubed(), 2**16)):
        for batch in ((), (2, 8)):
            at, below = (inputs_of(*batch, target=32, source=least // 32 - n) for n in (0, 1))
            assert choice.chosen_implementation(score, at, "cpu") == "tiled"
            assert choice.chosen_implementation(score, below, "cpu") == "reference"
        many = inputs_of(2**20, target=31, source=29)  # short, but its logits would take GiBs
        endless = inputs_of(8, target=2**15, source=2**15)
        for backend in ("cpu", "gpu", "tpu"):
            assert choice.chosen_implementation(score, below, backend) == "reference"
            assert choice.chosen_implementation(score, many, backend) == "tiled"
            assert choice.chosen_implementation(score, endless, backend) == "tiled"
        for nothing in (inputs_of(target=0, source=7), inputs_of(0, target=5, source=0)):
            assert choice.chosen_implementation(score, nothing, "cpu") == "reference"
            assert choice.chosen_block_sizes(score, nothing)


def test_tiles_of_a_kernel_for_tpus():
    inputs, options = inputs_of(target=256, source=256), Options(SCALED, BlockSizes())
    for name, blocks, expected in (
        ("mosaic_tpu", None, BlockSizes(512, 512)),
        ("mosaic_tpu", BlockSizes(128, 128), BlockSizes(128, 128)),
        ("tiled", None, BlockSizes(512, 512)),
    ):
        got, with_tiles = choice.choose(name, blocks, options, inputs, "tpu")
        assert (got, with_tiles.block_sizes) == (name, expected)
    of_additive = choice.choose("mosaic_tpu", None, Options(ADDITIVE, BlockSizes()), inputs, "tpu")
    assert of_additive[1].block_sizes == BlockSizes(256, 512)


@pytest.mark.parametrize("score", [ADDITIVE, SCALED, Cubed()])
def test_tiles_shrink_as_the_batch_grows(score):
    sizes = []
    for batch in (1, 4, 16, 64, 1024, 2**20):
        blocks = choice.chosen_block_sizes(score, inputs_of(batch, target=4096, source=4096))
        sizes.append(blocks.key)
        assert blocks.key == 64 or batch * blocks.key**2 <= 2**20
        assert blocks.query == blocks.key
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == 64
    # A pair that may hold a tile of vectors has tiles to match.
    wide = choice.chosen_block_sizes(Cubed(), inputs_of(target=4096, source=4096, dim=1024))
    narrow = choice.chosen_block_sizes(Cubed(), inputs_of(target=4096, source=4096, dim=16))
    assert wide.query < narrow.query


def test_tiles_shrink_to_a_sliding_window():
    def size(mask):
        inputs = inputs_of(target=4096, source=4096)._replace(mask=mask)
        return choice.chosen_block_sizes(SCALED, inputs).key

    padding = aj.padding_mask(jnp.array(3000))
    whole = size(None)
    assert size(aj.local_mask(64, 64)) < size(aj.local_mask(1024, 0)) < whole
    assert size(padding & (aj.causal_mask() & aj.local_mask(64, 64))) == size(aj.local_mask(64, 64))
    # What leaves a side open, or is more than a window, is no window.
    for mask in (aj.local_mask(64, None), aj.local_mask(1, 1) | padding, ~aj.local_mask(1, 1)):
        assert size(mask) == whole


@pytest.mark.parametrize("named", [None, "reference", "tiled"])
def test_a_given_name_and_given_tiles_are_never_replaced(named, monkeypatch):
    """The front door's choice, without computing anything."""
    module = __import__("sys").modules[front_door.__module__]
    called = []

    def record(implementation, options, inputs):
        called.append((implementation, options.block_sizes))
        return inputs.query, None

    monkeypatch.setattr(module, "_attend", record)
    small, large = jnp.ones((1, 3, 2)), jnp.ones((3, 1024, 2))
    for arrays, chosen in ((small, "reference"), (large, "tiled")):
        for blocks in (None, BlockSizes(3, 5)):
            aj.attention(arrays, arrays, arrays, implementation=named, block_sizes=blocks)
            implementation, used = called.pop()
            assert implementation == (named or chosen)
            assert used == (blocks or BlockSizes(512, 512))
    assert not called


def test_tiles_are_small_where_stand_ins_are_chosen_per_pair():
    inputs = inputs_of(target=4096, source=4096, dim=128)
    masked = inputs._replace(mask=aj.causal_mask())
    for score, shrinks in ((Euclidean(), True), (ADDITIVE, False)):
        sizes = [choice.chosen_block_sizes(score, i).query for i in (inputs, masked)]
        assert (sizes[1] < sizes[0]) == shrinks
