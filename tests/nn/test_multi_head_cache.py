"""Self attention token by token, and in chunks, against one call with all tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_cases import agree
from flax import nnx
from mistakes import refused
from numpy_model import scrambled, weights_of
from oracles import normal

from attention_jax import alibi_bias, alibi_slopes, causal_mask, local_mask, padding_mask
from attention_jax.nn import MultiHeadAttention

B, T, ROOM, DIM, OUT = 2, 5, 7, 11, 13
N, K, D = 6, 2, 4
LENGTHS = [3, 5]
TABLE = np.random.default_rng(3).random((B, ROOM, ROOM)) < 0.8
TABLE[:, 2, :] = False  # a query that may attend to nothing
STORED = normal(1, N, ROOM, ROOM, seed=4)


def make(score, **options):
    options = {"num_heads": N, "num_key_heads": K, "qkv_dim": N * D, "output_dim": OUT} | options
    return scrambled(lambda: MultiHeadAttention(score, DIM, **options, rngs=nnx.Rngs(0)))


def pairs(length):
    """Mask and bias of a call with this many tokens."""
    mask = padding_mask(jnp.array(LENGTHS)) & local_mask(2, None) & TABLE[:, :length, :length]
    return {
        "mask": mask,
        "bias": alibi_bias(alibi_slopes(N)) + jnp.asarray(STORED[..., :length, :length]),
    }


def in_chunks(module, x, sizes):
    @jax.jit
    def extend(x):
        cache, outputs, start = module.empty_cache((B,), ROOM), [], 0
        for size in sizes:
            output, cache = module.extend(x[:, start : start + size], cache)
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


def test_token_by_token_is_one_call_with_all():
    """And so is the gradient; a function of the output has the value of the query's own token."""
    options = {"rotary_wavelength": 50.0, "normalize_qk": True}
    module, _ = make("general", output_mod=lambda output, value: output * value, **options)
    definition, params = nnx.split(module)
    cotangent = normal(B, T, OUT, seed=8)

    def with_one_call(module, x):
        return module(x, mask=pairs(T)["mask"] & causal_mask(), bias=pairs(T)["bias"])

    @jax.jit
    def both(params, x):
        def loss(params, x, attend):
            output = attend(nnx.merge(definition, params), x)
            return jnp.vdot(output, cotangent), output

        with_cache = functools.partial(token_by_token, **pairs(ROOM))
        gradient = jax.grad(loss, argnums=(0, 1), has_aux=True)
        return [gradient(params, x, attend) for attend in (with_cache, with_one_call)]

    found, expected = both(params, normal(B, T, DIM))
    agree(found, expected, 1e-5)
    np.testing.assert_array_equal(found[1][:, 2], 0)  # nothing to attend to


def test_rows_of_unequal_lengths():
    """Each row continues where its own tokens end, and its padding is forgotten."""
    module, _ = make("general", rotary_wavelength=50.0)
    prompts, new, lengths = normal(B, 3, DIM), normal(B, ROOM - 3, DIM, seed=5), [1, 3]

    @jax.jit
    def steps(x, more, lengths):
        _, cache = module.extend(x, module.empty_cache((B,), ROOM), **pairs(ROOM))
        first, cache = module.extend(more[:, :1], cache._replace(length=lengths), **pairs(ROOM))
        second, cache = module.extend(more[:, 1:], cache, **pairs(ROOM))
        beyond, _ = module.extend(more[:, :2], cache, **pairs(ROOM))
        return jnp.concatenate([first, second], axis=1), beyond, cache.length

    @jax.jit
    def at_once(x):
        options = pairs(ROOM)
        return module(x, mask=options["mask"] & causal_mask(), bias=options["bias"])

    output, beyond, length = steps(prompts, new, jnp.array(lengths))
    assert length.tolist() == [1 + ROOM - 3, ROOM]
    for row, own in enumerate(lengths):
        tokens = np.concatenate([prompts[row, :own], new[row]])
        padded = np.zeros((B, ROOM, DIM), np.float32)
        padded[row, : len(tokens)] = tokens
        np.testing.assert_allclose(output[row], at_once(padded)[row, own : len(tokens)], atol=2e-5)
    np.testing.assert_array_equal(np.isnan(beyond).all(axis=(1, 2)), [False, True])
    assert np.all(np.isfinite(beyond[0]))
    for wrong in ([1, 2, 3], [[1, 3]]):
        cache = module.empty_cache((B,), ROOM)._replace(length=jnp.array(wrong))
        refused("cache.length must be", functools.partial(module.extend, prompts, cache))


@pytest.mark.parametrize("score", ["scaled", "l2"])
@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 1e-2), ("float8_e4m3fn", 0.15)])
def test_a_cache_has_the_dtype_that_was_asked_for(score, dtype, close):
    """The output is that of float64 attention to keys and values that are rounded to it."""
    module, params = make(score)
    x = normal(B, T, DIM)

    @jax.jit
    def both(x):
        _, cache = module.extend(x[:, :3], module.empty_cache((B,), ROOM, dtype))
        output, cache = module.extend(x[:, 3:], cache)
        return output, cache, jnp.swapaxes(module.query(x), 1, 2), module.key(x), module.value(x)

    output, cache, queries, *memory = jax.tree.map(np.asarray, both(x))
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.memory)} == {jnp.dtype(dtype)}
    assert output.dtype == np.float32

    def by_hand(*memory):
        keys, values = (np.repeat(np.swapaxes(x, 1, 2), N // K, axis=1) for x in memory)
        weights = weights_of(score, {}, queries[:, :, 3:], keys, np.tri(T, dtype=bool)[3:])
        return np.einsum("bnth,nhd->btd", weights @ values, params["output"]["kernel"])

    rounded = [x.astype(dtype).astype(np.float64) for x in memory]
    exact = by_hand(*(x.astype(np.float64) for x in memory))
    np.testing.assert_allclose(output, by_hand(*rounded), atol=2e-6 * np.max(np.abs(exact)))
    assert 1e-3 < np.max(np.abs(output - exact)) / np.max(np.abs(exact)) < close


def test_an_offset_of_all_tokens_costs_no_digits():
    """A bias that all queries and keys share changes no distance."""
    module, _ = make("l2", use_bias=True)

    def outputs(offset, attend):
        for side in (module.query, module.key):
            side.bias[...] = jnp.full_like(side.bias[...], offset)
        return attend(module, normal(B, T, DIM))

    at_once = outputs(0.0, lambda module, x: jax.jit(module)(x, mask=causal_mask()))
    step_by_step = outputs(100.0, lambda module, x: jax.jit(token_by_token)(module, x))
    np.testing.assert_allclose(step_by_step, at_once, atol=1e-4 * np.max(np.abs(at_once)))


def test_a_chunk_is_one_call_and_beyond_the_room_there_is_no_number():
    module, _ = make("dot")
    tokens = normal(B, ROOM + 2, DIM)
    output, cache = in_chunks(module, tokens, [2, ROOM - 3, 2, 1])
    at_once = jax.jit(module)(tokens, mask=causal_mask())
    np.testing.assert_allclose(output[:, : ROOM - 1], at_once[:, : ROOM - 1], atol=2e-5)
    assert np.all(np.isnan(output[:, ROOM - 1 :]))  # a part of the third chunk would fit
    assert int(cache.length) == ROOM + 2
