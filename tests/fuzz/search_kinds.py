"""Kinds for greedy and beam search, compared with every possible sequence."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import NO_SIZES, assert_kind, seeds
from hypothesis import strategies as st
from outcomes import Kind, mistakes

import attention_jax as aj


@st.composite
def search_cases(draw):
    tokens = draw(st.sampled_from([2, 3, 4]))
    rng = np.random.default_rng(draw(seeds))
    rows = draw(st.sampled_from([1, 2, 3]))
    logits = rng.normal(size=(rows, tokens, tokens)).astype("f4")
    if draw(st.booleans()):
        logits = np.where(rng.random(logits.shape) < 0.2, -np.inf, logits)
        logits[..., 1] = np.maximum(logits[..., 1], -1)  # at least one token is always possible
    beams = draw(st.sampled_from([0, 1, 2, 3, 40]))  # 0: greedy
    numbers = {
        "sos": draw(st.sampled_from([0, 1])),
        "eos": draw(st.sampled_from([0, 1])),
        "pad": draw(st.sampled_from([0, 1, 5])),
        "max_length": draw(st.sampled_from([1, 2, 3])),
    }
    return logits, beams, numbers, draw(st.sampled_from([0.0, 0.0, 0.6, 2.0]))


def _table_step(state: Any, tokens: Any) -> Any:
    of_row = state["logits"]
    index = jnp.clip(tokens, 0, of_row.shape[1] - 1)
    return jnp.take_along_axis(of_row, index[:, None, None], axis=1)[:, 0], state


def call_search(case: Any) -> Any:
    logits, beams, numbers, penalty = case
    state = {"logits": jnp.asarray(logits)}
    numbers = {"batch_size": logits.shape[0], **numbers}
    if not beams:
        return aj.greedy_search(_table_step, state, **numbers)
    return aj.beam_search(_table_step, state, beams=beams, length_penalty=penalty, **numbers)


def expect_search(case: Any) -> Any:
    """Returns all sequences of each row, best first: [(score, log-probability, tokens)]."""
    logits, _, numbers, penalty = case
    by_row = []
    with np.errstate(all="ignore"):
        log_p = logits.astype(float)
        log_p = log_p - np.log(np.exp(log_p).sum(-1, keepdims=True))
    for table in log_p:
        sequences = []
        for length in range(1, numbers["max_length"] + 1):
            for tokens in itertools.product(range(table.shape[1]), repeat=length):
                ended = tokens[-1] == numbers["eos"]
                if numbers["eos"] in tokens[:-1] or not (ended or length == numbers["max_length"]):
                    continue
                before = (numbers["sos"], *tokens)
                total = sum(table[a, b] for a, b in itertools.pairwise(before))
                if total > -np.inf:
                    sequences.append((total / ((5 + length) / 6) ** penalty, total, tokens))
        by_row.append(sorted(sequences, reverse=True))
    return by_row


def compare_search(case: Any, got: Any, expected: Any) -> None:
    logits, beams, numbers, _ = case
    length, pad = numbers["max_length"], numbers["pad"]

    def padded(sequence: tuple) -> list[int]:
        return [*sequence, *[pad] * (length - len(sequence))]

    if not beams:
        assert_kind("tokens", got, (logits.shape[0], length), np.int32)
        for row, tokens in enumerate(np.asarray(got)):
            last, sequence = numbers["sos"], []
            while len(sequence) < length and (not sequence or sequence[-1] != numbers["eos"]):
                last = int(np.argmax(logits[row, last]))
                sequence.append(last)
            assert padded(tuple(sequence)) == tokens.tolist()
        return
    assert_kind("tokens", got.tokens, (logits.shape[0], beams, length), np.int32)
    for row, sequences in enumerate(expected):
        known = {sequence: (score, total) for score, total, sequence in sequences}
        scores = np.asarray(got.scores[row], float)
        # Beams that do not exist have -inf and come last; scores never rise.
        assert (scores[:-1] >= scores[1:] - 1e-6).all(), scores
        returned = []
        for tokens, score, total, count in zip(
            np.asarray(got.tokens[row]), scores, np.asarray(got.log_probabilities[row], float),
            np.asarray(got.lengths[row]), strict=True,
        ):  # fmt: skip
            sequence = tuple(tokens[:count].tolist())
            if score == -np.inf:
                assert count == 0, "a hypothesis that does not exist has a length"
                assert (tokens == pad).all(), tokens
                continue
            assert tokens.tolist() == padded(sequence)
            assert sequence in known, f"{sequence} is no sequence"
            assert np.allclose((score, total), known[sequence], atol=1e-5), (
                sequence,
                known[sequence],
            )
            returned.append(sequence)
        assert len(set(returned)) == len(returned), f"twice: {returned}"
        if beams == 40:  # more beams than prefixes: the search loses nothing
            best = [score for score, _, _ in sequences[:beams]]
            assert np.allclose(scores[: len(best)], best, atol=1e-5), (scores, best)


STATE = {"logits": jnp.zeros((2, 3, 3))}
NUMBERS: dict[str, Any] = {"batch_size": 2, "max_length": 3, "sos": 0, "eos": 1, "pad": 2}
MISTAKEN_SEARCHES = [
    *(("greedy", {name: bad}, name) for name in ("batch_size", "max_length")
      for bad in (*NO_SIZES.values(), None, True, np.ones(2))),
    *((kind, {name: bad}, name) for kind in ("greedy", "beam") for name in ("sos", "eos", "pad")
      for bad in (1.0, "1", None, [1], True)),
    *((kind, {"eos": bad}, "eos") for kind in ("greedy", "beam") for bad in (-1, 3, 100)),
    *(("beam", {"beams": bad}, "beams") for bad in (*NO_SIZES.values(), None)),
    *(("beam", {"length_penalty": bad}, "length_penalty")
      for bad in (-1.0, np.nan, np.inf, "a", None, [1.0, 2.0], 1j)),
    *(("beam", {"row_axes": bad}, ("row_axes", "state")) for bad in (
        1, 5, -4, "a", 0.0, {"logits": 1}, {"other": 0}, [0], {"logits": [0]})),
    *((kind, {"step": bad}, "step") for kind in ("greedy", "beam") for bad in (
        lambda state, tokens: state["logits"][:, 0],
        lambda state, tokens: (state["logits"], state),
        lambda state, tokens: (state["logits"][:, 0].astype(int), state),
        lambda state, tokens: (state["logits"][:, 0], {}),
        lambda state, tokens: (state["logits"][:1, 0], state),
        lambda state, tokens: (state["logits"][:, 0], jax.tree.map(lambda x: x[..., :1], state)),
        lambda state, tokens: None,
        None, 3, "step")),
]  # fmt: skip


def call_search_mistaken(case: Any) -> Any:
    kind, bad, _ = case
    arguments = {"step": _table_step, "state": STATE, **NUMBERS, **bad}
    if kind == "greedy":
        return aj.greedy_search(**arguments)
    return aj.beam_search(**{"beams": 2, **arguments})


KINDS = [
    Kind("greedy_search and beam_search", search_cases(), call_search, expect_search,
         compare_search, 40, 2),
    mistakes("search, a mistake", MISTAKEN_SEARCHES, call_search_mistaken),
]  # fmt: skip
