"""Modules with other normalisers, and with an output gate."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax import attention, attention_weights, nn, padding_mask
from attention_jax.nn.parameters import values_of

B, T, S, D, N = 2, 5, 7, 8, 4
QUERY = jax.random.normal(jax.random.key(0), (B, T, D))
KEY = jax.random.normal(jax.random.key(1), (B, S, D))
MASK = padding_mask(jnp.array([4, 7]))
NORMALIZERS = ("softmax(sink=True)", "entmax", "ssmax", "sigmoid(learned=True)")


def multi_head(normalizer="softmax", score="general", **options):
    options = {"num_heads": N, "num_key_heads": 2, "rngs": nnx.Rngs(3)} | options
    return nn.MultiHeadAttention(score, D, normalizer=normalizer, **options)


def parameters(module):
    return dict(nnx.to_flat_state(nnx.state(module, nnx.Param)))


def test_a_module_is_the_function_with_its_parameters():
    for normalizer in NORMALIZERS:
        attend = nn.Attention("general", D, D, normalizer=normalizer, rngs=nnx.Rngs(0))
        options = {
            "score": "general",
            "params": values_of(attend.params),
            "normalizer": normalizer,
            "normalizer_params": values_of(attend.normalizer_params),
        }
        output, weights = attend(QUERY, KEY, mask=MASK, return_weights=True)
        np.testing.assert_allclose(
            output, attention(QUERY, KEY, KEY, mask=MASK, **options), atol=1e-6
        )
        expected = attention_weights(QUERY, KEY, mask=MASK, **options)
        np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_each_head_has_a_sink_of_its_own():
    """A head whose sink is large has output 0; the others are as without a sink."""
    attend, without = multi_head("softmax(sink=True)"), multi_head()
    sinks = attend.normalizer_params["sink"]
    assert sinks.shape == (N,)
    sinks[...] = jnp.array([-1e4, 1e4, -1e4, -1e4])
    for module in (attend, without):  # the output layer hands on the heads
        kernel = jnp.eye(D).reshape(N, D // N, D)
        module.output.kernel[...] = kernel
    heads = np.reshape(attend(QUERY, KEY), (B, T, N, D // N))
    expected = np.reshape(without(QUERY, KEY), (B, T, N, D // N))
    np.testing.assert_allclose(heads[:, :, [0, 2, 3]], expected[:, :, [0, 2, 3]], atol=1e-6)
    assert np.all(heads[:, :, 1] == 0)


def test_output_gate():
    """Each feature of a head is multiplied by the sigmoid of a projection of the query."""
    gated, plain = multi_head(output_gate=True), multi_head()
    for module in (gated, plain):
        module.output.kernel[...] = jnp.eye(D).reshape(N, D // N, D)
    factors = jax.nn.sigmoid(jnp.einsum("btd,dnh->btnh", QUERY, gated.gate.kernel[...]))
    expected = plain(QUERY, KEY, mask=MASK) * factors.reshape(B, T, D)
    np.testing.assert_allclose(gated(QUERY, KEY, mask=MASK), expected, atol=1e-6)


def test_a_gate_keeps_padding_out():
    """NaN at a query without keys, and as its cotangent, reaches neither output nor gradient."""
    attend = multi_head(output_gate=True)
    definition, state = nnx.split(attend)
    mask = padding_mask(jnp.array([4, 7]), jnp.array([3, 5]))
    query = QUERY.at[0, 3:].set(jnp.nan)
    doutput = jnp.ones((B, T, D)).at[0, 3:].set(jnp.nan)

    def forward(state, key):
        return nnx.merge(definition, state)(query, key, mask=mask)

    output, pull_back = jax.vjp(forward, state, KEY)
    assert np.all(np.asarray(output)[0, 3:] == 0)
    dstate, dkey = pull_back(doutput)
    assert np.isfinite(dkey).all()
    assert np.isfinite(dict(nnx.to_flat_state(dstate))["output", "kernel"][...]).all()
