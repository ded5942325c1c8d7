"""The choice of implementation and tile sizes, by size and score, unless the caller gives them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import attention_jax as aj
from attention_jax import attention as front_door
from attention_jax.implementations import BlockSizes, Inputs, Options, choice
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
    for_tpu = aj.Score.for_tpu
    round_query = aj.Dot.round_query
    round_key = aj.Dot.round_key
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


class Sorted(aj.Score):
    """Mosaic cannot lower `jnp.sort`."""

    def pair(self, params, q_features, k_features):
        return jnp.sort(q_features, axis=-1) @ k_features.T


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


@pytest.mark.parametrize("score", [ADDITIVE, SCALED, Cubed()])
def test_small_is_materialised_and_large_is_tiled(score):
    # A sentence of a translation, one head; a page, eight heads.
    small, large = inputs_of(target=31, source=29), inputs_of(2, 8, target=1024, source=1025)
    assert choice.chosen_implementation(score, small, "cpu") == "reference"
    assert choice.chosen_implementation(score, large, "cpu") == "tiled"
    for backend in ("gpu", "tpu"):
        assert choice.chosen_implementation(score, small, backend) == "reference"
    many = inputs_of(2**20, target=31, source=29)  # short, but its logits would take GiBs
    assert choice.chosen_implementation(score, many, "cpu") == "tiled"
    endless = inputs_of(8, target=2**15, source=2**15)
    assert choice.chosen_implementation(score, endless, "gpu") == "tiled"
    for nothing in (inputs_of(target=0, source=7), inputs_of(0, target=5, source=0)):
        assert choice.chosen_implementation(score, nothing, "cpu") == "reference"
        assert choice.chosen_block_sizes(score, nothing)


TPU_SCORES = [pytest.param(ADDITIVE, marks=pytest.mark.slow), SCALED, aj.General(), SoftCap()]


@pytest.mark.parametrize("score", TPU_SCORES)
def test_a_tpu_gets_its_kernels_from_a_whole_tile_on(score):
    params = jax.eval_shape(lambda: score.init(jax.random.key(0), 64, 64))
    for inputs in (inputs_of(2, 8, target=128, source=200), inputs_of(target=300, source=128)):
        inputs = inputs._replace(params=params)
        options = Options(score, BlockSizes())
        name, options = choice.choose(None, None, options, inputs, "tpu")
        assert name == "mosaic_tpu"
        assert options.block_sizes == BlockSizes(256 if score is ADDITIVE else 512, 512)
        for backend in ("cpu", "gpu"):
            assert choice.chosen_implementation(score, inputs, backend) != "mosaic_tpu"
    for inputs in (inputs_of(64, target=127, source=200), inputs_of(target=1, source=512)):
        assert choice.chosen_implementation(score, inputs, "tpu") == "reference"


def test_a_tpu_gets_a_portable_implementation_where_its_kernels_cannot_serve():
    inputs = inputs_of(2, target=256, source=256)
    assert choice.chosen_implementation(SCALED, inputs, "tpu") == "mosaic_tpu"
    entmax = Options(SCALED, BlockSizes(), normalizer=aj.get_normalizer("entmax"))
    assert choice.chosen_implementation(SCALED, inputs, "tpu", entmax) == "reference"
    causal = inputs._replace(mask=aj.causal_mask())
    assert choice.chosen_implementation(Euclidean(), causal, "tpu") == "reference"  # stand-ins
    assert choice.chosen_implementation(Sorted(), inputs, "tpu") == "reference"  # Mosaic cannot
    large = inputs_of(target=2**15, source=2**15)  # gradients of keys that VMEM cannot hold
    wide = large._replace(value=jax.ShapeDtypeStruct((2**15, 512), jnp.float32))
    assert choice.chosen_implementation(SCALED, large, "tpu") == "mosaic_tpu"
    assert choice.chosen_implementation(SCALED, wide, "tpu") == "tiled"


def test_several_tpus_get_kernels_inside_shard_map_alone(monkeypatch):
    """XLA does not divide a kernel between devices."""
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    inputs, found = inputs_of(2, target=256, source=256), []

    def choose(_):
        found.append(choice.chosen_implementation(SCALED, inputs, "tpu"))

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    for function in (choose, jax.shard_map(choose, mesh=mesh, in_specs=spec, out_specs=None)):
        jax.eval_shape(function, jax.ShapeDtypeStruct((1,), jnp.float32))
    assert found == ["reference", "mosaic_tpu"]


def test_given_tiles_are_kept_on_a_tpu():
    inputs, blocks = inputs_of(target=256, source=256), BlockSizes(128, 128)
    name, options = choice.choose(None, blocks, Options(SCALED, BlockSizes()), inputs, "tpu")
    assert (name, options.block_sizes) == ("mosaic_tpu", blocks)
    name, options = choice.choose("tiled", None, Options(SCALED, BlockSizes()), inputs, "tpu")
    assert (name, options.block_sizes) == ("tiled", BlockSizes(512, 512))


def test_the_threshold_is_met():
    for score, least in ((ADDITIVE, 2**10), (SCALED, 2**18), (Cubed(), 2**16)):
        for batch in ((), (2, 8)):
            at, below = (inputs_of(*batch, target=32, source=least // 32 - n) for n in (0, 1))
            assert choice.chosen_implementation(score, at, "cpu") == "tiled"
            assert choice.chosen_implementation(score, below, "cpu") == "reference"


def test_the_reversal_model_is_materialised():
    # Its attention, one decoding step and all of them: batch 128, 17 tokens.
    for target in (1, 17):
        inputs = inputs_of(128, 4, target=target, source=17, dim=16)
        assert choice.chosen_implementation(SCALED, inputs, "cpu") == "reference"


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
