"""The attention modules of the named scores, and of a user's score, against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import normal, run_jit, scrambled, weights_of
from oracles import softmax

from attention_jax import Score
from attention_jax.nn import (
    AdditiveAttention,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)

B, T, S, DV = 2, 5, 7, 13
MODULES = {"additive": (AdditiveAttention, 3, 11), "general": (GeneralAttention, 3, 11)}
MODULES |= {"dot": (DotAttention, 11, 11), "scaled": (ScaledDotAttention, 11, 11)}


@dataclasses.dataclass(frozen=True)
class Scaled(Score):
    """A user's score with nested parameters: gain * (q * scales) . k + bonus of the key."""

    gain: float = 0.5

    def init(self, rng, query_dim, key_dim):
        scales = jax.random.normal(rng, (query_dim,))
        return {"query": {"scales": scales}, "key": ({"bonus": jnp.linspace(-1, 1, key_dim)},)}

    def pair(self, params, q_features, k_features):
        bonus = k_features @ params["key"][0]["bonus"]
        dots = self.gain * (q_features * params["query"]["scales"][None, :]) @ k_features.T
        return dots + bonus[None, :]


def inputs(query_dim, key_dim):
    return normal(B, T, query_dim), normal(B, S, key_dim, seed=3), normal(B, S, DV, seed=4)


@pytest.mark.parametrize("score", MODULES)
def test_a_named_module_is_the_formula(score):
    module_class, query_dim, key_dim = MODULES[score]
    module, params = scrambled(lambda: module_class(query_dim, key_dim, rngs=nnx.Rngs(5)))
    query, key, value = inputs(query_dim, key_dim)
    weights = [
        weights_of(score, params.get("params", {}), *map(np.float64, row))
        for row in zip(query, key, strict=True)
    ]

    def calls(query, key, value):
        return module(query, key, value), module(query, key)

    output, of_keys = run_jit(calls, query, key, value)
    np.testing.assert_allclose(output, np.stack(weights) @ value, atol=3e-6)
    # The key is the value when none is given.
    np.testing.assert_allclose(of_keys, np.stack(weights) @ key, atol=3e-6)


def test_a_users_score_with_nested_parameters():
    module, wide = scrambled(lambda: Attention(Scaled(0.25), 11, 11, rngs=nnx.Rngs(2)))
    query, key, value = inputs(11, 11)
    params = wide["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 22
    scales, bonus = (jax.tree.leaves(params[side])[0] for side in ("query", "key"))
    # Out to a pure dict and back, with new values in it.
    graph, state = nnx.split(module)
    doubled = jax.tree.map(lambda leaf: 2 * np.asarray(leaf), nnx.to_pure_dict(state))
    output = run_jit(
        lambda params, *tokens: nnx.merge(graph, params)(*tokens), doubled, query, key, value
    )
    logits = 0.25 * (query * 2 * scales) @ key.transpose(0, 2, 1) + (key @ (2 * bonus))[:, None, :]
    np.testing.assert_allclose(output, softmax(logits) @ value, atol=3e-6)
