"""Modules of the named scores, with other normalisers, and with an output gate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit
from oracles import normal

from attention_jax import attention, attention_weights, nn, padding_mask
from attention_jax.nn.parameters import values_of

B, T, S, D, N = 2, 5, 7, 8, 4
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
