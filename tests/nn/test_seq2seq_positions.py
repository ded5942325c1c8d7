"""The model with every kind of positions against float64 NumPy; random ids; sharper logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_model import run_jit
from numpy_seq2seq import (
    BARE,
    EOS,
    GAPS,
    LENGTHS,
    NUMBERS,
    PAD,
    SOS,
    B,
    S,
    T,
    make,
    numpy_seq2seq,
    settings,
    sources,
    targets,
)

from attention_jax.nn.config import ANY_LENGTH, ModelConfig

# --- all at once, and one token after another ---


@functools.cache
def answers(config, ids=None):
    """Parameters; teacher forcing's logits and weights, stepped logits; these at other padding."""
    model, params = make(config)
    given = None if ids is None else jnp.array(ids)

    @jax.jit
    def run(source, lengths, inputs, given):
        def step(state, tokens):
            logits, state = model.decode_step(state, tokens)
            return state, logits

        forced = model(source, lengths, inputs, position_ids=given, return_weights=True)
        state = model.start_decoding(source, lengths, max_length=T + 1, position_ids=given)
        _, stepped = jax.lax.scan(step, state, inputs.T)
        return *forced, jnp.swapaxes(stepped, 0, 1)

    real = np.arange(S)[None, :] < np.array(LENGTHS)[:, None]
    lengths = jnp.array(LENGTHS)
    padded = [
        run(np.where(real, sources(), junk).astype(np.int32), lengths, targets(), given)
        for junk in (PAD, 9)
    ]
    return params, *jax.tree.map(np.asarray, padded)


def growing(start):
    return f"log_scaled(start={start})"


CASES = [
    (settings("sinusoidal", "end"), None),
    (settings("sinusoidal", "both", "window", num_heads=2), None),
    (settings("sinusoidal", "both", "subset", normalizer=growing(5), **BARE), GAPS),
    (settings("learned", "start", decoder_self_attention=False), GAPS),
    (settings("learned", "both", "subset", self_attention_score="general"), None),
    (settings("learned", "end", norm="post", encoder_layers=0), GAPS),
    (settings("rotary", "start", normalizer=growing(2)), None),
    (settings("rotary", "end", "window", score="general"), None),
    (settings("rotary", "both", num_heads=2, decoder_layers=2), None),
    (settings("rotary", "both", score="scaled", decoder_self_attention=False), GAPS),
    (settings("rotary", "end", num_heads=2, score="scaled", **BARE), GAPS),
    (settings("none", "both", normalizer=growing(1), **BARE), None),
]  # fmt: skip
SLOW_CASES = (2, 4, 7, 9)  # combinations of settings that other cases have one by one
every_case = pytest.mark.parametrize(
    ("config", "ids"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if index in SLOW_CASES else [])
        for index, case in enumerate(CASES)
    ],
    ids=lambda case: getattr(case, "label", None),
)


@every_case
def test_is_the_formula(config, ids):
    params, (logits, weights, _), _ = answers(config, ids)
    if ids is None:  # limit // 8 is 2
        ids = range(0 if config.position_draw == "none" else 2, 17)
    for row in range(B):
        expected_logits, expected_weights = numpy_seq2seq(
            config, params, sources()[row], LENGTHS[row], targets()[row], ids
        )
        np.testing.assert_allclose(logits[row], expected_logits, atol=5e-5)
        np.testing.assert_allclose(weights[-1, row], expected_weights, atol=2e-5)


@every_case
def test_steps_are_teacher_forcing(config, ids):
    _, (forced, _, stepped), _ = answers(config, ids)
    np.testing.assert_allclose(stepped, forced, atol=5e-5)
    assert np.min(np.std(np.asarray(forced), axis=1)) > 1e-4


@every_case
def test_padding_is_invisible(config, ids):
    _, one, other = answers(config, ids)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        pytest.param(settings("rotary"), GAPS, id="gaps"),
        # No dot product: more than the distance matters.
        pytest.param(
            settings("rotary", draw="window", self_attention_score=None), None, id="additive"
        ),
    ],
)
def test_steps_rotate_in_self_attention_as_teacher_forcing_does(config, ids):
    test_steps_are_teacher_forcing(config, ids)


def test_too_few_position_ids():
    model, _ = make(settings())
    with pytest.raises(ValueError, match=r"position_ids must be \[P\], P at least 7 .*; got \[6\]"):
        model(sources(), jnp.array(LENGTHS), targets(), position_ids=jnp.arange(6))


def test_a_wider_batch_counts_the_same_ends():
    config, _ = CASES[0]
    model, _ = make(config)
    wider = np.pad(sources(), ((0, 0), (0, 4)), constant_values=8)
    found = jax.jit(model)(wider, jnp.array(LENGTHS), targets())
    np.testing.assert_allclose(found, answers(config)[1][0], atol=2e-5)


