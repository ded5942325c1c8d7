"""The front door: the conformance suite and the numerics contract."""

import dataclasses
import itertools

import chex
import conformance as suite
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from score_cases import slow_unless

from attention_jax import attention, attention_weights, causal_mask, padding_mask

# The fast tests: each rule for tiles of a mask, and each form of a tile's gradient, once.
FAST = [("tiled", score) for score in ("additive", "general", "scaled", "own")]
FAST += [("reference", "own")]
CASES = itertools.product(suite.ALL_IMPLEMENTATIONS, suite.SCORE_CASES)


@pytest.mark.parametrize(("implementation", "score"), slow_unless(FAST, CASES))
def test_every_score_with_its_mask(implementation, score):
    suite.check_conformance(
        implementation, score, suite.MASK_OF_SCORE[score], jnp.float64, poison=True, bits=True
    )


@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
def test_tables_of_all_masks_and_minus_infinity_in_the_bias(implementation):
    """Which is a mask. All share one compiled program."""
    for mask in suite.ALL_MASKS:
        suite.check_conformance(
            implementation, "dot", mask, jnp.float64, poison=True, as_table=True
        )
    inputs = suite.inputs_of("dot")
    bias = np.where(suite.TABLE, inputs["bias"], -np.inf)  # row 2 of example 0 is -inf throughout
    expected, expected_gradients = suite.numpy_side("dot", "dense")
    with jax.enable_x64(True):
        everything = jnp.asarray(suite.allowed_table("none"))
        got, gradients = suite.library_side(
            implementation, "dot", everything, {**inputs, "bias": bias}, jnp.float64
        )
    suite.assert_close("", got, expected, 1e-13)
    suite.assert_close("gradient of ", gradients, expected_gradients, 1e-12)
    assert not np.any(gradients["bias"][~suite.TABLE])
    assert not np.any(gradients["query"][0, 2])


NARROW_SCORES, DTYPES = ("additive", "scaled", "general"), (jnp.bfloat16, jnp.float16)
NARROW = [("tiled", "additive", jnp.bfloat16), ("reference", "general", jnp.float16)]


@pytest.mark.parametrize(
    ("implementation", "score", "dtype"),
    slow_unless(NARROW, itertools.product(suite.ALL_IMPLEMENTATIONS, NARROW_SCORES, DTYPES)),
)
def test_16_bits_accumulate_in_float32(implementation, score, dtype):
    mask = "segment" if score == "general" else "combination"
    suite.check_conformance(implementation, score, mask, dtype, poison=True)


OF_DIFFERENCES = [("tiled", "elliptical"), ("reference", "l2")]


@pytest.mark.parametrize(
    ("implementation", "score"),
    slow_unless(
        OF_DIFFERENCES,
        itertools.product(suite.ALL_IMPLEMENTATIONS, ("l2", "distance", "elliptical")),
    ),
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_offset_of_all_tokens_costs_no_digits(implementation, score, dtype):
    for offset in (0.0, 10.0, -100.0, 1000.0):
        options = {"poison": True, "bits": True, "offset": offset}
        suite.check_conformance(implementation, score, "combination", dtype, **options)


@pytest.mark.parametrize("implementation", suite.ALL_IMPLEMENTATIONS)
def test_optimised_programs_in_float32(implementation):
    """The bounds and the bits of programs that are compiled as on users' machines."""
    suite.check_conformance(
        implementation,
        "scaled",
        "dense_shared",
        jit=suite.fully_optimized_jit,
        poison=True,
        bits=True,
    )


@pytest.mark.parametrize(
    ("implementation", "wide"), [("tiled", "query"), ("reference", "value"), ("tiled", "params")]
)
def test_mixed_dtypes(implementation, wide):
    inputs = suite.inputs_of("general")
    with jax.enable_x64(True):
        dtypes = dict.fromkeys(inputs, jnp.bfloat16)
        dtypes[wide] = jnp.float64
        arrays = {
            name: jax.tree.map(lambda x, name=name: jnp.asarray(x, dtypes[name]), inputs[name])
            for name in inputs
        }
        output, statistics = attention(
            **arrays, score="general", implementation=implementation, return_statistics=True
        )
    assert output.dtype == dtypes["query"]
    expected, _ = suite.numpy_side("general", "none")
    assert {statistic.dtype for statistic in statistics} == {jnp.dtype(jnp.float64)}
    expected = {name: expected[name] for name in statistics._fields}
    suite.assert_close("", statistics._asdict(), expected, 1e-13)


def test_weights_do_not_depend_on_x64():
    inputs = suite.inputs_of("scaled")
    query, key = (jnp.asarray(inputs[name], jnp.float32) for name in ("query", "key"))
    expected = attention_weights(query, key)
    with jax.enable_x64(True):
        weights = attention_weights(query, key)
    np.testing.assert_array_equal(weights, expected)


@dataclasses.dataclass(frozen=True)
class Counting(suite.OwnCosine):
    """Its `pair` is traced in every call of attention, and more often in the first."""

    pair = chex.assert_max_traces(suite.OwnCosine.pair, n=10)


def test_new_arrays_compile_nothing():
    for seed in (1, 2, 3):
        rng, rng_key = np.random.default_rng(seed), jax.random.key(seed)
        query, key, value = (
            jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 3), (7, 11), (7, 13))
        )
        attention(
            query, key, value, score=Counting(), params=Counting().init(rng_key, 3, 11),
            mask=causal_mask(0) & padding_mask(jnp.array(seed)),
            dropout_rate=0.1, dropout_rng=rng_key,
        )  # fmt: skip
