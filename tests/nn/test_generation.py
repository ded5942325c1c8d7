"""Whole answers of the model against naive loops in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit, scrambled

from attention_jax.nn import ANY_LENGTH, Model, ModelConfig

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
NUMBERS = {"max_length": T, "sos": SOS, "eos": EOS, "pad": PAD}
SOURCES = np.random.default_rng(4).integers(3, V, size=(B, S)).astype(np.int32)
MODELS = {
    "coverage": {"attention": "coverage", "decoder_layers": 2},
    "any length": {**ANY_LENGTH, "encoder_layers": 0, "decoder_self_attention": False,
                   "normalizer": "log_scaled(start=3)", "dim": 12},
    "decoder": {"architecture": "decoder", "positions": "rotary", "num_heads": 2},
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)


@functools.cache
def functions(name):
    """Searches with another bias of EOS, and the logits and weights of a prefix."""
    config = ModelConfig(**{"score": "additive", "dim": 8, "hidden_dim": 13, **MODELS[name]})
    made, _ = scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)), seed=7, noise=1.0)
    graph, params = nnx.graphdef(made), nnx.to_pure_dict(nnx.state(made))

    def model(bias):
        logits = {**params["logits"], "bias": params["logits"]["bias"].at[EOS].add(bias)}
        return nnx.merge(graph, {**params, "logits": logits})

    @jax.jit
    def searches(bias, source, lengths, rng):
        given, own = (source, lengths), model(bias)
        return {
            "greedy": own.greedy_decode(*given, **NUMBERS, return_weights=True),
            "one beam": own.beam_decode(*given, **NUMBERS, beams=1),
            "beams": own.beam_decode(*given, **NUMBERS, beams=3, length_penalty=0.6),
            "samples": own.sample_decode(*given, rng, **NUMBERS, temperature=2.0),
            "cold": own.sample_decode(*given, rng, **NUMBERS, temperature=1e-4),
        }

    @jax.jit
    def forward(bias, source, lengths, inputs):
        return model(bias)(source, lengths, inputs, return_weights=True)

    return searches, forward


def log_probabilities(forward, row, tokens):
    """[len(tokens) + 1 or T, V] of each next token, and the weights, without a cache."""
    inputs = [SOS, *tokens][:T]
    # What stands after the prefix must not matter: not PAD, to make sure.
    padded = np.array([inputs + [9] * (T - len(inputs))], np.int32)
    length = jnp.array(LENGTHS[row : row + 1])
    logits, weights = forward(SOURCES[row : row + 1], length, padded)
    return np.float64(jax.nn.log_softmax(logits[0])), np.asarray(weights)[:, 0]


# With the first bias the model never generates EOS; with the second it does in some rows.
@pytest.mark.parametrize("bias", [-9.0, 2.0])
@every_model
def test_searches_are_naive_loops(name, bias):
    searches, forward = functions(name)
    forward = functools.partial(forward, bias)
    found = jax.tree.map(np.asarray, searches(bias, SOURCES, jnp.array(LENGTHS), jax.random.key(0)))
    tokens, weights = found["greedy"]
    assert (tokens.dtype, weights.shape[1:]) == (np.int32, (B, T, S))
    np.testing.assert_array_equal(found["one beam"].tokens[:, 0], tokens)
    np.testing.assert_array_equal(found["cold"], tokens)
    answers = []
    for row in range(B):
        answer = []
        while len(answer) < T and EOS not in answer:
            answer.append(int(np.argmax(log_probabilities(forward, row, answer)[0][len(answer)])))
        answers.append(answer)
        np.testing.assert_array_equal(tokens[row], answer + [PAD] * (T - len(answer)))
        log_p, expected = log_probabilities(forward, row, answer)
        np.testing.assert_allclose(
            weights[:, row, : len(answer)], expected[:, : len(answer)], atol=1e-5
        )
        beams = found["beams"]
        kept = set()
        for tokens_of, length, score, log in zip(
            beams.tokens[row], beams.lengths[row], beams.scores[row], beams.log_probabilities[row],
            strict=True,
        ):  # fmt: skip
            answer = tokens_of[:length].tolist()
            assert answer[-1] == EOS or length == T
            log_p = log_probabilities(forward, row, answer)[0]
            assert log == pytest.approx(log_p[np.arange(length), answer].sum(), abs=2e-4)
            assert score == pytest.approx(log / ((5 + length) / 6) ** 0.6, abs=1e-4)
            kept.add(tuple(answer))
        assert len(kept) == 3
        sample = found["samples"][row].tolist()
        assert set(sample[sample.index(EOS) + 1 :] if EOS in sample else []) <= {PAD}
    if bias < 0:
        assert {len(answer) for answer in answers} == {T}
        assert np.any(found["samples"] != tokens)


def test_a_prompt_of_a_language_model():
    """Its last token, one for each row, is the first that the loop reads."""
    config = ModelConfig("decoder", score="additive", dim=8, hidden_dim=13)
    model, _ = scrambled(lambda: Model(config, V, rngs=nnx.Rngs(0)), noise=1.0)
    ends, lengths = {"max_length": 3, "eos": EOS, "pad": PAD}, jnp.array([3, 3, 3])

    def both(prompt):
        decoded = model.greedy_decode(
            prompt[:, :3], lengths, sos=prompt[:, 3], **ends, return_weights=True
        )
        return decoded, model(None, None, prompt)[:, -1]

    (tokens, weights), logits = run_jit(both, jnp.asarray(SOURCES[:, :4]))
    np.testing.assert_array_equal(tokens[:, 0], np.argmax(logits, axis=-1))
    assert weights.shape == (1, B, 3, 3)
