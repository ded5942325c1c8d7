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
from attention_jax.kernels.mosaic_tpu import calls as mosaic_tpu_calls

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
