"""Encoder and decoder blocks against numpy by hand and against Flax's own attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax import causal_mask, padding_mask
from attention_jax.nn import DecoderBlock, EncoderBlock, FeedForward, SelfAttention

B, T, S, DIM, HIDDEN = 2, 5, 7, 6, 11
SCORES = ("additive", "dot", "general", "scaled")
every_score = pytest.mark.parametrize("score", SCORES)


# --- the blocks in float64 numpy, from a pure dict of parameters ---


def numpy_weights(score, params, query, key, allowed):
    """[T, S] of one example; `allowed` is bool [T, S]."""
    if score == "additive":
        hidden = (query @ params["query_kernel"])[:, None] + (key @ params["key_kernel"])[None]
        logits = np.tanh(hidden) @ params["v"]
    elif score == "general":
        logits = query @ params["kernel"] @ key.T
    else:
        logits = query @ key.T / (np.sqrt(key.shape[-1]) if score == "scaled" else 1)
    exps = np.where(allowed, np.exp(logits - logits.max()), 0)
    return exps / exps.sum(-1, keepdims=True)


def numpy_norm(params, x):
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return x * params["scale"] + params["bias"]


def numpy_self_attention(score, params, x, allowed):
    query, key, value = (x @ params[name]["kernel"] for name in ("query", "key", "value"))
    score_params = params.get("attention", {}).get("params", {})
    weights = numpy_weights(score, score_params, query, key, allowed)
    return weights @ value @ params["output"]["kernel"]


def numpy_feed_forward(params, x):
    hidden = np.maximum(x @ params["hidden"]["kernel"] + params["hidden"]["bias"], 0)
    return hidden @ params["output"]["kernel"] + params["output"]["bias"]


def numpy_encoder_block(score, params, x, allowed):
    normed = numpy_norm(params["self_norm"], x)
    x = x + numpy_self_attention(score, params["self_attention"], normed, allowed)
    return x + numpy_feed_forward(
        params["feed_forward"], numpy_norm(params["feed_forward_norm"], x)
    )


def numpy_decoder_block(self_score, score, params, x, memory, self_allowed, allowed):
    normed = numpy_norm(params["self_norm"], x)
    x = x + numpy_self_attention(self_score, params["self_attention"], normed, self_allowed)
    score_params = params.get("cross_attention", {}).get("params", {})
    query = numpy_norm(params["cross_norm"], x)
    weights = numpy_weights(score, score_params, query, memory, allowed)
    x = x + weights @ memory @ params["cross_output"]["kernel"]
    x = x + numpy_feed_forward(params["feed_forward"], numpy_norm(params["feed_forward_norm"], x))
    return x, weights


def scrambled(module, seed=1, noise=0.2):
    """The module with no parameter at 0 or 1, and its parameters in float64."""
    graph, state = nnx.split(module)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: leaf + (noise * rng.normal(size=leaf.shape)).astype(np.float32),
        nnx.to_pure_dict(state),
    )
    return nnx.merge(graph, params), jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def normal(*shape, seed=2):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# --- the tests ---


@every_score
def test_self_attention(score):
    module, params = scrambled(SelfAttention(score, DIM, rngs=nnx.Rngs(0)))
    x = normal(B, T, DIM)
    causal = np.tril(np.ones((T, T), bool))
    output = jax.jit(lambda x: module(x, causal_mask()))(x)
    expected = [numpy_self_attention(score, params, row, causal) for row in x.astype(np.float64)]
    np.testing.assert_allclose(output, expected, atol=1e-5)
    unmasked = jax.jit(lambda x: module(x, None))(x)
    expected = [numpy_self_attention(score, params, row, True) for row in x.astype(np.float64)]
    np.testing.assert_allclose(unmasked, expected, atol=1e-5)


def test_scaled_self_attention_is_flax_multi_head_attention_with_one_head():
    module, _ = scrambled(SelfAttention("scaled", DIM, rngs=nnx.Rngs(0)))
    peer = nnx.MultiHeadAttention(
        num_heads=1, in_features=DIM, use_bias=False, decode=False, rngs=nnx.Rngs(9)
    )
    for ours, theirs in (
        (module.query, peer.query),
        (module.key, peer.key),
        (module.value, peer.value),
        (module.output, peer.out),
    ):
        theirs.kernel[...] = ours.kernel[...].reshape(theirs.kernel.shape)
    x = normal(B, T, DIM)
    mask = jnp.tril(jnp.ones((B, 1, T, T), bool))
    np.testing.assert_allclose(module(x, causal_mask()), peer(x, mask=mask), atol=1e-5)


def test_feed_forward():
    module, params = scrambled(FeedForward(DIM, HIDDEN, rngs=nnx.Rngs(0)))
    x = normal(B, T, DIM)
    np.testing.assert_allclose(module(x), numpy_feed_forward(params, x), atol=1e-5)


@every_score
def test_encoder_block(score):
    module, params = scrambled(EncoderBlock(score, DIM, HIDDEN, rngs=nnx.Rngs(0)))
    x, lengths = normal(B, S, DIM), [4, 7]
    output = jax.jit(lambda x: module(x, padding_mask(jnp.array(lengths))))(x)
    for row, length in enumerate(lengths):
        allowed = np.arange(S)[None, :] < length
        expected = numpy_encoder_block(score, params, x[row].astype(np.float64), allowed)
        np.testing.assert_allclose(output[row, :length], expected[:length], atol=1e-5)


@pytest.mark.parametrize(
    ("self_score", "score"), [*zip(SCORES, SCORES, strict=True), ("dot", "general")]
)
def test_decoder_block(self_score, score):
    module, params = scrambled(DecoderBlock(self_score, score, DIM, HIDDEN, rngs=nnx.Rngs(0)))
    x, memory, lengths = normal(B, T, DIM), normal(B, S, DIM, seed=3), [4, 7]
    mask = padding_mask(jnp.array(lengths))
    output, weights = jax.jit(lambda x, m: module(x, m, causal_mask(), mask))(x, memory)
    for row, length in enumerate(lengths):
        expected = numpy_decoder_block(
            self_score,
            score,
            params,
            x[row].astype(np.float64),
            memory[row].astype(np.float64),
            np.tril(np.ones((T, T), bool)),
            np.arange(S)[None, :] < length,
        )
        np.testing.assert_allclose(output[row], expected[0], atol=1e-5)
        np.testing.assert_allclose(weights[row], expected[1], atol=1e-5)


def test_the_cross_attention_alone_has_the_score_under_study():
    block = DecoderBlock("scaled", "additive", DIM, HIDDEN, rngs=nnx.Rngs(0))
    params = nnx.to_pure_dict(nnx.state(block))
    names = {"query_kernel", "key_kernel", "v"}
    assert set(params["cross_attention"]["params"]) == names
    assert not params["self_attention"].get("attention", {}).get("params")
