"""The module of attention with coverage against `Attention` and the functional core."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit

from attention_jax import Additive, padding_mask
from attention_jax.functional.coverage import coverage_attention
from attention_jax.nn import Attention
from attention_jax.nn.coverage import CoverageAttention

B, T, S, DQ, DK, DV, A = 2, 5, 7, 3, 11, 13, 17


def tokens():
    rng = np.random.default_rng(1)
    shapes = ((B, T, DQ), (B, S, DK), (B, S, DV))
    return (rng.normal(size=shape).astype(np.float32) for shape in shapes)


@pytest.mark.parametrize("score", ["general", Additive(A)])
def test_a_fresh_module_is_the_plain_score_and_learns(score):
    query, key, value = tokens()
    module = CoverageAttention(score, DQ, DK, rngs=nnx.Rngs(5))
    plain = Attention(score, DQ, DK, rngs=nnx.Rngs(5))
    mask = padding_mask(jnp.array([4, S]))

    def calls(query, key, value):
        return (
            (module(query, key, value, mask=mask), plain(query, key, value, mask=mask)),
            (module(query, key).output, plain(query, key)),
        )

    (result, output), of_keys = run_jit(calls, query, key, value)
    np.testing.assert_allclose(result.output, output, atol=2e-6)
    np.testing.assert_allclose(*of_keys, atol=2e-6)

    graph, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    assert params.keys() == {"params", "coverage_kernel"}
    assert jax.tree.structure(params["params"]) == jax.tree.structure(
        nnx.to_pure_dict(nnx.state(plain))["params"]
    )

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        return nnx.merge(graph, params)(query, key, value).loss.mean()

    before, gradient = loss(params)
    slope = np.asarray(gradient["coverage_kernel"])
    assert np.any(slope)
    kernel = jnp.asarray(params["coverage_kernel"] - 0.5 * slope / np.linalg.norm(slope))
    after, _ = loss({**params, "coverage_kernel": kernel})
    assert after < before - 1e-3
    # Merged again, it is the function of its parameters; and it goes on from a coverage.
    learned = nnx.merge(graph, {**params, "coverage_kernel": kernel})
    options = {"score": score, "params": params["params"], "coverage_kernel": kernel}
    coverage = result.coverage

    def learned_calls(query, key, value):
        pairs = {"bias": jnp.ones(S), "coverage": coverage}
        return (
            learned(query, key, value, **pairs),
            coverage_attention(query, key, value, **options, **pairs),
            learned(query, key, value, return_weights=False),
        )

    got, expected, without = run_jit(learned_calls, query, key, value)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert without.weights is None


def test_module_fails_at_construction():
    with pytest.raises(ValueError, match="key_dim must be 3 to match score"):
        CoverageAttention("dot", DQ, DK, rngs=nnx.Rngs(0))
