"""The attention module of a user's score against NumPy, and modules in Linen."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit, scrambled
from oracles import normal, softmax

from attention_jax import Score, attention, attention_weights, causal_mask, nn, padding_mask
from attention_jax.nn import Attention, LocalPAttention, Model, ModelConfig, MultiHeadAttention
from attention_jax.nn.parameters import values_of

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


# --- named scores, other normalisers, and an output gate ---


D, N = 8, 4
QUERY, KEY = normal(B, T, D), normal(B, S, D, seed=3)
MASK = padding_mask(jnp.array([4, 7]))


def multi_head(normalizer="softmax", **options):
    options = {"num_heads": N, "num_key_heads": 2, "rngs": nnx.Rngs(3)} | options
    return nn.MultiHeadAttention("general", D, normalizer=normalizer, **options)


@pytest.mark.parametrize(
    ("made", "score", "normalizer"),
    [
        (nn.AdditiveAttention, "additive", "softmax(sink=True)"),
        (nn.GeneralAttention, "general", "sigmoid(learned=True)"),
        (nn.DotAttention, "dot", "softmax"),
        (nn.ScaledDotAttention, "scaled", "softmax"),
    ],
)
def test_a_module_is_the_function_with_its_parameters(made, score, normalizer):
    """The key is the value when none is given."""
    attend = made(D, D, normalizer=normalizer, rngs=nnx.Rngs(0))
    options = {
        "mask": MASK,
        "score": score,
        "params": values_of(attend.params_of_score),
        "normalizer": normalizer,
        "normalizer_params": values_of(attend.normalizer_params),
    }
    assert bool(options["normalizer_params"]) == ("(" in normalizer)

    def both(query, key):
        expected = attention(query, key, key, **options), attention_weights(query, key, **options)
        return attend(query, key, mask=MASK, return_weights=True), expected

    chex.assert_trees_all_close(*run_jit(both, QUERY, KEY), rtol=1e-7, atol=1e-6)


def test_each_head_has_a_sink_of_its_own():
    """A head whose sink is large has output 0; the others are as without a sink."""
    attend, without = multi_head("softmax(sink=True)"), multi_head()
    sinks = attend.normalizer_params["sink"]
    assert sinks.shape == (N,)
    sinks[...] = np.array([-1e4, 1e4, -1e4, -1e4], np.float32)
    for module in (attend, without):  # the output layer hands on the heads
        module.output.kernel[...] = np.eye(D, dtype=np.float32).reshape(N, D // N, D)
    found = run_jit(lambda *tokens: (attend(*tokens), without(*tokens)), QUERY, KEY)
    heads, expected = (output.reshape(B, T, N, D // N) for output in found)
    np.testing.assert_allclose(heads[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]], atol=1e-6)
    assert np.all(heads[:, :, 1] == 0)


def test_a_gate_keeps_padding_out():
    """NaN at a query without keys, and as its cotangent, reaches neither output nor gradient."""
    definition, state = nnx.split(multi_head(output_gate=True))
    mask = padding_mask(jnp.array([4, 7]), jnp.array([3, 5]))
    query, doutput = QUERY.copy(), np.ones_like(QUERY)
    query[0, 3:] = doutput[0, 3:] = np.nan

    @jax.jit
    def output_and_gradient(state, key):
        def forward(state, key):
            return nnx.merge(definition, state)(query, key, mask=mask)

        output, pull_back = jax.vjp(forward, state, key)
        return output, *pull_back(doutput)

    output, dstate, dkey = output_and_gradient(state, KEY)
    assert np.all(np.asarray(output)[0, 3:] == 0)
    assert np.isfinite(dkey).all()
    assert np.isfinite(dict(nnx.to_flat_state(dstate))["output", "kernel"][...]).all()
