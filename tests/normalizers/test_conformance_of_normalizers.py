"""Every normaliser with every mask and implementation, against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_IMPLEMENTATIONS,
    ALL_MASKS,
    MASK_CASES,
    allowed_table,
    assert_close,
    named,
    poisoned,
)
from normalizer_cases import (
    NORMALIZER_CASES,
    doutput,
    inputs_for,
    numpy_side,
    output_and_gradients,
)

import attention_jax as aj

FAST = (
    "sink",
    "sigmoid",
    "sparsemax",
    "entmax",
    "ssmax",
    "log_scaled",
    "own_softplus",
    "own_power",
)
SCORES = ("scaled", "additive", "general")


def check(name, score_name, implementation, dtype=jnp.float64, *, masks=ALL_MASKS, poison=False):
    run = output_and_gradients(name, score_name, implementation)
    exact = dtype == jnp.float64
    with jax.enable_x64(exact):
        for mask_name in masks:
            inputs, table = inputs_for(name, score_name), allowed_table(mask_name)
            if poison:
                inputs = poisoned(inputs, table)
            arrays = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), inputs)
            got = run(arrays, jnp.asarray(table), jnp.asarray(doutput(), dtype))
            output, gradients = numpy_side(name, score_name, mask_name)
            what = f"{name}, {mask_name}"
            assert got[0].dtype == dtype
            assert_close(f"{what}: output", got[0], output, 1e-12 if exact else 2e-6)
            got, expected = named(got[1]), named(gradients)
            assert got.keys() == expected.keys()
            for key, array in got.items():
                # The slopes of alpha = 3 are infinite where a weight starts to rise from 0.
                tolerance = 1e-9 if name == "entmax_3" else 1e-11
                tolerance = tolerance if exact else 2e-5
                if not exact and "normalizer_params" in key:
                    # A sum over all pairs, whose terms of either sign may nearly cancel.
                    np.testing.assert_allclose(array, expected[key], atol=2e-5)
                    continue
                assert_close(f"{what}: gradient of {key}", array, expected[key], tolerance)


@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", FAST)
def test_all_masks_with_poisoned_padding(name, implementation):
    check(name, "scaled", implementation, poison=True)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ALL_IMPLEMENTATIONS)
@pytest.mark.parametrize("name", NORMALIZER_CASES)
@pytest.mark.parametrize("score_name", SCORES)
def test_scores_and_masks(score_name, name, implementation):
    check(name, score_name, implementation)


@pytest.mark.parametrize("name", ["entmax", "sink"])
def test_a_score_with_parameters_in_tiles(name):
    check(name, "general", "tiled", masks=("dense", "none"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "entmax" else pytest.mark.slow) for name in FAST],
)
def test_float32(name):
    check(name, "scaled", "tiled", jnp.float32)


@pytest.mark.parametrize("mask_name", ["none", "combination"])
def test_a_mask_as_it_is(mask_name):
    """A mask with its own rule for tiles, and no mask at all: n is counted all the same."""
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, inputs_for("sigmoid", "scaled"))
        outputs = [
            aj.attention(
                **arrays,
                mask=MASK_CASES[mask_name].build(),
                normalizer="sigmoid",
                implementation=implementation,
                block_sizes=aj.BlockSizes(2, 3),
            )
            for implementation in ALL_IMPLEMENTATIONS
        ]
    for output in outputs:
        np.testing.assert_allclose(
            output, numpy_side("sigmoid", "scaled", mask_name)[0], atol=1e-13
        )
