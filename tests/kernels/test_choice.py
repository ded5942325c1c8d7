"""The choice of implementation and tile sizes, by size and score, unless the caller gives them."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import pytest
from kernel_cases import runnable
from own_parts import Hotter, Module, Near, Slope

import attention_jax as aj
from attention_jax import attention as front_door
from attention_jax.functional.checks import checked_call
from attention_jax.kernels import IMPLEMENTATIONS, choice
from attention_jax.scores import Concat, Cosine, NegativeSquaredDistance, SoftCap
from attention_jax.scores.literature import Neural
from attention_jax.tiles import BlockSizes, Inputs, Options

ADDITIVE, SCALED = aj.Additive(), aj.ScaledDot()
FRONT_DOOR = __import__("sys").modules[front_door.__module__]


@dataclasses.dataclass(frozen=True)
class Cubed(aj.Dot):
    """Its pair is its own, and so is its cost."""

    tile_cost = "materialized"
    round = aj.Dot.round
    finite_slopes = aj.Dot.finite_slopes

    def pair(self, params, q_features, k_features):
        return super().pair(params, q_features, k_features) ** 3


def inputs_of(*batch, target, source, dim=64, score=SCALED):
    shapes = ((*batch, length, dim) for length in (target, source, source))
    params = jax.eval_shape(lambda: score.init(jax.random.key(0), dim, dim))
    return Inputs(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), params, None, None, None)


def chosen(score, inputs, backend):
    """The implementation of a softmax without any options."""
    return choice.choose(None, Options(score), inputs, backend)[0]


def test_a_cost_is_how_pair_is_computed():
    for cost, scores in {
        "elementwise": (ADDITIVE, Concat(), SoftCap(ADDITIVE)),
        "matmul": (SCALED, aj.General(), Cosine(), NegativeSquaredDistance(), SoftCap(SoftCap())),
        "materialized": (aj.Score(), Cubed(), SoftCap(Cubed())),
    }.items():
        assert {aj.get_score(score).tile_cost for score in scores} == {cost}


def test_an_unknown_cost_is_refused():
    class Quick(aj.Score):
        tile_cost = "quick"

    expected = "tile_cost of Quick must be one of matmul, elementwise, materialized; got 'quick'"
    with pytest.raises(ValueError, match=expected):
        aj.get_score(Quick())


@pytest.mark.parametrize(("score", "least"), [(ADDITIVE, 2**10), (SCALED, 2**18), (Cubed(), 2**16)])
def test_small_is_materialised_and_large_is_tiled(score, least):
    """Kernels whose speed on a device is unknown are not chosen."""
    target = int(least**0.5)
    for batch in ((), (2, 2)):
        at, below = (inputs_of(*batch, target=target, source=target - n) for n in (0, 1))
        assert chosen(score, at, "cpu") == "tiled"
        assert chosen(score, below, "cpu") == "reference"
    many = inputs_of(2**20, target=31, source=29)  # short, but its logits would take GiBs
    endless = inputs_of(8, target=2**15, source=2**15)
    for backend in ("cpu", "gpu", "tpu", "another"):
        assert chosen(score, below, backend) == "reference"
        assert chosen(score, many, backend) == "tiled"
        assert chosen(score, endless, backend) == "tiled"
    for nothing in (inputs_of(target=0, source=7), inputs_of(0, target=5, source=0)):
        assert chosen(score, nothing, "cpu") == "reference"
        assert choice.chosen_block_sizes(score, nothing, "cpu")


def test_features_of_all_pairs_take_memory_too():
    strings = inputs_of(10_000, target=101, source=102)
    assert chosen(Cubed(), strings, "cpu") == "tiled"
    assert chosen(SCALED, strings, "cpu") == "reference"
    # Its features of a pair are as many as its hidden units, whatever Dk is.
    for backend, length in (("cpu", 200), ("gpu", 512)):
        for hidden, name in ((16, "reference"), (1024, "tiled")):
            score = Neural(hidden_dim=hidden)
            inputs = inputs_of(target=length, source=length, score=score)
            assert chosen(score, inputs, backend) == name
        assert choice.chosen_block_sizes(score, inputs, "cpu").key ** 2 * hidden <= 2**20
    # Under a mask, tokens of hidden pairs are replaced pair by pair where a slope may be infinite.
    singular = type("Singular", (aj.Dot,), {"finite_slopes": False})()
    for mask, numbers in ((None, 1), (aj.causal_mask(), 64)):
        inputs = inputs_of(target=4096, source=4096)._replace(mask=mask)
        blocks = choice.chosen_block_sizes(singular, inputs, "cpu")
        assert 2**18 <= blocks.key**2 * numbers <= 2**20


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_few_queries_of_many_keys_are_not_tiled(backend):
    """As in decoding: the logits take less memory than the keys."""
    for batch in ((), (8, 16)):
        for target, source in ((1, 300_000), (8, 2**19), (64, 2**12)):
            assert chosen(SCALED, inputs_of(*batch, target=target, source=source), backend) == (
                "reference"
            )
    assert chosen(Cubed(), inputs_of(target=1, source=300_000), backend) == "reference"
    # As many keys as queries, features of pairs larger than the keys, keys that many share.
    many, keys = inputs_of(1024, target=1, source=2**19), inputs_of(target=1, source=2**19)
    for score, inputs in (
        (SCALED, inputs_of(target=2**14, source=2**14)),
        (Cubed(), inputs_of(target=4, source=2**21)),
        (SCALED, many._replace(key=keys.key, value=keys.value)),
    ):
        assert chosen(score, inputs, backend) == "tiled"


@pytest.mark.parametrize("score", [ADDITIVE, SCALED, Cubed()])
@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu", "another"])
def test_tiles_shrink_as_the_batch_grows(score, backend):
    table, sizes = choice.TABLES.get(backend, choice.Table()), []
    features = 64 if score == Cubed() else 1
    for batch in (1, 4, 16, 64, 1024, 2**20):
        inputs = inputs_of(batch, target=4096, source=4096)
        blocks = choice.chosen_block_sizes(score, inputs, backend)
        sizes.append(blocks.key)
        least = blocks.key == choice.SMALLEST_BLOCK[score.tile_cost]
        assert least or features * batch * blocks.key**2 <= table.tile_pairs
        tall = backend == "cpu" and score is SCALED
        assert blocks.query == blocks.key * (4 if tall else 1)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1] == choice.SMALLEST_BLOCK[score.tile_cost]
    # A pair that may hold a tile of vectors has tiles to match.
    wide, narrow = (
        choice.chosen_block_sizes(Cubed(), inputs_of(target=4096, source=4096, dim=dim), backend)
        for dim in (1024, 16)
    )
    assert wide.query < narrow.query


def test_tiles_shrink_to_a_sliding_window():
    def size(mask):
        inputs = inputs_of(target=4096, source=4096)._replace(mask=mask)
        blocks = choice.chosen_block_sizes(SCALED, inputs, "cpu")
        assert mask is None or blocks.query == blocks.key
        return blocks.key

    window, padding, whole = aj.local_mask(64, 64), aj.padding_mask(jnp.array(3000)), size(None)
    assert size(padding & (aj.causal_mask() & window)) == size(window) < whole
    # What leaves a side open, or is more than a window, is no window.
    for mask in (aj.local_mask(64, None), window | padding, ~window):
        assert size(mask) == whole


@pytest.mark.parametrize("named", [None, "reference", "tiled"])
def test_a_given_name_and_given_tiles_are_never_replaced(named, monkeypatch):
    """The front door's choice, without computing anything."""
    called = []

    def record(implementation, options, inputs):
        called.append((implementation, options.block_sizes))
        return inputs.query, None

    monkeypatch.setattr(FRONT_DOOR, "_attention", record)
    small, large = jnp.ones((1, 3, 2)), jnp.ones((3, 1024, 2))
    for arrays, chosen in ((small, "reference"), (large, "tiled")):
        for blocks in (None, BlockSizes(3, 5)):
            aj.attention(arrays, arrays, arrays, implementation=named, block_sizes=blocks)
            implementation, used = called.pop()
            assert implementation == (named or chosen)
            assert used == (blocks or BlockSizes(2048, 512))
    assert not called