# --- counted from the end ---


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary"])
@pytest.mark.parametrize("anchor", ["end", "start"])
def test_letters_in_front_leave_those_behind_as_they_were(kind, anchor):
    """Weights among the letters that stay keep their proportions: their logits are the same."""
    model, _ = make(settings(kind, anchor, **BARE), noise=1.0)
    short = sources()[:1, :5]
    long = np.concatenate([np.array([[3, 8]], np.int32), short], axis=1)

    def calls(short, long, inputs):
        return [
            model(source, jnp.array([source.shape[1]]), inputs, return_weights=True)[1]
            for source in (short, long)
        ]

    before, after = run_jit(calls, short, long, targets()[:1])
    kept = np.asarray(after, np.float64)[0, 0, :, 2:]
    assert np.all(kept.sum(-1) < 0.999)  # the letters in front are seen
    proportions = kept / kept.sum(-1, keepdims=True)
    error = np.max(np.abs(proportions - np.asarray(before[0, 0])))
    assert error < 1e-5 if anchor == "end" else error > 1e-2


# --- a decoder without self attention ---


def test_without_self_attention_an_output_knows_its_own_token_alone():
    model, params = make(settings("sinusoidal", "end", decoder_self_attention=False))
    assert set(params["decoder"][0]) == {
        "cross_attention", "cross_residual", "feed_forward", "feed_forward_residual",
    }  # fmt: skip
    forward = jax.jit(model)
    source, lengths = sources(), jnp.array(LENGTHS)
    plain = np.asarray(forward(source, lengths, targets()))
    for t in range(T):
        inputs = targets()
        inputs[:, t] = SOS
        changed = np.asarray(forward(source, lengths, inputs)) - plain
        changed = np.max(np.abs(changed), axis=(0, 2))
        assert changed[t] > 1e-3
        np.testing.assert_array_equal(np.delete(changed, t), 0)


# --- drawn positions ---


@pytest.mark.parametrize("kind", ["sinusoidal", "learned", "rotary"])
def test_positions_are_drawn_where_there_is_an_rng(kind):
    config = settings(kind, "end", "window", **BARE)  # no dropout: nothing else is random
    model, params = make(config)
    arguments = (sources(), jnp.array(LENGTHS), targets())

    @jax.jit
    def both(rng):
        return model(*arguments, dropout_rng=rng), model(*arguments)

    (first, without), (second, _) = (map(np.asarray, both(jax.random.key(s))) for s in (0, 1))
    assert np.max(np.abs(first - second)) > 1e-2
    for drawn in (first, second):
        assert np.max(np.abs(drawn - without)) > 1e-2
    # Without: 17 // 8 and on, of source and target alike.
    for row in range(B):
        expected, _ = numpy_seq2seq(
            config, params, sources()[row], LENGTHS[row], targets()[row], range(2, 17)
        )
        np.testing.assert_allclose(without[row], expected, atol=5e-5)


def test_source_and_target_are_drawn_together():
    """A subset of 7 in 8 leaves one out: all rows must be the model at the same of these."""
    model, _ = make(settings("sinusoidal", "end", "subset", position_limit=8, **BARE))
    arguments = (sources(), jnp.array(LENGTHS), targets())
    forward = jax.jit(lambda rng: model(*arguments, dropout_rng=rng))
    at = jax.jit(lambda ids: model(*arguments, position_ids=ids))
    subsets = np.array([[i for i in range(8) if i != left_out] for left_out in range(8)])
    possible = np.stack([at(jnp.asarray(ids)) for ids in subsets])
    found = set()
    for seed in range(7):
        error = np.abs(possible - np.asarray(forward(jax.random.key(seed)))).max(axis=(1, 2, 3))
        assert np.sort(error)[0] < 2e-5 < 1e-3 < np.sort(error)[1]
        found.add(int(np.argmin(error)))
    assert len(found) > 2


def test_the_default_ids_may_be_given():
    model, _ = make(settings("learned", "both", "window"))
    arguments = (sources(), jnp.array(LENGTHS), targets())

    @jax.jit
    def both(ids):
        return model(*arguments, position_ids=ids), model(*arguments)

    (given, by_default), (shifted, _) = (
        map(np.asarray, both(jnp.arange(first, first + 7))) for first in (2, 3)
    )
    np.testing.assert_allclose(given, by_default, atol=1e-5)
    assert np.max(np.abs(given - shifted)) > 1e-2


def test_a_table_that_is_too_short():
    model, _ = make(settings("learned", position_limit=S))
    jax.eval_shape(model, sources(), jnp.array(LENGTHS), targets())  # just long enough
    with pytest.raises(ValueError, match=rf"hold {S + 1} tokens, .*; {S} holds {S}"):
        model.start_decoding(sources(), jnp.array(LENGTHS), max_length=S + 1)


