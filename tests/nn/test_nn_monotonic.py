"""The monotonic module against the function that it holds parameters for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit

from attention_jax import get_score, padding_mask
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.scores import SCORES

B, T, S, DV = 2, 5, 7, 13
SLOW_SCORES = ("concat", "cosine", "dot", "softcap")  # to the module all scores are alike
every_score = pytest.mark.parametrize(
    "score",
    [
        pytest.param(score, marks=[pytest.mark.slow] if score in SLOW_SCORES else [])
        for score in sorted(SCORES)
    ],
)


def arrays(score):
    """(query, key, value) for one score."""
    query_dim = 11 if get_score(score).needs_equal_dims else 3
    rng = np.random.default_rng(3)
    shapes = ((B, T, query_dim), (B, S, 11), (B, S, DV))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@every_score
def test_module_is_the_function_with_its_parameters(score):
    query, key, value = arrays(score)
    module = MonotonicAttention(
        score, query.shape[-1], key.shape[-1], initial_offset=-0.75, rngs=nnx.Rngs(2)
    )
    params = nnx.to_pure_dict(nnx.state(module))
    assert params["offset"] == -0.75

    def calls(query, key, value):
        return (
            monotonic_attention(
                query, key, value, score=score, params=params.get("params", {}), offset=-0.75
            ),
            module(query, key, value, return_weights=True),
            module(query, key, value),
            module(query, key, value, return_weights="last"),
            module(query, key),
        )

    expected, (output, weights), alone, (again, last), of_keys = run_jit(calls, query, key, value)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(weights, expected[1])
    np.testing.assert_array_equal(alone, output)
    np.testing.assert_array_equal(again, output)
    np.testing.assert_array_equal(last, weights[:, -1])
    np.testing.assert_allclose(of_keys, weights @ np.asarray(key), atol=1e-5)


def test_module_options_and_the_gradient_of_a_pure_dict():
    query, key, value = arrays("additive")
    module = MonotonicAttention("additive", 3, 11, noise_scale=0.5, rngs=nnx.Rngs(2))
    graph, state = nnx.split(module)

    def loss(params, **options):
        return jnp.sum(nnx.merge(graph, params)(query, key, value, **options) ** 2)

    mask, initial = padding_mask(jnp.array([3, 6])), np.eye(S, dtype=np.float32)[5]

    def calls(params, rng):
        return (
            jax.value_and_grad(loss)(params),
            loss(params, noise_rng=rng),
            module(query, key, mask=mask, hard=True, return_weights=True)[1],
            module(query, key, initial=initial, return_weights=True)[1],
        )

    params = nnx.to_pure_dict(state)
    (plain, gradient), noisy, hard, later = run_jit(calls, params, jax.random.key(1))
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradient))
    assert noisy != plain
    assert np.all(hard[0, :, 3:] == 0)
    assert set(np.unique(hard)) <= {0, 1}
    assert np.all(later[..., :5] == 0)
    with pytest.raises(ValueError, match="key_dim must be 3 to match"):
        MonotonicAttention("dot", 3, 11, rngs=nnx.Rngs(0))
