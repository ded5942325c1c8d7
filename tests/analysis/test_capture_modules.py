"""What `capture` sees of modules, against what they say of their weights themselves."""

import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from flax import nnx
from oracles import normal

import attention_jax as aj
from attention_jax import nn
from attention_jax.analysis import capture, capture_gradients

B, T, S, D = 2, 5, 7, 6


close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-6)


def captured(function, *args, **kwargs):
    return quick_jit(lambda *args: capture(function, *args, **kwargs))(*args)


# --- heads are one axis ---


def test_grouped_heads():
    attend = nn.MultiHeadAttention("additive", D, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    x, y = normal(B, T, D, seed=0), normal(B, S, D, seed=1)
    mask = np.random.default_rng(2).random((B, 6, T, S)) < 0.6

    ((_, weights), attentions) = captured(attend, x, y, mask=mask, return_weights=True)
    seen = attentions["attention"]
    assert seen.weights.shape == seen.logits.shape == (B, 6, T, S)
    close(seen.weights, weights)
    np.testing.assert_array_equal(seen.mask, mask)
    np.testing.assert_array_equal(np.isneginf(seen.logits), ~mask)
    assert seen.statistics.entropy.shape == (B, 6, T)
    # Query heads 0, 1, 2 read the first head of keys.
    close(seen.key, np.repeat(seen.key[:, ::3], 3, axis=1))
    assert seen.query.shape == seen.output.shape == (B, 6, T, 1)
    close(seen.output, jnp.matmul(seen.weights, seen.value))


# --- other kinds of attention ---


X, Y = normal(B, T, D), normal(B, S, D, seed=1)
LOCAL = {"centers": np.arange(T, dtype=np.float32), "radius": 1}
KINDS = {  # functions of (query, key) that return the output and the weights
    "local-m": lambda x, y: (
        aj.local_attention(x, y, y, **LOCAL), aj.local_attention_weights(x, y, **LOCAL)
    ),
    "coverage": lambda x, y: aj.coverage_attention(
        x, y, y, score="dot", coverage_kernel=normal(2, D)
    )[:2],
    "monotonic": lambda x, y: aj.monotonic_attention(x, y, y, score="dot"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds(kind):
    (output, weights), attentions = captured(KINDS[kind], X, Y)
    assert list(attentions) == ["attention"]
    seen, has_softmax = attentions["attention"], kind == "local-m"
    close(seen.weights, weights)
    np.testing.assert_array_equal(seen.output, output)
    assert (seen.logits is not None) == (seen.statistics is not None) == has_softmax
    assert seen.mask.shape == (B, T, S)
    assert bool(seen.mask.all()) != has_softmax


def test_local_p_is_seen_before_its_gaussian():
    query, key = normal(B, T, D, seed=0), normal(B, S, D, seed=1)
    centers = jnp.abs(normal(B, T, seed=2))
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
