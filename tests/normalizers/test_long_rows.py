"""4,096 queries and keys in float64: entmax against sorting, gradients by finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normalizer_cases import entmax_by_sorting, sparsemax_by_sorting

from attention_jax import attention, causal_mask

LENGTH, D = 4096, 64
BY_SORTING = {"sparsemax": sparsemax_by_sorting, "entmax": entmax_by_sorting}


@pytest.mark.slow
@pytest.mark.parametrize("mask", [None, causal_mask()], ids=["full", "causal"])
@pytest.mark.parametrize("name", BY_SORTING)
def test_output_and_gradients(name, mask):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        inputs = [rng.normal(size=(LENGTH, D)) for _ in range(3)]
        doutput = rng.normal(size=(LENGTH, D))

        def attend(query, key, value):
            options = {"normalizer": name, "mask": mask, "implementation": "tiled"}
            return attention(query, key, value, **options)

        @jax.jit
        def both(inputs):
            output, pull_back = jax.vjp(attend, *inputs)
            return output, pull_back(doutput)

        arrays = [jnp.asarray(array) for array in inputs]
        output, gradients = both(arrays)
        query, key, value = inputs
        for i in rng.choice(LENGTH, size=24, replace=False):
            keys = slice(None) if mask is None else slice(i + 1)
            logits = key[keys] @ query[i] / np.sqrt(D)
            weights = BY_SORTING[name](logits[None])[0]
            expected = (weights @ value[keys]).real
            np.testing.assert_allclose(output[i], expected, atol=1e-12)
        directions = [rng.normal(size=(LENGTH, D)) for _ in range(3)]
        slope = sum(np.sum(d * g) for d, g in zip(directions, gradients, strict=True))

        def loss(step):
            moved = [a + step * d for a, d in zip(inputs, directions, strict=True)]
            return np.sum(doutput * np.asarray(attend(*moved)))

        step = 1e-8
        measured = (loss(step) - loss(-step)) / (2 * step)
        # Sparsemax has corners: some of its 16 million weights start to rise within the step.
        np.testing.assert_allclose(slope, measured, rtol=1e-4 if name == "sparsemax" else 1e-6)
