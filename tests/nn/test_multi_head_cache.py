"""Self attention token by token, and in chunks, against one call with all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import multi_head, normal, scrambled
from score_cases import CORE_SCORES

from attention_jax import (
    SCORES,
    alibi_bias,
    alibi_slopes,
    causal_mask,
    local_mask,
    padding_mask,
)
from attention_jax.nn import MultiHeadAttention
from attention_jax.pairwise.biases import as_bias

B, T, ROOM, DIM, OUT = 2, 5, 7, 11, 13
N, K, D = 6, 2, 4
LENGTHS = [3, 5]
TABLE = np.random.default_rng(3).random((B, ROOM, ROOM)) < 0.8
TABLE[:, 2, :] = False  # a query that may attend to nothing
STORED = normal(N, ROOM, ROOM, seed=4)


def make(score, **options):
    options = {"num_heads": N, "num_key_heads": K, "qkv_dim": N * D, "output_dim": OUT} | options
    return scrambled(lambda: MultiHeadAttention(score, DIM, **options, rngs=nnx.Rngs(0)))


def pairs(length):
    """Mask and bias of a call with this many tokens."""
    mask = padding_mask(jnp.array(LENGTHS)) & local_mask(2, None) & TABLE[:, :length, :length]
    return {
        "mask": mask,
        "bias": alibi_bias(alibi_slopes(N)) + jnp.asarray(STORED[:, :length, :length]),
    }


def in_chunks(module, x, sizes, **options):
    @jax.jit
    def extend(x):
        cache, outputs, start = module.empty_cache((B,), ROOM), [], 0
        for size in sizes:
            output, cache = module.extend(x[:, start : start + size], cache, **options)
            outputs.append(output)
            start += size
        return jnp.concatenate(outputs, axis=1), cache

    return extend(x)


def token_by_token(module, x, **options):
    def step(cache, token):
        output, cache = module.extend(token[:, None], cache, **options)
        return cache, output[:, 0]

    _, outputs = jax.lax.scan(step, module.empty_cache((B,), ROOM), jnp.swapaxes(x, 0, 1))
    return jnp.swapaxes(outputs, 0, 1)


CACHED_SCORES = {"additive": K, "cosine": N, "distance": K, "dot": N}  # the others are slow


@pytest.mark.parametrize(
    ("score", "num_key_heads"),
    [
        pytest.param(
            score,
            number,
            marks=[] if CACHED_SCORES.get(score) == number else [pytest.mark.slow],
        )
        for score in sorted(SCORES.keys() & CORE_SCORES)
        for number in (N, K)
    ],
)
def test_token_by_token_is_one_call_with_all(score, num_key_heads):
    options = {"rotary_wavelength": 50.0, "normalize_qk": True} if num_key_heads == K else {}
    module, _ = make(score, num_key_heads=num_key_heads, **options)
    x = normal(B, T, DIM)

    @jax.jit
    def both(x):
        given = pairs(T)
        whole = module(x, mask=given["mask"] & causal_mask(), bias=given["bias"])
        return whole, token_by_token(module, x, **pairs(ROOM))

    whole, steps = both(x)
    assert whole.shape == (B, T, OUT)
    np.testing.assert_allclose(steps, whole, atol=2e-6 * np.max(np.abs(whole)))
    np.testing.assert_array_equal(steps[:, 2], 0)
    assert np.all(np.any(np.asarray(steps)[:, [0, 1, 3, 4]] != 0, axis=-1)[1])


def test_gradients_through_the_cache_are_those_of_one_call():
    module, _ = make("additive", num_key_heads=K)
    definition, params = nnx.split(module)
    cotangent = normal(B, T, OUT, seed=8)

    def with_one_call(module, x):
        return module(x, mask=pairs(T)["mask"] & causal_mask(), bias=pairs(T)["bias"])

    @jax.jit
    def both(params, x):
        def loss(attend, params, x):
            return jnp.vdot(attend(nnx.merge(definition, params), x), cotangent)

        with_cache = functools.partial(token_by_token, **pairs(ROOM))
        return [
            jax.grad(functools.partial(loss, attend), argnums=(0, 1))(params, x)
            for attend in (with_cache, with_one_call)
        ]

    gradients, expected = map(jax.tree.leaves, both(params, normal(B, T, DIM)))
    assert len(gradients) == len(expected) > 5
    for gradient, leaf in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, leaf, atol=1e-5 * np.max(np.abs(leaf)))
        assert np.any(leaf)


def test_chunks_are_the_formula():
    module, params = make("additive", rotary_wavelength=50.0, normalize_qk=True)
    x = normal(B, T, DIM)
    distances = np.arange(T)[None, :] - np.arange(T)[:, None]
    slopes = np.array([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    bias = STORED[:, :T, :T] - slopes[:, None, None] * np.abs(distances)
    for sizes in ([2, 3], [4, 1]):
        output, cache = in_chunks(module, x, sizes, **pairs(ROOM))
        assert int(cache.length) == T
        for row, length in enumerate(LENGTHS):
            allowed = (np.arange(T) < length) & (distances <= 0) & (distances >= -2)
            allowed = allowed & TABLE[row, :T, :T]
            wide = x[row].astype(np.float64)
            expected, _ = multi_head("additive", params, wide, wide, allowed, bias, wavelength=50.0)
            np.testing.assert_allclose(output[row], expected, atol=2e-5)


def test_beyond_the_room_there_is_no_number():
    module, _ = make("dot")
    x = normal(B, ROOM + 2, DIM)
    output, cache = in_chunks(module, x, [ROOM, 1, 1])
    whole = jax.jit(lambda x: module(x, mask=causal_mask()))(x[:, :ROOM])
    np.testing.assert_allclose(output[:, :ROOM], whole, atol=1e-5)
    assert np.all(np.isnan(output[:, ROOM:]))
    assert int(cache.length) == ROOM + 2
    output, _ = in_chunks(module, x, [ROOM - 1, 2])  # a part of it would fit
    assert np.all(np.isnan(output[:, ROOM - 1 :]))
    assert np.all(np.isfinite(output[:, : ROOM - 1]))


def test_what_is_refused():
    module, _ = make("dot")
    cache = module.empty_cache((B,), ROOM)
    short = module.empty_cache((B,), 2)
    with pytest.raises(ValueError, match="x must have at most 2 tokens"):
        module.extend(normal(B, 3, DIM), short)
    with pytest.raises(ValueError, match=r"x must be \[\*B, length, 11\]; got \[2, 1, 13\]"):
        module.extend(normal(B, 1, OUT), cache)
    token = normal(B, 1, DIM)
    with pytest.raises(ValueError, match=r"mask must broadcast to \[2, 6, 7, 7\] .*; got"):
        module.extend(token, cache, mask=jnp.ones((T, T), bool))
    with pytest.raises(ValueError, match=r"bias must broadcast to \[2, 6, 7, 7\] .*; got"):
        module.extend(token, cache, bias=as_bias(normal(K, ROOM, ROOM)))