# --- sharpened logits ---


def test_logits_are_sharpened_beyond_a_length():
    """The others' weights, taken to the power of the factor; the same parameters in both."""
    plain, _ = make(settings("sinusoidal", "end", **BARE))
    sharp, _ = make(settings("sinusoidal", "end", normalizer=growing(5), **BARE))
    arguments = (sources(), jnp.array(LENGTHS), targets())
    (logits, weights), (sharp_logits, sharp_weights) = run_jit(
        lambda *arguments: [model(*arguments, return_weights=True) for model in (plain, sharp)],
        *arguments,
    )
    for row, length in enumerate(LENGTHS):
        if length <= 5:
            np.testing.assert_allclose(sharp_weights[:, row], weights[:, row], atol=1e-6)
            np.testing.assert_allclose(sharp_logits[row], logits[row], atol=1e-5)
            continue
        factor = np.log(8) / np.log(6)  # of a source of 7
        powers = np.asarray(weights[0, row], np.float64) ** factor
        expected = powers / powers.sum(-1, keepdims=True)
        np.testing.assert_allclose(sharp_weights[0, row], expected, atol=1e-5)
        assert np.max(np.abs(expected - weights[0, row])) > 1e-2


# --- search ---


def naive_greedy(forward, row, length):
    tokens = []
    for step in range(T):
        inputs = np.array([[SOS, *tokens] + [9] * (T - 1 - step)], np.int32)
        logits = np.asarray(forward(sources()[row][None], jnp.array([length]), inputs))
        tokens.append(int(np.argmax(logits[0, step])))
        if tokens[-1] == EOS:
            break
    return tokens + [PAD] * (T - len(tokens))


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        (settings(normalizer=growing(3), dim=12, **ANY_LENGTH, **BARE), None),
        (
            settings("learned", "both", decoder_self_attention=False, normalizer=growing(2)),
            GAPS,
        ),
        pytest.param(
            settings("rotary", "end", "subset", score="scaled", normalizer=growing(3)),
            None,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["any-length", "learned", "rotary"],
)
def test_greedy_and_beam_search(config, ids):
    model, _ = make(config, noise=1.0, seed=4)
    given = None if ids is None else jnp.array(ids)
    source, lengths = sources(), jnp.array(LENGTHS)
    found = jax.jit(functools.partial(model.greedy_decode, **NUMBERS, position_ids=given))(
        source, lengths
    )
    forward = jax.jit(functools.partial(model, position_ids=given))
    answers_of_rows = [naive_greedy(forward, row, LENGTHS[row]) for row in range(B)]
    np.testing.assert_array_equal(found.tokens, answers_of_rows)
    assert len(set(map(tuple, answers_of_rows))) > 1
    if ids is not None:
        return  # a beam takes the default's
    search = jax.jit(model.beam_decode, static_argnames=("beams", *NUMBERS))
    for beams in (1, 2):
        beam = jax.tree.map(np.asarray, search(source, lengths, beams=beams, **NUMBERS))
        assert beam.tokens.shape == (B, beams, T)
        if beams == 1:
            np.testing.assert_array_equal(beam.tokens[:, 0], found.tokens)
    for row, index in np.ndindex(B, 2):  # each has the probability that teacher forcing gives it
        tokens = np.asarray(beam.tokens[row, index, : int(beam.lengths[row, index])])
        inputs = np.array([[SOS, *tokens[:-1]] + [9] * (T - len(tokens))], np.int32)
        logits = forward(source[row][None], jnp.array(LENGTHS[row : row + 1]), inputs)
        logits = np.float64(logits)[0]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = log_p[np.arange(len(tokens)), tokens].sum()
        assert beam.log_probabilities[row, index] == pytest.approx(expected, abs=2e-4)


# --- settings ---


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"normalizer": "ssmax", "attention": "coverage"},
            "normalizer must be softmax with attention 'coverage'; got 'ssmax'",
        ),
        ({"normalizer": "log_scaled(start=0)"}, "start must be at least 1; got 0"),
        (
            {"positions": "rotary", "attention": "monotonic"},
            "attention must be global with rotary positions; got 'monotonic'",
        ),
        (
            {"positions": "rotary", "position_anchor": "both", "num_heads": 4, "dim": 8},
            "dim / num_heads must be a multiple of 4, for rotary .* anchored at both; got 2",
        ),
        (
            {"positions": "learned", "position_anchor": "both", "dim": 6},
            "dim must be a multiple of 4, for learned positions anchored at both; got 6",
        ),
    ],
)
def test_bad_settings(bad, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**bad)
