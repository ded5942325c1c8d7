"""Kinds for the normalisers of `attention`, and for their names and parameters."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import SIZES, assert_kind, assert_near, tolerance
from attention_kinds import TILE
from attention_side import IMPLEMENTATIONS, Arguments, Expected, arguments, attend
from hypothesis import strategies as st
from masks_and_biases import allowed
from normalizer_cases import NORMALIZER_CASES
from outcomes import Kind, Refused, never

import attention_jax as aj

# Infinite slopes, of alpha > 2, make the weights themselves imprecise.
NORMALIZERS = [name for name in NORMALIZER_CASES if name != "entmax_3"]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments of `attention` with a normaliser."""

    given: Arguments
    normalizer: str
    implementation: str | None

    def keywords(self) -> dict[str, Any]:
        case = NORMALIZER_CASES[self.normalizer]
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), case.params)
        normalizer = {"normalizer": case.normalizer, "normalizer_params": params}
        return {**self.given.keywords(), **normalizer}


@st.composite
def cases(draw):
    given = draw(arguments(sizes=SIZES[:6], scores=("scaled", "additive", "general")))
    return Case(given, draw(st.sampled_from(NORMALIZERS)), draw(st.sampled_from(IMPLEMENTATIONS)))


def call(case: Case) -> Any:
    with jax.enable_x64(case.given.x64):
        return aj.attention(**case.keywords(), implementation=case.implementation, block_sizes=TILE)


def expect(case: Case) -> Expected:
    """The softmax's side with the weights of the normaliser, row by row."""
    given, normalizer = case.given, NORMALIZER_CASES[case.normalizer]
    expected = attend(given)
    table = np.broadcast_to(allowed(given.mask, *given.size[:3]), expected.logits.shape)
    weights, sure = np.zeros(table.shape), expected.sure.copy()
    params = jax.tree.map(lambda leaf: np.asarray(leaf, float)[None], normalizer.params)
    for row in np.ndindex(table.shape[:-1]):
        finite = table[row] & np.isfinite(expected.logits[row])
        # A bias of -inf takes away a key but not from n, which the NumPy side counts.
        counted = normalizer.normalizer.uses_num_keys and (finite != table[row]).any()
        sure[row] &= not counted
        if sure[row] and finite.any():
            with np.errstate(all="ignore"):
                of_row = normalizer.weights(
                    params, expected.logits[row][finite][None].astype(complex)
                )
            weights[row][finite] = of_row[0].real
    value = np.broadcast_to(given.kept["value"], (*given.batch, *given.kept["value"].shape[-2:]))
    with np.errstate(all="ignore"):
        output = np.einsum(
            "...ts,...sd->...td", weights, np.where(table.any(-2)[..., None], value, 0)
        )
    return dataclasses.replace(
        expected, weights=weights, output=output, sure=sure, sure_output=expected.sure_output & sure
    )


def compare(case: Case, got: Any, expected: Expected) -> None:
    given = case.given
    assert_kind("output", got, expected.output.shape, given.output_dtype)
    largest = max(1.0, expected.weights.max(initial=0.0))
    bound = tolerance(given.dtype, given.x64, expected.size) * 4 * largest
    values = np.where(expected.weights.any(-2)[..., None], given.kept["value"], 0)
    terms = np.abs(np.where(np.isfinite(values), values, 0)).max(initial=0.0)
    where = expected.sure_output[..., None]
    assert_near("output", got, expected.output, bound, where=where, terms=terms)
    empty = np.asarray(got).astype(float)[~expected.weights.any(-1) & expected.sure_output]
    assert not empty.any(), f"rows without keys: {empty}"


# --- names and parameters ---

NAMES = [
    "softmx", "", ":", "entmax(", "entmax(alpha=1.0)", "entmax(alpha=nan)", "entmax(alpha='2')",
    "entmax(beta=2)", "entmax(1.5, 2)", "softmax(sink=1)", "sigmoid(bias=inf)", "ssmax(start=0)",
    "log_scaled(scale=nan)", "log_scaled(normalizer=3)", "log_scaled(normalizer=nothing)",
    "log_scaled(start=2.5)", "nowhere:Normalizer", "os:path", "json:", 3, None, object(),
    ["softmax"], aj.Normalizer, aj.Score, "scaled",
]  # fmt: skip
PARAMS = [
    3.0, {}, {"sink": "text"}, {"sink": np.zeros(7, "f4")}, {"sink": np.zeros((), int)},
    {"sink": None}, {"wrong": np.zeros((), "f4")}, [0.0], {"sink": np.zeros((), complex)}, "sink",
]  # fmt: skip


@st.composite
def mistaken(draw):
    good = draw(arguments(sizes=SIZES[:3], scores=("scaled",)))
    if draw(st.booleans()):
        return good, {"normalizer": draw(st.sampled_from(NAMES))}
    params = draw(st.sampled_from(PARAMS))
    return good, {"normalizer": "softmax(sink=True)", "normalizer_params": params}


def call_mistaken(case: Any) -> Any:
    given, changed = case
    return aj.attention(**given.keywords(), **changed)


def refuse_mistaken(case: Any) -> Any:
    _, changed = case
    raise Refused("normalizer", "alpha", "bias", "scale", "start", "sink", *changed)


KINDS = [
    Kind("attention, normalisers", cases(), call, expect, compare, 400, 4),
    Kind("attention, a mistake in the normaliser", mistaken(), call_mistaken, refuse_mistaken,
         never, 300, 40),
]  # fmt: skip
