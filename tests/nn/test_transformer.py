"""Encoder and decoder blocks against float64 NumPy; dropout against its expectation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import decoder_block, encoder_block, feed_forward, normal, run_jit, scrambled

from attention_jax import padding_mask
from attention_jax.nn import DecoderBlock, EncoderBlock, ModelConfig
from attention_jax.nn.transformer import FeedForward

B, T, S, DIM, HIDDEN, MEMORY_DIM = 2, 5, 7, 12, 11, 13
LENGTHS = [4, 7]
SETTINGS = {
    "plain": {},
    "post": {"norm": "post", "num_heads": 4, "num_key_heads": 2, "activation": "gelu"},
    "modern": {"num_heads": 2, "num_key_heads": 1, "activation": "swiglu", "normalize_qk": True},
}
WAVELENGTHS = {"plain": None, "post": None, "modern": 50.0}


def block_config(name, **settings):
    return ModelConfig(dim=DIM, hidden_dim=HIDDEN, **SETTINGS[name], **settings)


@pytest.mark.parametrize("activation", ["relu", "gelu", "swiglu"])
def test_feed_forward(activation):
    module, params = scrambled(
        lambda: FeedForward(DIM, HIDDEN, activation=activation, rngs=nnx.Rngs(0)), noise=0.5
    )
    x = normal(B, T, DIM)
    expected = feed_forward(params, x.astype(np.float64), activation)
    np.testing.assert_allclose(run_jit(module, x), expected, atol=1e-5)
    gated = activation == "swiglu"
    assert ("gate" in params, "bias" in params["hidden"]) == (gated, not gated)


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("plain", "additive"),
        pytest.param("plain", "dot", marks=pytest.mark.slow),
        ("post", "general"),
        ("modern", "scaled"),
    ],
)
def test_encoder_block(name, score):
    config = block_config(name)
    wavelength = WAVELENGTHS[name]
    module, params = scrambled(
        lambda: EncoderBlock(score, config, rotary_wavelength=wavelength, rngs=nnx.Rngs(0))
    )
    x, mask = normal(B, S, DIM), padding_mask(jnp.array(LENGTHS))
    output, weights = run_jit(lambda x: module(x, mask=mask, return_weights=True), x)
    assert weights.shape == (B, config.num_heads, S, S)
    for row, length in enumerate(LENGTHS):
        allowed = np.arange(S)[None, :] < length
        wide = x[row].astype(np.float64)
        expected = encoder_block(score, config, params, wide, allowed, wavelength=wavelength)
        np.testing.assert_allclose(output[row, :length], expected[0][:length], atol=2e-5)
        np.testing.assert_allclose(weights[row, :, :length], expected[1][:, :length], atol=1e-5)


def test_encoder_block_with_a_bias_and_without_weights():
    module, _ = scrambled(lambda: EncoderBlock("scaled", block_config("post"), rngs=nnx.Rngs(0)))
    x, real = normal(S, DIM), np.arange(S) < 4
    bias = np.where(real, 0, -1e9).astype(np.float32)  # as good as a mask
    mask = jnp.array(real)
    (masked, _), biased, plain = run_jit(
        lambda x: (module(x, mask=mask, return_weights=True), module(x, bias=bias), module(x)), x
    )
    np.testing.assert_allclose(biased, masked, atol=1e-5)
    assert np.any(np.abs(plain - masked) > 1e-2)


@pytest.mark.parametrize(
    ("name", "self_score", "score"),
    [
        pytest.param("plain", "dot", "general", marks=pytest.mark.slow),
        ("plain", "additive", "additive"),
        ("post", "scaled", "additive"),
        pytest.param("post", "scaled", "scaled", marks=pytest.mark.slow),
        ("modern", "general", "dot"),
    ],
)
def test_decoder_block(name, self_score, score):
    config, wavelength = block_config(name), WAVELENGTHS[name]
    sizes = {"memory_dim": MEMORY_DIM, "rotary_wavelength": wavelength}
    module, params = scrambled(
        lambda: DecoderBlock(self_score, score, config, **sizes, rngs=nnx.Rngs(0))
    )
    x, memory = normal(B, T, DIM), normal(B, S, MEMORY_DIM, seed=3)
    lengths = jnp.array(LENGTHS)
    output, weights = run_jit(
        lambda x, m: module(
            x, m, source_lengths=lengths, memory_mask=padding_mask(lengths), return_weights=True
        ),
        x,
        memory,
    )
    for row, length in enumerate(LENGTHS):
        wide = (x[row].astype(np.float64), memory[row].astype(np.float64))
        allowed = np.arange(S)[None, :] < length
        expected = decoder_block(
            self_score, score, config, params, *wide, allowed, wavelength=wavelength
        )
        np.testing.assert_allclose(output[row], expected[0], atol=2e-5)
        np.testing.assert_allclose(weights[row], expected[1], atol=1e-5)


def test_the_default_size_of_the_memory_is_that_of_the_block():
    block, _ = scrambled(
        lambda: DecoderBlock("scaled", "dot", block_config("plain"), rngs=nnx.Rngs(0))
    )
    output, weights = run_jit(
        lambda x, memory: block(x, memory, return_weights=True),
        normal(T, DIM),
        normal(S, DIM, seed=3),
    )
    assert (output.shape, weights.shape) == ((T, DIM), (T, S))
    with pytest.raises(ValueError, match="key_dim must be 12 to match score"):
        DecoderBlock("scaled", "dot", block_config("plain"), memory_dim=13, rngs=nnx.Rngs(0))


def test_the_cross_attention_alone_has_the_score_under_study():
    block = nnx.eval_shape(
        lambda: DecoderBlock("scaled", "additive", block_config("plain"), rngs=nnx.Rngs(0))
    )
    params = nnx.to_pure_dict(nnx.state(block))
    names = {"query_kernel", "key_kernel", "v"}
    assert set(params["cross_attention"]["attention"]["params"]) == names
    assert not params["self_attention"].get("params")


# --- dropout ---


def without(block, *layers):
    """The block with the output of these layers at 0: what is left is linear in what it drops."""
    for layer in layers:
        for leaf in ("kernel", "bias"):
            param = getattr(getattr(block, layer).output, leaf, None)
            if param is not None:
                param[...] = jnp.zeros_like(param[...])
    return block


def block_and_call(left):
    """A block of which only the layer `left` adds anything, as a function of a PRNG key."""
    config, x = block_config("plain", dropout_rate=0.3), normal(T, DIM)
    if left == "cross_attention":
        block = DecoderBlock("scaled", "additive", config, rngs=nnx.Rngs(0))
        block = without(block, "self_attention", "feed_forward")
        memory = normal(S, DIM, seed=3)
        block.eval()
        return x, lambda rng: block(x, memory, dropout_rng=rng)
    block = EncoderBlock("scaled", config, rngs=nnx.Rngs(0))
    others = {"self_attention", "feed_forward"} - {left}
    block = without(block, *others)
    block.eval()
    return x, lambda rng: block(x, dropout_rng=rng)


@pytest.mark.parametrize(
    "left",
    [
        "self_attention",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("cross_attention", "feed_forward")
        ),
    ],
)
def test_dropout_drops_and_keeps_the_expectation(left):
    x, call = block_and_call(left)
    call = jax.jit(call)
    plain = np.asarray(call(None))
    rngs = jax.random.split(jax.random.key(0), 3000)
    outputs = run_jit(jax.vmap(call), rngs)
    error = np.abs(outputs.mean(0) - plain)
    assert np.all(error <= 6 * outputs.std(0) / np.sqrt(len(rngs)) + 1e-6)
    dropped = outputs == x
    assert abs(dropped.mean() - 0.3) < 0.01
    if left == "feed_forward":  # no weights to drop: what is kept is all scaled alike
        expected = np.broadcast_to(x + (plain - x) / 0.7, outputs.shape)
        np.testing.assert_allclose(outputs[~dropped], expected[~dropped], atol=1e-5)
    else:  # weights are dropped, too: what is kept differs
        assert np.all(np.where(dropped, 0, outputs).std(0) > 0)
        kept = np.where(dropped[:, 0, 0], np.nan, outputs[:, 0, 0])
        assert len(np.unique(kept[~np.isnan(kept)].round(4))) > 5
    np.testing.assert_allclose(call(rngs[0]), outputs[0], atol=1e-6)


def test_a_rng_alone_drops_nothing():
    block, _ = scrambled(lambda: EncoderBlock("scaled", block_config("plain"), rngs=nnx.Rngs(0)))
    plain, with_rng = run_jit(
        lambda x, rng: (block(x), block(x, dropout_rng=rng)), normal(T, DIM), jax.random.key(0)
    )
    np.testing.assert_array_equal(plain, with_rng)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim must be at least 1; got 0"),
        ({"hidden_dim": 0}, "hidden_dim must be at least 1; got 0"),
        ({"num_heads": 0}, "num_heads must be at least 1; got 0"),
        ({"num_key_heads": -1}, "num_key_heads must be at least 1; got -1"),
        ({"num_heads": 5}, "dim must be a multiple of 5 heads; got 12"),
        ({"num_heads": 4, "num_key_heads": 3}, "num_key_heads must divide 4 heads; got 3"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, swiglu; got 'tanh'"),
        ({"norm": "both"}, "norm must be one of pre, post; got 'both'"),
        ({"attention_dropout_rate": 1.0}, r"attention_dropout_rate must be a Python number in"),
        ({"dropout_rate": 1.0}, r"dropout_rate must be a Python number in \[0, 1\); got 1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig(**{"dim": 12, "hidden_dim": 11, **settings})
    assert "\n" not in str(error.value)
