"""The Pallas TPU kernels, interpreted on the CPU with memory that starts as NaN.

`test_mosaic_tpu_compiled.py` compiles them for TPUs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_MASKS,
    ALL_SCORES,
    MASK_OF_SCORE,
    assert_close,
    check_conformance,
    named,
    no_jit,
    quick_jit,
)
from derivative_cases import DROPOUT, DV, S, T, agree, loss_of, normal, point_of
from jax.experimental.pallas import tpu as pltpu

import attention_jax as aj
from attention_jax.implementations import Inputs, Options, mosaic_tpu, mosaic_tpu_calls
from attention_jax.pairwise.biases import RelativeBias

NAME = "mosaic_tpu"
FAST_SCORES = ("additive", "own", "scaled")


@pytest.fixture
def interpreted():
    """Pallas's interpreter of kernels, which `jax.jit` compiles."""
    with pltpu.force_tpu_interpret_mode(True):
        yield


# --- the conformance suite ---


@pytest.mark.parametrize(
    "score",
    [
        pytest.param(score, marks=[pytest.mark.slow] * (score not in FAST_SCORES))
        for score in ALL_SCORES
    ],
)
def test_every_score_and_mask(interpreted, score):
    for mask in ALL_MASKS:  # as tables, which share one compiled program
        check_conformance(NAME, score, mask, poison=True, as_table=True)


@pytest.mark.slow
@pytest.mark.parametrize("score", ALL_SCORES)
def test_every_score_with_a_mask_as_a_function(interpreted, score):
    check_conformance(NAME, score, MASK_OF_SCORE[score], poison=True)


@pytest.mark.parametrize(
    "mask",
    [pytest.param(mask, marks=[pytest.mark.slow] * (mask != "combination")) for mask in ALL_MASKS],
)
def test_every_mask_as_a_function(interpreted, mask):
    check_conformance(NAME, "scaled", mask, poison=True)


