"""The attention module of a user's score against NumPy, and modules in Linen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit, scrambled
from oracles import normal, softmax

from attention_jax import Score, causal_mask
from attention_jax.nn import Attention, LocalPAttention, Model, ModelConfig, MultiHeadAttention

TOKENS = normal(2, 5, 8)
IN_LINEN = {  # a module, its arguments, and those of a call
    "heads": (MultiHeadAttention, ("additive", 8), {"num_heads": 2}, (TOKENS,)),
    "one head": (Attention, ("general", 8, 8), {}, (TOKENS, TOKENS)),
    "local": (LocalPAttention, ("general", 8, 8), {"radius": 2}, (TOKENS, TOKENS)),
    "model": (
        Model, (ModelConfig("decoder", score="additive", dim=8), 11), {}, (None, None, [[1, 2]]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_LINEN)
def test_linen_takes_every_module(name):
    module, arguments, options, call = IN_LINEN[name]
    layer = nnx.bridge.to_linen(module, *arguments, **options)

    @jax.jit
    def both():
        variables = layer.init(jax.random.key(0), *call)
        state = variables["params"]
        own = module(*arguments, **options, rngs=nnx.Rngs(1))
        nnx.update(own, nnx.State(state))
        return layer.apply(variables, *call), own(*call)

    np.testing.assert_array_equal(*both())


@pytest.mark.parametrize("name", ["heads", "model"])
def test_flax_tabulates_every_module(name):
    """The page about Flax says how masks and the memory of a block are given."""
    if name == "heads":
        made = MultiHeadAttention("additive", 8, num_heads=2, rngs=nnx.Rngs(0))
        call, mask = (TOKENS,), {"mask": causal_mask().materialize(5, 5)}
    else:
        config = ModelConfig(score="general", dim=8, num_heads=2, hidden_dim=0)
        made, mask = Model(config, 11, rngs=nnx.Rngs(0)), {}
        call = [[1, 2]], None, [[1, 2, 3]]
    table = nnx.tabulate(made, *call, **mask)
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(made)))
    assert f"Total Parameters: {size:,}" in table


B, T, S, DV = 2, 5, 7, 13


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


def test_a_users_score_with_nested_parameters():
    module, wide = scrambled(lambda: Attention(Scaled(0.25), 11, 11, rngs=nnx.Rngs(2)))
    query, key, value = normal(B, T, 11), normal(B, S, 11), normal(B, S, DV)
    params = wide["params_of_score"]
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
