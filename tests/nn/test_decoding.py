"""Greedy and beam search against plain loops in float64."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import softmax

from attention_jax.nn.decoding import beam_search, greedy_search, sample_search

B, V, L, EOS, PAD = 3, 5, 7, 1, -1
SOS = 0
NUMBERS = {"batch_size": B, "max_length": L, "sos": SOS, "eos": EOS, "pad": PAD}


def sharpened(steps):
    """What step t multiplies logits by: without it the same tokens in another order would tie."""
    return 1 + steps / 8


def tables(batch=B, vocabulary=V, seed=0, spread=1.5, dtype=np.float32):
    """Logits [batch, previous token, last token, next token]."""
    rng = np.random.default_rng(seed)
    return (spread * rng.normal(size=(batch, *(vocabulary,) * 3))).astype(dtype)


def chain(state, tokens):
    """Logits of the last two tokens and the step; of a row that has ended, NaN."""
    rows = jnp.arange(tokens.shape[0])
    logits = state["tables"][rows, state["previous"], tokens]
    logits = logits * sharpened(state["steps"]).astype(logits.dtype)[:, None]
    logits = jnp.where((tokens == PAD)[:, None], jnp.nan, logits)
    return logits, state | {"previous": tokens, "steps": state["steps"] + 1}


def chain_state(table):
    previous = np.full(table.shape[0], SOS, np.int32)
    return {"tables": jnp.asarray(table), "previous": previous, "steps": np.zeros_like(previous)}


@functools.partial(jax.jit, static_argnames=("step", *NUMBERS))
def greedy(state, step=chain, **numbers):
    return greedy_search(step, state, **(NUMBERS | numbers))


@functools.partial(jax.jit, static_argnames=("step", "beams", "length_penalty", *NUMBERS))
def search(state, step=chain, **options):
    return beam_search(step, state, **(NUMBERS | options))


def penalised(log_p, length, alpha):
    return log_p / ((5 + length) / 6) ** alpha


def log_probability(table, sequence):
    """Of one row: all its tokens given those before."""
    total, previous, last = 0.0, SOS, SOS
    for step, token in enumerate(sequence):
        total += np.log(softmax(table[previous, last] * sharpened(step))[token])
        previous, last = last, token
    return total


def numpy_beam(table, beams, max_length, alpha):
    """The search as its docstring has it, one row, without any early stop."""
    live, kept = [(0.0, [])], []
    for t in range(max_length):
        continued = [
            (log_probability(table, [*tokens, token]), [*tokens, token])
            for _, tokens in live
            for token in range(table.shape[-1])
        ]
        best = sorted(continued, key=lambda hypothesis: -hypothesis[0])[:beams]
        kept += [(penalised(log_p, t + 1, alpha), log_p, y) for log_p, y in best if y[-1] == EOS]
        live = [hypothesis for hypothesis in best if hypothesis[1][-1] != EOS]
    kept += [(penalised(log_p, max_length, alpha), log_p, tokens) for log_p, tokens in live]
    return sorted(kept, key=lambda hypothesis: -hypothesis[0])[:beams]


def hypotheses(found, row):
    """Those of one row that exist: (score, log-probability, tokens up to their length)."""
    columns = (np.asarray(field[row]) for field in found)
    return [
        (score, log_p, tokens[:length].tolist())
        for tokens, score, log_p, length in zip(*columns, strict=True)
        if score > -np.inf
    ]


def assert_same(found, row, expected, rtol=1e-5):
    ours = hypotheses(found, row)
    assert [tokens for *_, tokens in ours] == [tokens for *_, tokens in expected]
    for index in (0, 1):
        np.testing.assert_allclose(
            [hypothesis[index] for hypothesis in ours],
            [hypothesis[index] for hypothesis in expected],
            rtol=rtol,
        )
    for tokens, length in zip(found.tokens[row], found.lengths[row], strict=True):
        assert np.all(np.asarray(tokens)[int(length) :] == PAD)


# --- greedy ---


def test_greedy_against_a_loop_with_unequal_ends():
    table = tables(11)
    tokens = np.asarray(greedy(chain_state(table), batch_size=11))
    assert tokens.dtype == jnp.int32
    lengths = set()
    for row in range(11):
        expected, previous, last = [], SOS, SOS
        while len(expected) < L and last != EOS:
            previous, last = last, int(np.argmax(table[row, previous, last]))
            expected.append(last)
        lengths.add(len(expected))
        assert tokens[row].tolist() == expected + [PAD] * (L - len(expected))
    assert len(lengths) > 3


def counting_step(calls):
    def step(state, tokens):
        jax.debug.callback(lambda: calls.append(1))
        return jax.nn.one_hot(jnp.where(tokens == SOS, 2, EOS), V), state

    return step


def test_greedy_stops_when_every_row_has_ended():
    calls = []
    tokens = greedy((), counting_step(calls), max_length=101)
    jax.block_until_ready(tokens)
    jax.effects_barrier()
    assert tokens[:, :3].tolist() == [[2, EOS, PAD]] * B
    assert len(calls) == 2


# --- beams ---


def test_with_beams_enough_every_sequence_is_found_best_first():
    table, alpha = tables(2, 3, seed=5, dtype=np.float64), 0.6
    with jax.enable_x64(True):
        options = {"beams": 37, "length_penalty": alpha, "batch_size": 2, "max_length": 4}
        found = jax.device_get(search(chain_state(table), **options))
    assert (found.scores.dtype, found.tokens.dtype) == (np.float64, np.int32)
    assert (found.tokens.shape, found.lengths.dtype) == ((2, 37, 4), np.int32)
    for row in range(2):
        expected = numpy_beam(table[row], 37, 4, alpha)
        assert len(expected) == 31
        assert_same(found, row, expected, rtol=1e-12)
        # The six places without a sequence.
        assert np.all(found.scores[row, 31:] == -np.inf)
        assert np.all(found.log_probabilities[row, 31:] == -np.inf)
        assert np.all(found.lengths[row, 31:] == 0)
        assert np.all(found.tokens[row, 31:] == PAD)


@pytest.mark.parametrize(
    ("beams", "alpha"),
    [(3, 0.6), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 0.0), (7, 1.0)))],
)
def test_few_beams_against_a_loop_that_never_stops_early(beams, alpha):
    """The step's state depends on the history: rows that were not reordered would be found out."""
    table = tables(11, seed=beams)
    options = {"beams": beams, "length_penalty": alpha, "batch_size": 11}
    found = jax.device_get(search(chain_state(table), **options))
    for row in range(11):
        assert_same(found, row, numpy_beam(table[row], beams, L, alpha))
    assert len(np.unique(found.lengths)) > 3


