"""What `capture` sees of modules, against what they say of their weights themselves."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx

import attention_jax as aj
from attention_jax import nn
from attention_jax.analysis import capture, capture_gradients
from attention_jax.functional.centers import monotonic_centers

B, T, S, D = 2, 5, 7, 6
LENGTHS = jnp.array([7, 4])
NAMES = ["encoder_0/self_attention", "decoder_0/self_attention", "decoder_0/cross_attention"]


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def captured(function, *args, **kwargs):
    return quick_jit(lambda *args: capture(function, *args, **kwargs))(*args)


def close(got, expected, tolerance=1e-6):
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


# --- heads are one axis ---


def test_grouped_heads():
    attend = nn.MultiHeadAttention("additive", D, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    x, y = normal(0, B, T, D), normal(1, B, S, D)
    mask = np.random.default_rng(2).random((B, 6, T, S)) < 0.6

    @quick_jit
    def both(x, y):
        found = capture(attend, x, y, mask=mask, return_weights=True)
        return found, attend(x, y, mask=mask), jnp.swapaxes(attend.key(y), 1, 2)

    ((output, weights), attentions), expected, keys = both(x, y)
    close(output, expected)
    seen = attentions["attention"]
    assert seen.weights.shape == seen.logits.shape == (B, 6, T, S)
    close(seen.weights, weights)
    np.testing.assert_array_equal(seen.mask, mask)
    np.testing.assert_array_equal(np.isneginf(seen.logits), ~mask)
    assert seen.statistics.entropy.shape == (B, 6, T)
    # Query heads 0, 1, 2 read the first head of keys.
    close(seen.key, np.repeat(keys, 3, axis=1))
    assert seen.query.shape == seen.output.shape == (B, 6, T, 1)
    close(seen.output, jnp.matmul(seen.weights, seen.value))


# --- other kinds of attention ---


def kinds():
    query, key = normal(0, B, T, D), normal(1, B, S, D)
    local = {"centers": monotonic_centers(T), "radius": 1}
    coverage = {"score": "dot", "coverage_kernel": normal(2, D)}
    return {
        "local-m": (
            lambda: (
                aj.local_attention(query, key, key, **local),
                aj.local_attention_weights(query, key, **local),
            ),
            True,
        ),
        "coverage": (lambda: aj.coverage_attention(query, key, key, **coverage)[:2], False),
        "monotonic": (lambda: aj.monotonic_attention(query, key, key, score="dot"), False),
    }


@pytest.mark.parametrize("kind", kinds())
def test_other_kinds(kind):
    function, has_softmax = kinds()[kind]
    (output, weights), attentions = captured(function)
    assert list(attentions) == ["attention"]
    seen = attentions["attention"]
    close(seen.weights, weights)
    np.testing.assert_array_equal(seen.output, output)
    assert (seen.logits is not None) == (seen.statistics is not None) == has_softmax
    assert seen.mask.shape == (B, T, S)
    assert bool(seen.mask.all()) != has_softmax


def test_local_p_is_seen_before_its_gaussian():
    query, key = normal(0, B, T, D), normal(1, B, S, D)
    centers = jnp.abs(normal(2, B, T))
    attend = functools.partial(aj.local_attention, centers=centers, radius=2, sigma=1.0)

    @quick_jit
    def both(query, key):
        def loss(bias):
            return jnp.sum(jnp.sin(attend(query, key, key, bias=bias)))

        found = capture_gradients(loss, jnp.zeros((B, T, S)))
        weights = aj.local_attention_weights(query, key, centers=centers, radius=2, sigma=1.0)
        return found, weights

    found, weights = both(query, key)
    assert list(found.attentions) == ["attention"]
    seen = found.attentions["attention"]
    close(seen.weights * seen.damping, weights)
    close(seen.output, weights @ key)
    close(seen.weights.sum(-1), np.ones((B, T)))
    assert np.all(weights.sum(-1) < 0.99)
    close(found.gradients["attention"].dlogits, found.dparams)  # a bias gets that of the logits


# --- models ---


@functools.cache
def model():
    config = nn.ModelConfig(score="additive", num_heads=2, dim=D, hidden_dim=3)
    return nn.Model(config, 11, rngs=nnx.Rngs(0))


def batch():
    rng = np.random.default_rng(3)
    return (
        jnp.asarray(rng.integers(1, 11, (B, S))),
        LENGTHS,
        jnp.asarray(rng.integers(1, 11, (B, T))),
    )


def test_seq2seq():
    seq2seq, names = model(), []

    @quick_jit
    def all_ways(*batch):
        found = capture(seq2seq, *batch, return_weights=True)
        names.extend(found.attentions)
        return found, seq2seq(*batch)

    ((logits, weights), attentions), expected = all_ways(*batch())
    assert names == NAMES  # in the order of computation, which `jax.jit` does not keep
    close(logits, expected, 1e-5)
    # The module gives means over heads, of each layer.
    close(attentions[NAMES[2]].weights.mean(1), weights[0])
    allowed = np.broadcast_to(np.tri(T, dtype=bool), (B, 2, T, T))
    np.testing.assert_array_equal(attentions[NAMES[1]].mask, allowed)