@pytest.mark.parametrize(
    ("score", "dtype"),
    [
        ("scaled", jnp.bfloat16),
        pytest.param("additive", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("distance", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("softcap", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("general", jnp.float16, marks=pytest.mark.slow),
    ],
)
def test_narrow_dtypes(interpreted, score, dtype):
    check_conformance(NAME, score, "segment", dtype, poison=True)


@pytest.mark.slow
@pytest.mark.parametrize(("score", "mask"), [("own", "dense"), ("scaled", "combination")])
def test_a_simulated_memory_holds_nothing_of_before(score, mask):
    """The simulator of a TPU's memory runs without `jax.jit`, one operation at a time."""
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    with pltpu.force_tpu_interpret_mode(params), jax.disable_jit():
        check_conformance(NAME, score, mask, jit=no_jit)


@pytest.mark.parametrize("axes_are_independent", [True, False])
def test_two_cores_do_not_race(monkeypatch, capfd, axes_are_independent):
    """Tiles of queries may be computed at the same time. Those of keys may not: they race."""
    if not axes_are_independent:
        call = mosaic_tpu_calls._pallas_call
        monkeypatch.setattr(
            mosaic_tpu_calls,
            "_pallas_call",
            lambda *args, **options: call(
                *args, **options | {"semantics": ("parallel", "parallel")}
            ),
        )
    rows = [normal(n, 3).astype("f4") for n in (6, 9, 9)]
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(params), jax.disable_jit():
        output = aj.attention(*rows, implementation=NAME, block_sizes=aj.BlockSizes(2, 3))
        jax.block_until_ready(output)
    races = "RACE" in "".join(capfd.readouterr()).upper()
    assert races is not axes_are_independent


# --- against the reference in float64 ---


def check_against_reference(score, point, mask, **options):
    """The value and all gradients, of the kernels in float32 and the reference in float64."""

    def of(implementation):
        return quick_jit(jax.value_and_grad(loss_of(score, implementation, **options)))

    with jax.enable_x64(True):
        expected = named(of("reference")(point, mask))
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), point)
    got = named(of(NAME)(narrow, mask))
    assert got.keys() == expected.keys()
    for name, array in got.items():
        assert_close(name, array, expected[name], 2e-5)
        assert np.any(array), name


@aj.bias_dataclass
class DistanceAndKey(aj.Bias):
    """A user's bias, of one number and of a number for each key."""

    rate: jax.Array = aj.array_field()
    of_key: jax.Array = aj.array_field("S")

    def values(self, query_positions, key_positions):
        distances = jnp.abs(query_positions[:, None] - key_positions[None, :])
        of_key = self.of_key[jnp.clip(key_positions, 0, self.of_key.shape[-1] - 1)]
        return of_key[None, :] - self.rate * jnp.sqrt(distances.astype(self.rate.dtype) + 1)


def test_dropout_and_biases_of_every_shape(interpreted):
    """Tables of pairs, of keys, of queries and of one number, and a function of positions."""
    point = point_of("scaled")
    function = DistanceAndKey(np.array(0.3), normal(S))
    point["bias"] = function + normal(T, S) + normal(1, S) + normal(T, 1) + normal(1, 1)
    check_against_reference("scaled", point, aj.causal_mask(1), **DROPOUT)


def test_alibi(interpreted):
    point = point_of("scaled")
    point["bias"] = aj.alibi_bias(np.array(0.3))
    check_against_reference("scaled", point, aj.causal_mask(1))


def test_a_sink_for_each_head_and_keys_that_heads_share(interpreted):
    heads = 3
    point = point_of("own") | {"query": normal(heads, T, 3), "value": normal(heads, S, DV)}
    point["normalizer_params"] = {"sink": np.array([-1.0, 9.0, 200.0])}
    mask = aj.padding_mask(jnp.array([6, 4, 0]))
    check_against_reference("own", point, mask, normalizer="softmax(sink=True)")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "key_block"), [(300, 128), (700, 512)])  # 3 x 128, 2 x 384
def test_lengths_that_are_no_multiple_of_a_block(interpreted, source, key_block):
    point = point_of("general", target=131, source=source)
    blocks = aj.BlockSizes(query=128, key=key_block)
    check_against_reference("general", point, aj.local_mask(40, 3), block_sizes=blocks)


@pytest.mark.slow
def test_second_derivatives_are_those_of_the_reference(interpreted):
    point = point_of("scaled")
    mask = aj.causal_mask(-1) & aj.padding_mask(jnp.array(6))
    direction = jax.tree.map(lambda leaf: normal(*leaf.shape), point)

    def products(implementation):
        gradient = jax.grad(loss_of("scaled", implementation))
        return quick_jit(
            lambda point, direction, mask: jax.jvp(
                lambda point: gradient(point, mask), (point,), (direction,)
            )
        )

    with jax.enable_x64(True):
        expected = products("reference")(point, direction, mask)
    narrow = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), (point, direction))
    agree(products(NAME)(*narrow, mask), expected, tolerance=5e-5)


def test_rows_without_keys_ignore_nan_cotangents(interpreted):
    point = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), point_of("dot"))
    mask = aj.causal_mask(-2)  # queries 0 and 1 have no keys

    def output(point):
        return aj.attention(**point, mask=mask, score="dot", implementation=NAME)

    def result_and_gradients(point):
        result, pull_back = jax.vjp(output, point)
        return result, pull_back(jnp.ones_like(result).at[:2].set(jnp.nan))[0]

    result, gradients = quick_jit(result_and_gradients)(point)
    assert not np.any(result[:2])
    for name, gradient in named(gradients).items():
        assert np.all(np.isfinite(gradient)), name
    assert not np.any(gradients["query"][:2])


# --- what the kernels cannot serve ---


def attend(score="scaled", dtype=jnp.float32, **options):
    tokens = jnp.ones((128, 8), dtype)
    return aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)


