"""The front door: the conformance suite, the numerics contract, and the worked examples."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    ALL_MASKS,
    ALL_SCORES,
    MADE_OF_OTHERS,
    MASK_CASES,
    MASK_OF_SCORE,
    SCORE_CASES,
    TABLE,
    OwnCosine,
    allowed_table,
    assert_close,
    check_conformance,
    fully_optimized_jit,
    inputs_of,
    library_side,
    named,
    numpy_side,
    poisoned,
    quick_jit,
)

from attention_jax import (
    attention,
    attention_weights,
    causal_mask,
    padding_mask,
)

every_implementation = pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
every_score = pytest.mark.parametrize("score", ALL_SCORES)


@every_score
@every_implementation
def test_float64_ignores_nan_and_inf_where_masked(implementation, score):
    for mask in ALL_MASKS:
        check_conformance(implementation, score, mask, jnp.float64, poison=True, as_table=True)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ALL_MASKS)
@every_implementation
def test_every_mask_in_float64(implementation, mask):
    check_conformance(implementation, "dot", mask, jnp.float64, poison=True)


@pytest.mark.parametrize("score", ["additive", "scaled"])
@every_implementation
def test_bfloat16_accumulates_in_float32(implementation, score):
    check_conformance(implementation, score, "combination", jnp.bfloat16, poison=True)


@every_implementation
def test_float16_accumulates_in_float32(implementation):
    check_conformance(implementation, "general", "segment", jnp.float16, poison=True)


# --- the numerics contract ---


@pytest.mark.parametrize("score", [name for name in SCORE_CASES if name not in MADE_OF_OTHERS])
@every_implementation
def test_what_is_masked_changes_no_bit(implementation, score):
    """Also the exact zeros, which a tolerance does not see."""
    check_bits(implementation, score, MASK_OF_SCORE[score])


@every_implementation
def test_optimised_programs(implementation):
    """The bounds and the bits of programs that are compiled as on users' machines."""
    mask, jit = "dense_shared", fully_optimized_jit
    check_conformance(implementation, "scaled", mask, jit=jit, poison=True)
    check_bits(implementation, "scaled", mask, jit)


@every_score
def test_weights_are_those_of_the_output(score):
    inputs = jax.tree.map(np.float32, {**inputs_of(score)})
    value = inputs.pop("value")
    weights = attention_weights(**inputs, mask=TABLE, score=SCORE_CASES[score].score)
    expected, _ = numpy_side(score, "dense")
    np.testing.assert_allclose(np.asarray(weights).sum(-1), TABLE.any(2), atol=1e-6)
    assert not np.any(weights[~TABLE])
    assert_close("output", np.float64(weights) @ value, expected["output"], 2e-6)


def check_bits(implementation, score, mask_name, jit=None):
    allowed = allowed_table(mask_name)
    clean = inputs_of(score)
    outputs_and_gradients = [
        library_side(implementation, score, MASK_CASES[mask_name].build(), inputs, jnp.float32, jit)
        for inputs in (clean, poisoned(clean, allowed))
    ]
    (outputs, gradients), (got_outputs, got_gradients) = jax.device_get(outputs_and_gradients)
    for (name, array), got in zip(
        named((outputs, gradients)).items(),
        jax.tree.leaves((got_outputs, got_gradients)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, array, err_msg=name)
        assert np.any(array), f"{name} is zero everywhere: this test shows nothing"
    rows, keys = allowed.any(2), allowed.any(1)
    assert not np.any(got_outputs["output"][~rows])
    assert not np.any(got_outputs["entropy"][~rows])
    assert np.isneginf(got_outputs["logsumexp"][~rows]).all()
    assert np.isfinite(got_outputs["logsumexp"][rows]).all()
    assert not np.any(got_gradients["query"][~rows])
    assert not np.any(got_gradients["key"][~keys])
    assert not np.any(got_gradients["value"][~keys])
    assert not np.any(got_gradients["bias"][~allowed])


@pytest.mark.parametrize(
    "implementation", ["reference", pytest.param("tiled", marks=pytest.mark.slow)]
)
def test_everything_masked_and_second_order(implementation):
    score = "own"
    inputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs_of(score))

    def loss(inputs, mask):
        output, statistics = attention(
            **inputs, mask=mask, score=SCORE_CASES[score].score, implementation=implementation,
            return_statistics=True,
        )  # fmt: skip
        return output.sum() + (output**2).sum() + statistics.entropy.sum()

    def gradient_norm(inputs, mask):
        gradient = jax.grad(loss)(inputs, mask)
        return sum((leaf + leaf**2).sum() for leaf in jax.tree.leaves(gradient)), gradient

    derivatives = quick_jit(jax.grad(gradient_norm, has_aux=True))
    second_and_first = derivatives(inputs, jnp.zeros((1, 1), bool))
    assert len(jax.tree.leaves(second_and_first)) == 2 * len(jax.tree.leaves(inputs))
    for leaf in jax.tree.leaves(second_and_first):
        np.testing.assert_array_equal(leaf, 0)


@every_implementation
def test_minus_infinity_in_the_bias_is_a_mask(implementation):
    inputs = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), inputs_of("general"))
    bias = jnp.where(TABLE, inputs["bias"], -jnp.inf)  # row 2 of example 0 is -inf throughout
    expected, expected_gradients = numpy_side("general", "dense")
    got, gradients = library_side(
        implementation, "general", None, {**inputs, "bias": bias}, jnp.float32
    )
    for name in got:
        assert_close(name, got[name], expected[name], 2e-6)
    expected_gradients = named(expected_gradients)
    for name, array in named(gradients).items():
        assert_close(f"gradient of {name}", array, expected_gradients[name], 2e-5)
    assert not np.any(gradients["bias"][~TABLE])
    assert not np.any(gradients["query"][0, 2])


@pytest.mark.parametrize("wide", ["query", "value", "params"])
@every_implementation
def test_mixed_dtypes(implementation, wide):
    inputs = inputs_of("general")
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
    expected, _ = numpy_side("general", "none")
    for name, statistic in statistics._asdict().items():
        assert statistic.dtype == jnp.float64
        assert_close(name, statistic, expected[name], 1e-13)


# --- worked examples ---

# --- compilation, and what else comes in ---


@dataclasses.dataclass(frozen=True)
class Counting(OwnCosine):
    def pair(self, params, q_features, k_features):
        TRACES.append(self)
        return super().pair(params, q_features, k_features)


TRACES: list = []


@every_implementation
def test_new_arrays_compile_nothing(implementation):
    def run(seed):
        rng, rng_key = np.random.default_rng(seed), jax.random.key(seed)
        query, key, value = (
            jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((5, 3), (7, 11), (7, 13))
        )
        return attention(
            query, key, value, score=Counting(), params=Counting().init(rng_key, 3, 11),
            mask=causal_mask(0) & padding_mask(jnp.array(seed)),
            implementation=implementation, dropout_rate=0.1, dropout_rng=rng_key,
        )  # fmt: skip

    run(1)
    once = len(TRACES)
    assert once > 0
    run(2)
    run(3)
    assert len(TRACES) == once + 2  # a user's score is traced on a small tile in every call
