"""The Pallas TPU kernels, interpreted on the CPU with memory that starts as NaN.

`test_mosaic_tpu_compiled.py` compiles them for TPUs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from kernel_cases import BFLOAT16, assert_within, check, draw, in_float64, results
from score_cases import SCORE_CASES

import attention_jax as aj
from attention_jax.kernels.mosaic_tpu import calls

NAME = "mosaic_tpu"
T, S, DV = 130, 140, 3  # two tiles each way
LENGTHS = aj.padding_mask(jnp.array([137, 9]), jnp.array([T, 61]))
MASKS = {
    "none": None,
    "windows": aj.local_mask(9, 2) & aj.causal_mask(-4) & LENGTHS,
    "segments": aj.segment_mask(jnp.arange(T) // 50, jnp.arange(S)[::-1] // 45) & LENGTHS,
}


@pytest.fixture
def interpreted():
    """Pallas's interpreter of kernels, which `jax.jit` compiles."""
    with pltpu.force_tpu_interpret_mode(True):
        yield


def arrays_of(name, dtype=jnp.float32):
    """(score, arrays, cotangent of the output)"""
    case = SCORE_CASES[name]
    return case.score, *draw(case.score, (T, S), (case.query_dim, 11, DV), dtype)


FAST = {("additive", "none"), ("scaled", "windows"), ("own", "segments")}


@pytest.mark.parametrize(
    ("score_name", "mask_name"),
    [
        pytest.param(score, mask, marks=[pytest.mark.slow] * ((score, mask) not in FAST))
        for score in SCORE_CASES
        for mask in MASKS
    ],
)
def test_every_score_and_mask(interpreted, score_name, mask_name):
    score, arrays, doutput = arrays_of(score_name)
    check(NAME, score, MASKS[mask_name], arrays, doutput)


@pytest.mark.parametrize(
    "score_name",
    ["softcap", *(pytest.param(n, marks=pytest.mark.slow) for n in ("additive", "distance"))],
)
def test_bfloat16(interpreted, score_name):
    score, arrays, doutput = arrays_of(score_name, jnp.bfloat16)
    check(NAME, score, MASKS["windows"], arrays, doutput, BFLOAT16)


@pytest.mark.slow
def test_examples_share_keys_and_each_has_its_own_lengths(interpreted):
    score, (query, key, value, params), doutput = arrays_of("scaled")
    mask = aj.padding_mask(jnp.array([140, 0]))
    shared = query, key[:1], value[0], params
    reference = functools.partial(results, "reference", score, mask)
    expected = in_float64(reference, shared, doutput)
    assert_within(results(NAME, score, mask, shared, doutput), expected, (2e-6, 2e-5))


@pytest.mark.slow
def test_forward_mode_and_second_derivatives(interpreted):
    score, arrays, doutput = arrays_of("scaled")
    tangents = jax.tree.map(jnp.cos, arrays)

    def derivatives(implementation, arrays, tangents, doutput):
        def both(*arrays):
            return results(implementation, score, MASKS["windows"], arrays, doutput)

        return jax.jvp(both, arrays, tangents)[1]

    expected = in_float64(functools.partial(derivatives, "reference"), arrays, tangents, doutput)
    got = jax.jit(functools.partial(derivatives, NAME))(arrays, tangents, doutput)
    assert_within(got, expected, (2e-5, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("axes_are_independent", [True, False])
def test_two_cores_do_not_race(monkeypatch, capfd, axes_are_independent):
    """Tiles of queries may be computed at the same time. Those of keys may not: they race."""
    if not axes_are_independent:
        call = calls._pallas_call
        monkeypatch.setattr(
            calls, "_pallas_call", lambda *args: call(*args[:-1], ("parallel", "parallel"))
        )
    score, (query, key, value, _), _ = arrays_of("dot")
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(params), jax.disable_jit():
        output = aj.attention(
            query[0], key[0], value[0], score=score, implementation=NAME,
            block_sizes=aj.BlockSizes(128, 128),
        )  # fmt: skip
        jax.block_until_ready(output)
    races = "RACE" in "".join(capfd.readouterr()).upper()
    assert races is not axes_are_independent


def test_values_without_features_are_those_of_tiled(interpreted):
    tokens = jnp.ones((T, 3))

    def of(implementation):
        return aj.attention(
            tokens, tokens, jnp.zeros((T, 0)), mask=aj.causal_mask(), return_statistics=True,
            implementation=implementation,
        )  # fmt: skip

    (output, statistics), (_, expected) = of(NAME), of("tiled")
    assert output.shape == (T, 0)
    jax.tree.map(np.testing.assert_array_equal, statistics, expected)