def by_sorting(q, k):
    return jnp.sort(q)[:, :1] + jnp.sort(k)[:, :1].T


MATRIX = jnp.ones((8, 8))


def by_a_matrix(q, k):
    return q @ MATRIX @ k.T


@aj.bias_dataclass
class OwnDistances(RelativeBias):
    """A bias of which JAX cannot lower the gradient for a TPU."""

    slope: jax.Array = aj.array_field()

    def of_distance(self, distances):
        return self.slope * distances.astype(self.slope.dtype)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("runs on a TPU, not on cpu", {}),
        ("cannot run by_sorting in its kernels: .*: sort", {"score": by_sorting}),
        ("by_sorting may have an infinite slope", {"score": by_sorting, "mask": aj.causal_mask()}),
        ("softmax, not Entmax", {"normalizer": "entmax"}),
    ],
)
def test_a_call_that_it_cannot_serve_says_why(words, options):
    line = f"^implementation 'mosaic_tpu'.*{words}.*: use 'tiled'"
    with pytest.raises(NotImplementedError, match=line):
        attend(**options)


def test_an_array_that_the_pair_closes_over_is_refused():
    line = (
        r"^implementation 'mosaic_tpu': the pair of by_a_matrix reads arrays \[8, 8\] that .*params"
    )
    with pytest.raises(NotImplementedError, match=line) as error:
        attend(by_a_matrix)
    assert "/" not in str(error.value).partition("\n")[0]


def test_padding_counts_as_a_mask_of_infinite_slopes():
    tokens = jnp.ones((130, 8))
    line = r"\(a length that is no multiple of the tile counts as one\)"
    with pytest.raises(NotImplementedError, match=line):
        aj.attention(tokens, tokens, tokens, score=by_sorting, implementation=NAME)


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="newer versions of JAX lower this bias")
def test_a_refusal_has_the_whole_reason_and_names_what_is_given():
    bias = OwnDistances(jnp.array(0.5))
    with pytest.raises(NotImplementedError) as error:
        lower_for_a_tpu(bias=bias)
    line = str(error.value).partition("\n")[0]
    assert "with this bias in its kernels: Invalid type: error" in line
    assert "vector types must have positive constant sizes" in line
    with pytest.raises(NotImplementedError, match="with this mask and bias in"):
        lower_for_a_tpu(bias=bias, mask=aj.causal_mask())


def test_values_without_features_are_those_of_tiled(interpreted):
    tokens = normal(T, 3).astype("f4")

    def results(implementation):
        return aj.attention(
            tokens,
            tokens,
            jnp.zeros((T, 0)),
            mask=aj.causal_mask(),
            return_statistics=True,
            implementation=implementation,
        )

    (output, statistics), (_, expected) = results(NAME), results("tiled")
    assert output.shape == (T, 0)
    for name, got in statistics._asdict().items():
        np.testing.assert_array_equal(got, getattr(expected, name), err_msg=name)


def test_it_says_how_to_interpret_gradients_too():
    """Other arguments of `force_tpu_interpret_mode` fail where a gradient is taken."""
    with pytest.raises(NotImplementedError, match=r"force_tpu_interpret_mode\(True\) to interpret"):
        attend()


def lower_for_a_tpu(gradient=True, score="scaled", **options):
    """Lowers attention, or its gradient, for a TPU; nothing is compiled."""
    tokens = jnp.ones((2, 128, 8), jnp.float32)

    def loss(tokens):
        output = aj.attention(tokens, tokens, tokens, score=score, implementation=NAME, **options)
        return output.sum()

    function = jax.grad(loss) if gradient else loss
    jax.jit(function).trace(tokens).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("mask", [None, aj.causal_mask()])
def test_float32_lowers_where_jax_enables_float64(mask, gradient):
    # The tests' strict promotion is for programs of one width.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        lower_for_a_tpu(gradient, mask=mask)