def test_one_beam_is_greedy():
    table, alpha = tables(31, seed=9), 7.0
    table[:3] = np.round(table[:3])  # ties
    table[3:13] *= 1e-7  # no ties, but their log-probabilities would round to some
    options = {"beams": 1, "length_penalty": alpha, "batch_size": 31}
    found = jax.device_get(search(chain_state(table), **options))
    np.testing.assert_array_equal(found.tokens[:, 0], greedy(chain_state(table), batch_size=31))
    for row in range(31):
        tokens = found.tokens[row, 0, : int(found.lengths[row, 0])].tolist()
        assert (tokens[-1] == EOS) or len(tokens) == L
        np.testing.assert_allclose(
            found.log_probabilities[row, 0], log_probability(table[row], tokens), rtol=1e-5
        )


@pytest.mark.parametrize(("alpha", "steps", "best"), [(0.0, 2, [2, EOS]), (1.0, 11, [2] * 11)])
def test_a_row_stops_when_nothing_live_can_win_and_not_before(alpha, steps, best):
    """Of two beams, "EOS" ends with 0.3 and "2 EOS" with 0.42; "2 2 2 ..." lives on with 0.28.

    Without a penalty it can no longer win; with one it can: log(0.28) / (16 / 6) > log(0.42).
    """
    calls = []

    def step(t, tokens):
        jax.debug.callback(lambda: calls.append(1))
        p = jnp.array([[0, 0.3, 0.7], [0, 0.6, 0.4], [0, 0, 1.0]])
        return jnp.log(p[jnp.minimum(t, 2)]), t + 1

    numbers = {"batch_size": 1, "max_length": 11, "beams": 2}
    found = jax.device_get(search(jnp.zeros(1, int), step, length_penalty=alpha, **numbers))
    jax.effects_barrier()
    assert len(calls) == steps
    assert hypotheses(found, 0)[0][2] == best
    assert len(hypotheses(found, 0)) == 2