# --- what users write, on every kind of device ---


class Renamed(aj.Dot):
    """A subclass that changes nothing."""


class Bounded(aj.ScaledDot):
    def project_query(self, params, query):
        return super().project_query(params, jnp.tanh(query))


class Own(aj.Score):
    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T


USERS_SCORES = {
    "named": "scaled", "of Dot": Renamed(), "of ScaledDot": Bounded(),
    "pair of its own": Cubed(), "of Score": Own(), "function": lambda q, k: q @ k.T,
    "module": Module(),
}  # fmt: skip
PRODUCTS = ("named", "of Dot", "of ScaledDot")
PARTS = {
    "none": {}, "mask": {"mask": Near()}, "bias": {"bias": Slope()},
    "normalizer": {"normalizer": Hotter()},
}  # fmt: skip
OPTIONS = {
    "plain": {}, "statistics": {"return_statistics": True},
    "dropout": {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "grouped": {},
}  # fmt: skip
CALLS = [call for call in itertools.product(PARTS, OPTIONS) if call != ("normalizer", "statistics")]


def arguments_of(score, part, option, dtype=jnp.bfloat16):
    """((query, key, value), options) of a call; with "grouped", two heads share keys and values."""
    query, key = (jnp.ones((2, heads, 4, 8), dtype) for heads in (2, 2 - (option == "grouped")))
    return (query, key, key), {"score": USERS_SCORES[score], **PARTS[part], **OPTIONS[option]}


def served_by_cudnn(score, part, option):
    return score in PRODUCTS and part == "none" and option in ("plain", "grouped")


@pytest.mark.parametrize("score", USERS_SCORES)
def test_none_serves_whatever_users_write(score):
    for call, dtype in itertools.product(CALLS, (jnp.float32, jnp.bfloat16)):
        tokens, options = arguments_of(score, *call, dtype)
        checked, checked_inputs = checked_call(*tokens, **options)
        long = [jax.ShapeDtypeStruct((*x.shape[:2], 2**14, 8), dtype) for x in tokens]
        for backend, portable in itertools.product(("cpu", "gpu", "tpu"), ("reference", "tiled")):
            inputs = checked_inputs
            if portable == "tiled":
                inputs = inputs._replace(query=long[0], key=long[1], value=long[2])
            with runnable("cudnn"):
                name, _ = choice.choose(None, checked, inputs, backend)
            by_cudnn = backend == "gpu" and dtype == jnp.bfloat16 and served_by_cudnn(score, *call)
            assert name == ("cudnn" if by_cudnn else portable), (call, dtype, backend)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_name_serves_what_users_write_or_says_why_not(name):
    scores = [(score, "none", "plain") for score in USERS_SCORES]
    for call in [*scores, *(("of Dot", *call) for call in CALLS if "plain" in call)]:
        tokens, options = arguments_of(*call)

        def attend(*tokens, options=options):
            return aj.attention(*tokens, implementation=name, **options)

        refusal = ""
        try:
            with runnable("cudnn"):
                jax.eval_shape(attend, *tokens)
        except NotImplementedError as error:
            refusal = str(error)
        assert not refusal or refusal.startswith(f"implementation '{name}' "), call
        if not name.startswith("mosaic"):
            assert bool(refusal) == (name == "cudnn" and not served_by_cudnn(*call)), call


@pytest.mark.parametrize(("backend", "platform"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_what_users_write_is_lowered_for_devices_that_are_not_here(backend, platform, monkeypatch):
    monkeypatch.setattr(FRONT_DOOR, "current_backend", lambda: backend)
    for score, part in ((score, part) for score in USERS_SCORES for part in PARTS):
        if score != "of Dot" and part != "none":
            continue
        tokens, options = arguments_of(score, part, "plain")

        def attend(*tokens, options=options):
            return aj.attention(*tokens, **options)

        jax.export.export(jax.jit(attend), platforms=[platform])(*tokens)