@pytest.mark.parametrize("slopes", [aj.alibi_slopes(2), jnp.array(0.5)])
def test_gradients_with_alibi_lower(slopes):
    lower_for_a_tpu(bias=aj.alibi_bias(slopes))


@pytest.mark.parametrize("bias", [aj.t5_bias(jnp.ones(32)), aj.relative_bias(jnp.ones(5))])
@pytest.mark.parametrize("gradient", [False, True])
def test_tables_of_distances_are_refused(bias, gradient):
    with pytest.raises(NotImplementedError, match=r"Unsupported gather.*: use 'tiled'"):
        lower_for_a_tpu(gradient, bias=bias)


def test_more_keys_than_fit_are_refused():
    tokens = jax.ShapeDtypeStruct((2**17, 128), jnp.float32)

    def loss(query, key):
        return aj.attention(query, key, key, implementation=NAME).sum()

    gradient = jax.jit(jax.grad(loss, argnums=1)).trace(tokens, tokens)
    with pytest.raises(NotImplementedError, match="gradients of 131072 keys take 256 MiB"):
        gradient.lower(lowering_platforms=("tpu",))


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="no float64"):
        attend(dtype=jnp.float64)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_narrow_products_lower_under_every_precision(precision):
    tokens = jnp.ones((2, 128, 8), jnp.bfloat16)

    def loss(tokens):
        return aj.attention(tokens, tokens, tokens, implementation=NAME).sum()

    with jax.default_matmul_precision(precision):
        text = jax.jit(jax.grad(loss)).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_backward" in text


@pytest.mark.parametrize(("mebibytes", "fits"), [(128, True), (64, False)])
def test_the_gradients_of_all_keys_fit_into_the_chips_memory(monkeypatch, mebibytes, fits):
    """A kernel for 32,768 keys needs 64 MiB for its gradients."""
    monkeypatch.setattr(mosaic_tpu_calls, "vector_memory", lambda: mebibytes * 2**20)
    shapes = [jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (128, 2**15 - 1 - fits)]
    query, key = shapes
    inputs = Inputs(query, key, key, {}, None, None, None, {})
    options = Options(aj.get_score("scaled"), aj.BlockSizes(512, 512))
    reason = mosaic_tpu.reason_against(options, inputs)
    assert (reason is None) is fits
    assert fits or "64 MiB of the chip's memory, more than 36" in reason


def test_what_one_precision_cannot_lower_is_not_remembered_for_others():
    with jax.default_matmul_precision("high"), pytest.raises(NotImplementedError, match="HIGH"):
        lower_for_a_tpu()
    lower_for_a_tpu()


def test_it_lowers_inside_shard_map_with_its_checks():
    """`jax.shard_map` asks over which axes of the mesh a result varies."""
    tokens = jnp.ones((1, 128, 8))
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = jax.sharding.PartitionSpec("data")
    attend = jax.shard_map(
        lambda tokens: aj.attention(tokens, tokens, tokens, implementation=NAME),
        mesh=mesh, in_specs=axis, out_specs=axis,
    )  # fmt: skip
    gradient = jax.grad(lambda tokens: attend(tokens).sum())
    text = jax.jit(gradient).trace(tokens).lower(lowering_platforms=("tpu",)).as_text()
    assert "attention_backward" in text


@pytest.mark.parametrize("tokens_like", [None, 128])
def test_symbolic_lengths_are_refused(tokens_like):
    (length,) = jax.export.symbolic_shape("n")
    query = jax.ShapeDtypeStruct((length, 8), jnp.float32)
    key = query if tokens_like is None else jax.ShapeDtypeStruct((tokens_like, 8), jnp.float32)
    attend = jax.jit(lambda query, key: aj.attention(query, key, key, implementation=NAME))
    with pytest.raises(NotImplementedError, match="'mosaic_tpu': needs known lengths; got T = n"):
        attend.trace(query, key)
