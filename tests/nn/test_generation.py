"""Whole answers of the model against naive loops in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import scrambled

from attention_jax.nn import Model, ModelConfig

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
FIRST = [SOS, 5, SOS]  # a first token for each row, as a language model reads after its prompt
ENDS = {"max_length": T, "eos": EOS, "pad": PAD}
SOURCES = np.random.default_rng(4).integers(3, V, size=(B, S)).astype(np.int32)


@functools.cache
def functions():
    """Searches with another bias of EOS, and the logits and weights of a prefix."""
    sizes = {"dim": 8, "hidden_dim": 13, "num_heads": 2}
    config = ModelConfig("decoder", score="additive", positions="rotary", **sizes)
    made, _ = scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)), seed=7, noise=1.0)
    graph, params = nnx.graphdef(made), nnx.to_pure_dict(nnx.state(made))

    def model(bias):
        logits = {**params["logits"], "bias": params["logits"]["bias"].at[EOS].add(bias)}
        return nnx.merge(graph, {**params, "logits": logits})

    @jax.jit
    def searches(bias, source, lengths, rng):
        given, own = (source, lengths), model(bias)
        return {
            "greedy": own.greedy_decode(*given, **ENDS, sos=jnp.array(FIRST), return_weights=True),
            "beams": own.beam_decode(*given, **ENDS, sos=FIRST, beams=B, length_penalty=0.6),
            "samples": own.sample_decode(*given, rng, **ENDS, sos=SOS, temperature=2.0),
        }

    @jax.jit
    def forward(bias, source, lengths, inputs):
        return model(bias)(source, lengths, inputs, return_weights=True)

    return searches, forward


def log_probabilities(forward, row, tokens, first=SOS):
    """[len(tokens) + 1 or T, V] of each next token, and the weights, without a cache."""
    inputs = [first, *tokens][:T]
    # What stands after the prefix must not matter: not PAD, to make sure.
    padded = np.array([inputs + [9] * (T - len(inputs))], np.int32)
    length = jnp.array(LENGTHS[row : row + 1])
    logits, weights = forward(SOURCES[row : row + 1], length, padded)
    return np.float64(jax.nn.log_softmax(logits[0])), np.asarray(weights)[:, 0]


# With the first bias the model never generates EOS; with the second it does in some rows.
@pytest.mark.parametrize("bias", [-9.0, 2.0])
def test_searches_are_naive_loops(bias):
    searches, forward = functions()
    forward = functools.partial(forward, bias)
    found = jax.tree.map(np.asarray, searches(bias, SOURCES, jnp.array(LENGTHS), jax.random.key(0)))
    tokens, weights = found["greedy"]
    assert (tokens.dtype, weights.shape[1:]) == (np.int32, (B, T, S))
    answers = []
    for row in range(B):
        next_tokens = functools.partial(log_probabilities, forward, row, first=FIRST[row])
        answer = []
        while len(answer) < T and EOS not in answer:
            answer.append(int(np.argmax(next_tokens(answer)[0][len(answer)])))
        answers.append(answer)
        np.testing.assert_array_equal(tokens[row], answer + [PAD] * (T - len(answer)))
        expected = next_tokens(answer)[1][:, : len(answer)]
        np.testing.assert_allclose(weights[:, row, : len(answer)], expected, atol=1e-5)
        beams = jax.tree.map(lambda field, row=row: field[row], found["beams"])
        kept = set()
        for hypothesis, score, log, length in zip(*beams, strict=True):
            answer = hypothesis[:length].tolist()
            assert answer[-1] == EOS or length == T
            log_p = log_probabilities(forward, row, answer, FIRST[row])[0]
            assert log == pytest.approx(log_p[np.arange(length), answer].sum(), abs=2e-4)
            assert score == pytest.approx(log / ((5 + length) / 6) ** 0.6, abs=1e-4)
            kept.add(tuple(answer))
        assert len(kept) == 3
        sample = found["samples"][row].tolist()
        assert set(sample[sample.index(EOS) + 1 :] if EOS in sample else []) <= {PAD}
    if bias < 0:
        assert {len(answer) for answer in answers} == {T}
        assert np.any(found["samples"] != tokens)


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
            jax.tree.map(np.testing.assert_array_equal, call(*given, **others), expected)
        assert np.all(np.isfinite(jax.tree.leaves(expected)[-1])), name
