"""Decoding token by token against teacher forcing, and search against naive loops in Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy_model import run_jit, scrambled

from attention_jax.nn import ModelConfig, Seq2Seq

B, T, S, V = 3, 5, 7, 11
PAD, SOS, EOS = 0, 1, 2
LENGTHS = [4, 7, 1]
NUMBERS = {"max_length": T, "sos": SOS, "eos": EOS, "pad": PAD}


def make(seed=1, noise=0.2, **settings):
    config = ModelConfig(**{"score": "additive", "dim": 8, "hidden_dim": 13, **settings})
    return scrambled(lambda: Seq2Seq(config, V, rngs=nnx.Rngs(0)), seed=seed, noise=noise)[0]


def sources(seed=4):
    return np.random.default_rng(seed).integers(3, V, size=(B, S)).astype(np.int32)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"attention": "global", "encoder_layers": 2, "decoder_layers": 2, "norm": "post"},
            marks=pytest.mark.slow,
        ),
        {"dim": 16, "num_heads": 4, "num_key_heads": 2, "normalize_qk": True},
        {"attention": "local-m", "radius": 1, "encoder_layers": 0},
        {"attention": "local-m", "alignment": "monotonic", "mask_padding": False},
        {"attention": "local-p", "self_attention_score": None, "encoder_layers": 0},
        {"attention": "coverage", "num_heads": 2, "decoder_layers": 2, "norm": "post"}
        | {"encoder_layers": 0},
        {"attention": "monotonic", "activation": "swiglu", "encoder_layers": 0},
    ],
    ids=str,
)
def test_steps_are_teacher_forcing(settings):
    model = make(noise=0.5, **settings)
    inputs = np.random.default_rng(5).integers(1, V, size=(B, T)).astype(np.int32)

    @jax.jit
    def both(source, lengths, inputs):
        def step(state, tokens):
            logits, state = model.decode_step(state, tokens)
            return state, logits

        state = model.start_decoding(source, lengths, max_length=T + 2)
        state, logits = jax.lax.scan(step, state, inputs.T)
        return model(source, lengths, inputs), jnp.swapaxes(logits, 0, 1), state.step

    forced, stepped, count = both(sources(), jnp.array(LENGTHS), inputs)
    assert count == T
    assert stepped.shape == (B, T, V)
    np.testing.assert_allclose(stepped, forced, atol=2e-5)
    # What differs between positions is not only what was said last.
    assert np.min(np.std(np.asarray(forced), axis=1)) > 1e-4


def test_beyond_max_length_there_is_no_number():
    model = make()

    def calls(source, lengths):
        state = model.start_decoding(source, lengths, max_length=1)
        logits, state = model.decode_step(state, jnp.full(B, SOS))
        return logits, model.decode_step(state, jnp.full(B, 3))[0]

    logits, beyond = run_jit(calls, sources(), jnp.array(LENGTHS))
    assert np.all(np.isfinite(logits))
    assert np.all(np.isnan(beyond))


# --- greedy ---


def naive_decode(forward, source, length, max_length):
    """One row, one token at a time, in Python; (tokens, weights [L, max_length, S])."""
    tokens = []
    for step in range(max_length):
        # What stands after the prefix must not matter: not PAD, to make sure.
        inputs = np.array([[SOS, *tokens] + [9] * (max_length - 1 - step)], np.int32)
        logits, weights = map(np.asarray, forward(source[None], jnp.array([length]), inputs))
        tokens.append(int(np.argmax(logits[0, step])))
        if tokens[-1] == EOS:
            break
    return tokens, weights[:, 0, : len(tokens)]


@functools.cache
def functions_of_bias():
    """Greedy decoding and teacher forcing of a model whose logit of EOS has another bias."""
    graph, params = nnx.split(make(seed=7, noise=1.0, decoder_layers=2))

    def model(params, eos_bias):
        model = nnx.merge(graph, params)
        model.logits.bias[...] = model.logits.bias[...].at[EOS].add(eos_bias)
        return model

    @jax.jit
    def greedy(params, eos_bias):
        decode = functools.partial(model(params, eos_bias).greedy_decode, return_weights=True)
        return decode(sources(), jnp.array(LENGTHS), **NUMBERS)

    @jax.jit
    def forward(params, eos_bias, *arguments):
        return model(params, eos_bias)(*arguments, return_weights=True)

    return functools.partial(greedy, params), functools.partial(forward, params)


# With the first bias the model never says EOS; with the second it says EOS in some rows.
@pytest.mark.parametrize("eos_bias", [-9.0, 2.0])
def test_greedy_decode_is_the_naive_loop_for_unequal_lengths(eos_bias):
    greedy, forward = functions_of_bias()
    forward = functools.partial(forward, eos_bias)
    decoded = jax.tree.map(np.asarray, greedy(eos_bias))
    assert decoded.tokens.shape == (B, T)
    assert decoded.tokens.dtype == jnp.int32
    assert decoded.weights.shape == (2, B, T, S)
    np.testing.assert_allclose(np.sum(decoded.weights, -1), np.ones((2, B, T)), atol=1e-6)
    found = set()
    for row in range(B):
        tokens, weights = naive_decode(forward, sources()[row], LENGTHS[row], T)
        np.testing.assert_array_equal(decoded.tokens[row], tokens + [PAD] * (T - len(tokens)))
        np.testing.assert_allclose(decoded.weights[:, row, : len(tokens)], weights, atol=1e-5)
        found.add(len(tokens))
    assert (found == {T}) if eos_bias < 0 else (len(found) > 1)


def test_greedy_decode_stops():
    model = make()
    graph, state = nnx.split(model)
    params = nnx.to_pure_dict(state)

    @jax.jit
    def always(token):
        bias = params["logits"]["bias"].at[token].add(100.0)
        model = nnx.merge(graph, {**params, "logits": {**params["logits"], "bias": bias}})
        return model.greedy_decode(sources(), jnp.array(LENGTHS), **NUMBERS).tokens

    np.testing.assert_array_equal(always(EOS), [[EOS, PAD, PAD, PAD, PAD]] * B)
    np.testing.assert_array_equal(always(7), [[7] * T] * B)


def test_weights_of_an_answer_are_those_of_teacher_forcing():
    model = make(attention="coverage", decoder_layers=2, encoder_layers=0)
    tokens = np.array([[3, 4, EOS, PAD], [5, 5, 6, 7], [EOS, PAD, PAD, PAD]], np.int32)
    inputs = np.array([[SOS, 3, 4, EOS], [SOS, 5, 5, 6], [SOS, EOS, PAD, PAD]], np.int32)
    source, lengths = sources(), jnp.array(LENGTHS)

    def both(source, lengths):
        _, expected = model(source, lengths, inputs, return_weights=True)
        return model.weights_of(source, lengths, tokens, sos=SOS), expected

    weights, expected = run_jit(both, source, lengths)
    assert weights.shape == (2, B, 4, S)
    np.testing.assert_allclose(weights, expected, atol=1e-6)


# --- a beam ---


def log_probability(forward, row, tokens):
    """Of one answer, EOS included, by teacher forcing in float64."""
    inputs = np.array([[SOS, *tokens[:-1]] + [9] * (T - len(tokens))], np.int32)
    logits = np.asarray(forward(sources()[row][None], jnp.array(LENGTHS[row : row + 1]), inputs))
    logits = logits[0, : len(tokens)].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p[np.arange(len(tokens)), tokens].sum()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            {"num_heads": 4, "num_key_heads": 2, "decoder_layers": 2}, marks=pytest.mark.slow
        ),
        {"attention": "coverage"},
    ],
    ids=str,
)
def test_beams(settings):
    model = make(seed=7, noise=0.7, **settings)
    model.logits.bias[...] = model.logits.bias[...].at[EOS].add(1.0)
    source, lengths = sources(), jnp.array(LENGTHS)

    @functools.partial(jax.jit, static_argnums=0)
    def search(beams, source, lengths):
        return model.beam_decode(source, lengths, beams=beams, **NUMBERS)

    greedy = run_jit(functools.partial(model.greedy_decode, **NUMBERS), source, lengths)
    np.testing.assert_array_equal(search(1, source, lengths).tokens[:, 0], greedy.tokens)
    found = jax.tree.map(np.asarray, search(3, source, lengths))
    forward = jax.jit(model)
    for row in range(B):
        answers = set()
        for beam in range(3):
            tokens = found.tokens[row, beam, : int(found.lengths[row, beam])].tolist()
            assert tokens[-1] == EOS or len(tokens) == T
            expected = log_probability(forward, row, tokens)
            assert found.log_probabilities[row, beam] == pytest.approx(expected, abs=1e-4)
            answers.add(tuple(tokens))
        assert len(answers) == 3
        said = greedy.tokens[row].tolist()
        said = said[: said.index(EOS) + 1] if EOS in said else said
        # Here the beam is worth it: never worse than greedy.
        assert found.log_probabilities[row, 0] >= log_probability(forward, row, said) - 1e-4
    assert np.all(np.diff(found.scores, axis=1) <= 0)


def test_length_penalty_is_passed_on():
    model = make(seed=7, noise=0.7, encoder_layers=0, decoder_self_attention=False)
    options = {"beams": 2, "length_penalty": 0.6, **NUMBERS}
    search = functools.partial(model.beam_decode, **options)
    found = run_jit(search, sources(), jnp.array(LENGTHS))
    expected = found.log_probabilities / ((5 + found.lengths) / 6) ** 0.6
    np.testing.assert_allclose(found.scores, expected, rtol=1e-5)