# --- logits that are no numbers, or narrow ---


def test_a_row_without_likely_tokens_has_no_answer():
    """Whoever shares the batch; scores in beam search are NaN where logits are, -inf where all are.

    The first row is right.
    """
    table = tables(5, seed=2)
    table[:, :, :, EOS] = -9.0  # so that no hypothesis ends before
    at, values = np.array([[L, 0, 0, 2, 2], [0, np.nan, -np.inf, np.nan, -np.inf]])
    state = {**chain_state(table), "at": jnp.array(at, int), "values": jnp.float32(values)}

    def step(state, tokens):
        logits, state = chain(state, tokens)
        is_bad = state["steps"] == state["at"] + 1
        return jnp.where(is_bad[:, None], state["values"][:, None], logits), state

    numbers = NUMBERS | {"batch_size": 5, "temperature": 1e-4}
    samples = sample_search(step, state, jax.random.key(0), **numbers)
    for tokens in (greedy(state, step, batch_size=5), samples):
        assert tokens[1:].tolist() == [[PAD] * L] * 4
        assert PAD not in tokens[0]
    for rows in (slice(0, 5), slice(1, 5)):
        some = jax.tree.map(lambda leaf, rows=rows: leaf[rows], state)
        found = search(some, step, beams=2, batch_size=len(some["at"]))
        np.testing.assert_array_equal(found.tokens[-4:], PAD)
        np.testing.assert_array_equal(found.lengths[-4:], 0)
        np.testing.assert_array_equal(found.scores[-4:], values[1:, None] + np.zeros(2))


def test_narrow_logits_tie_as_wide_ones_and_are_not_sorted():
    table = np.round(tables(11, seed=4))
    narrow = chain_state(table.astype(jnp.bfloat16))
    for find in (greedy, functools.partial(search, beams=3)):
        compiled = jax.jit(functools.partial(find, batch_size=11)).lower(narrow).compile()
        assert not re.search(r"\bsort\(", compiled.as_text())
        expected = find(chain_state(table), batch_size=11)
        chex.assert_trees_all_equal(compiled(narrow), expected)


# --- samples ---


def test_samples_have_their_probabilities_and_end():
    """After EOS there is PAD; at a small temperature they are the likeliest."""
    table, rows = tables(1), 3000
    state = chain_state(np.repeat(table, rows, axis=0))
    numbers = NUMBERS | {"batch_size": rows, "max_length": 3}

    @jax.jit
    def sample(state, rng):
        cold = sample_search(chain, state, rng, **numbers, temperature=1e-4)
        return cold, sample_search(chain, state, rng, **numbers, temperature=2.0)

    cold, samples = map(np.asarray, sample(state, jax.random.key(0)))
    np.testing.assert_array_equal(cold, greedy(state, batch_size=rows, max_length=3))
    expected = softmax(table[0, SOS, SOS] / 2)
    np.testing.assert_allclose(np.bincount(samples[:, 0], minlength=V) / rows, expected, atol=0.04)
    # The noise of two steps is independent: equally likely tokens repeat as often as by chance.
    flat = np.where(np.arange(V) == EOS, -np.inf, np.zeros((rows, 1), np.float32))
    tokens = sample_search(lambda state, _: (flat, state), (), jax.random.key(0), **numbers)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert abs(np.mean(tokens[:, one] == tokens[:, other]) - 1 / (V - 1)) < 0.04
    ended = np.cumsum(samples == EOS, axis=1) - (samples == EOS) > 0
    assert np.all((samples == PAD) == ended)
    first = jnp.arange(rows) % 2 * 2  # a first token for each row
    by_first = greedy_search(chain, state, **numbers | {"sos": first})
    assert np.all(np.asarray(by_first)[::2] == cold[0])
    assert np.any(np.asarray(by_first)[1] != cold[0])
