"""Monotonic attention: soft, hard, and its weights from probabilities at hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    NO_FLOATS,
    NO_INTEGERS,
    SIZES,
    assert_kind,
    assert_near,
    seeds,
    tolerance,
)
from attention_side import arguments, attend, moderate
from hypothesis import strategies as st
from masks_and_biases import allowed
from outcomes import Kind, mistakes

import attention_jax as aj

F4 = [(np.float32, False)]


@st.composite
def monotonic_cases(draw):
    case = draw(arguments(scores=("scaled", "additive", "general"), dtypes=F4))
    batch, _, keys, *_ = case.size
    rng = np.random.default_rng(draw(seeds))
    initial = draw(st.sampled_from([None, (keys,), (*batch, keys)]))
    if initial is not None:
        initial = rng.random(initial)
        initial = initial / np.maximum(initial.sum(-1, keepdims=True), 1)
    offset = draw(st.sampled_from([0.0, -1.0, 2, 50.0, -50.0]))
    return case, offset, initial, draw(st.booleans())


def call_monotonic(case: Any) -> Any:
    given, offset, initial, hard = case
    initial = None if initial is None else jnp.asarray(initial, jnp.float32)
    return aj.monotonic_attention(**given.keywords(), offset=offset, initial=initial, hard=hard)


def expect_monotonic(case: Any) -> Any:
    given, offset, initial, hard = case
    plain = attend(given)
    batch, length, keys, *_ = given.size
    may = allowed(given.mask, batch, length, keys)
    with np.errstate(all="ignore"):
        p = np.where(may, 1 / (1 + np.exp(-(plain.logits + offset))), 0)
    if initial is None:
        initial = (np.arange(keys) == 0).astype(float)
    initial = np.broadcast_to(initial, (*batch, keys))
    weights = _walked(p, initial) if hard else _expected(p, initial)
    value = np.broadcast_to(given.kept["value"], (*batch, keys, given.size[-1]))
    read = may.any(-2)
    fine = (moderate(value).all(-1) | ~read).all(-1)
    sure = plain.sure.all(-1)
    if hard:  # rounding may decide
        with np.errstate(all="ignore"):
            sure &= ~(np.abs(p - 0.5) < 1e-5).any((-2, -1))
    output = weights @ np.where(moderate(value) & read[..., None], value, 0)
    return output, weights, sure, sure & fine, plain.size


def _expected(p: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """alpha_ij = p_ij q_ij,  q_ij = (1 - p_i,j-1) q_i,j-1 + alpha_i-1,j."""
    weights = np.zeros(p.shape)
    for i in range(p.shape[-2]):
        reached = np.zeros(p.shape[:-2])
        for j in range(p.shape[-1]):
            gone = (1 - p[..., i, j - 1]) * reached if j else 0
            reached = gone + previous[..., j]
            weights[..., i, j] = p[..., i, j] * reached
        previous = weights[..., i, :]
    return weights


def _walked(p: np.ndarray, initial: np.ndarray) -> np.ndarray:
    weights = np.zeros(p.shape)
    for b in np.ndindex(p.shape[:-2]):
        begins = np.flatnonzero(initial[b] > 0)
        at = begins[0] if begins.size else p.shape[-1]
        for i in range(p.shape[-2]):
            stops = [j for j in range(at, p.shape[-1]) if p[(*b, i, j)] >= 0.5]
            at = stops[0] if stops else p.shape[-1]
            if stops:
                weights[(*b, i, at)] = 1
    return weights


def compare_monotonic(case: Any, got: Any, expected: Any) -> None:
    output, weights, sure, sure_output, size = expected
    bound = 4 * tolerance(np.float32, False, size + abs(case[1]))
    for name, array, right, certain in (
        ("output", got[0], output, sure_output), ("weights", got[1], weights, sure),
    ):  # fmt: skip
        assert_kind(name, array, right.shape, np.float32)
        assert_near(name, array, right, bound, where=certain[..., None, None])
    finite = np.isfinite(np.asarray(got[1])).all(-1)
    rows = np.asarray(got[1]).sum(-1)[finite]
    assert (rows <= 1 + 1e-5).all(), f"rows sum to {rows}"


PROBABILITIES = np.array([[0.5, 0.25, 1.0], [0.0, 0.75, 0.5]], "f4")
NO_PROBABILITIES = [v for k, v in NO_FLOATS.items() if k != "bools"]
MISTAKEN_MONOTONIC = [
    *((aj.monotonic_weights, {"probabilities": bad}, "probabilities")
      for bad in (*NO_FLOATS.values(), 0.5, np.ones(3, "f4"))),
    *((f, {"initial": bad}, "initial") for f in (aj.monotonic_weights, aj.monotonic_attention)
      for bad in (*NO_FLOATS.values(), 1.0, np.ones(2, "f4"), np.ones((7, 3), "f4"))),
    *((f, {"probabilities": bad}, "probabilities")
      for f in (aj.hard_monotonic_positions, aj.hard_monotonic_weights)
      for bad in (*NO_PROBABILITIES, 0.5, np.ones(3, "f4"), np.ones(3, bool))),
    *((f, {"start": bad}, "start")
      for f in (aj.hard_monotonic_positions, aj.hard_monotonic_weights)
      for bad in (*NO_INTEGERS.values(), np.ones(2, int), None)),
    *((aj.monotonic_attention, {name: bad}, name) for name in ("query", "key", "value")
      for bad in NO_FLOATS.values()),
    *((aj.monotonic_attention, {name: bad}, name) for name in ("offset", "noise_scale")
      for bad in ("text", None, 1j, np.ones(2, "f4"), np.ones((), int), {}, [[1.0], []], object())),
    *((aj.monotonic_attention, {"noise_rng": bad}, "noise_rng")
      for bad in (7, "key", np.zeros(3, np.uint32), jax.random.split(jax.random.key(0)), {}, 1.5)),
    *((aj.monotonic_attention, {"hard": bad}, "hard") for bad in ("yes", 1, None, 0.5)),
    *((aj.monotonic_attention, {"score": bad}, "score") for bad in ("addit", 3, None)),
    *((aj.monotonic_attention, {"mask": bad}, "mask") for bad in ("causal", np.ones((2, 3)))),
]  # fmt: skip


def call_monotonic_mistaken(case: Any) -> Any:
    function, bad, _ = case
    good: dict[str, Any] = {"probabilities": PROBABILITIES}
    if function is aj.monotonic_attention:
        tokens = (("query", 2), ("key", 3), ("value", 3))
        good = {name: np.ones((n, 2), "f4") for name, n in tokens} | {"score": "dot"}
    return function(**{**good, **bad})


@st.composite
def probability_cases(draw):
    batch, length, keys, *_ = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(seeds))
    p = rng.random((*batch, length, keys))
    extreme = draw(st.sampled_from(["none", "ones", "some", "choices"]))
    if extreme != "none":
        p = np.where(rng.random(p.shape) < (1.0 if extreme == "choices" else 0.4), p.round(), p)
    return p.astype("f4"), draw(st.sampled_from(["expected", "hard", "positions"]))


def call_probabilities(case: Any) -> Any:
    p, method = case
    if method == "positions":
        return aj.hard_monotonic_positions(p)
    if method == "hard":
        return aj.hard_monotonic_weights(p)
    return aj.monotonic_weights(p)


def expect_probabilities(case: Any) -> Any:
    p, method = case
    first = np.broadcast_to(np.arange(p.shape[-1]) == 0, (*p.shape[:-2], p.shape[-1]))
    if method in ("hard", "positions"):
        weights = _walked(p, first.astype(float))
        if method == "hard":
            return weights
        at = np.argmax(weights, -1) if p.shape[-1] else np.zeros(weights.shape[:-1], int)
        return np.where(weights.any(-1), at, p.shape[-1])
    return _expected(p.astype(float), first.astype(float))


def compare_probabilities(case: Any, got: Any, expected: Any) -> None:
    assert_kind("result", got, expected.shape, np.int32 if case[1] == "positions" else np.float32)
    assert_near("result", got, expected.astype(float), 4e-6)


KINDS = [
    Kind("monotonic_attention, soft and hard", monotonic_cases(), call_monotonic, expect_monotonic,
         compare_monotonic, 200, 5),
    Kind("monotonic weights and positions", probability_cases(), call_probabilities,
         expect_probabilities, compare_probabilities, 200, 5),
    mistakes("monotonic attention, a mistake", MISTAKEN_MONOTONIC, call_monotonic_mistaken),
]  # fmt: skip
