"""Whole answers of the model: the searches of test_decoding.py, without a cache, give the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import scrambled

from attention_jax.nn import Model, ModelConfig, decoding

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
FIRST = [SOS, 5, SOS]  # a first token for each row, as a language model reads after its prompt
ENDS = {"max_length": T, "eos": EOS, "pad": PAD}
SOURCES = np.random.default_rng(4).integers(3, V, size=(B, S)).astype(np.int32)
BEAMS = {"beams": B, "length_penalty": 0.6}


@functools.cache
def searches():
    """Of a bias of EOS: the model's own answers, the same without a cache, and its weights."""
    sizes = {"dim": 8, "hidden_dim": 13, "num_heads": 2}
    config = ModelConfig("decoder", score="additive", positions="rotary", **sizes)
    made, _ = scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)), seed=7, noise=1.0)
    graph, params = nnx.graphdef(made), nnx.to_pure_dict(nnx.state(made))

    @jax.jit
    def both(bias, lengths, rng):
        logits = {**params["logits"], "bias": params["logits"]["bias"].at[EOS].add(bias)}
        model = nnx.merge(graph, {**params, "logits": logits})
        given, first = (SOURCES, lengths), jnp.array(FIRST)

        def step(state, tokens):
            """Reads all tokens so far at once; what stands after them is not PAD, to make sure."""
            source, lengths, read, count = state
            read = read.at[jnp.arange(len(read)), count].set(tokens)
            logits = model(source, lengths, read)
            count = count + 1
            return logits[jnp.arange(len(read)), count - 1], (source, lengths, read, count)

        state = (*given, jnp.full((B, T), 9), jnp.zeros(B, int))
        numbers = {"batch_size": B, "sos": first, **ENDS}
        own = {
            "greedy": model.greedy_decode(*given, **ENDS, sos=first, return_weights=True),
            "beams": model.beam_decode(*given, **ENDS, sos=FIRST, **BEAMS),
            "samples": model.sample_decode(*given, rng, **ENDS, sos=first, temperature=2.0),
        }
        tokens = own["greedy"].tokens
        inputs = jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)
        expected = {
            "greedy": decoding.greedy_search(step, state, **numbers),
            "beams": decoding.beam_search(step, state, **BEAMS, **numbers),
            "samples": decoding.sample_search(step, state, rng, temperature=2.0, **numbers),
        }
        return own, expected, model(*given, inputs, return_weights=True)[1]

    return both


# With the first bias the model never generates EOS; with the second it does in some rows.
@pytest.mark.parametrize("bias", [-9.0, 2.0])
def test_searches_are_those_without_a_cache(bias):
    found = searches()(bias, jnp.array(LENGTHS), jax.random.key(0))
    own, expected, weights = jax.tree.map(np.asarray, found)
    tokens = own["greedy"].tokens
    np.testing.assert_array_equal(tokens, expected["greedy"])
    np.testing.assert_allclose(own["greedy"].weights, weights, atol=1e-5)
    np.testing.assert_array_equal(own["samples"], expected["samples"])
    np.testing.assert_array_equal(own["beams"].tokens, expected["beams"].tokens)
    np.testing.assert_allclose(own["beams"].scores, expected["beams"].scores, rtol=1e-4)
    assert tokens.dtype == np.int32
    assert np.any(own["samples"] != tokens)
    assert np.any(tokens == EOS) == (bias > 0)


def test_arguments_of_other_kinds_are_the_same_arguments():
    """Lists, NumPy numbers, lengths left out, and a PAD that is no token."""
    model = Model(ModelConfig("decoder", dim=8, hidden_dim=0), V, rngs=nnx.Rngs(0))
    source, ends = SOURCES[:, :3], {"max_length": 4, "sos": SOS, "eos": EOS, "pad": -1}
    first = model.greedy_decode(source, **ends).tokens[0, 0]
    ends["eos"] = int(first)  # row 0 ends at once
    others = {name: np.int16(number) for name, number in ends.items()} | {"sos": [SOS] * B}
    calls = {
        "greedy": lambda *given, **ends: model.greedy_decode(*given, return_weights=True, **ends),
        "beams": lambda *given, **ends: model.beam_decode(*given, beams=np.int64(2), **ends),
        "samples": lambda *given, **ends: model.sample_decode(
            *given, jax.random.key(0), temperature=np.float32(1.5), **ends
        ),
        "logits": lambda *given, **ends: model(*given, source),
    }
    for name, call in calls.items():
        expected = call(source, jnp.full(B, 3), **ends)
        for given in ((source.tolist(), None), (jnp.asarray(source), [3] * B)):
            chex.assert_trees_all_equal(call(*given, **others), expected)
        assert np.all(np.isfinite(jax.tree.leaves(expected)[-1])), name
