"""Kinds for local windows and coverage, with any score."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    NO_FLOATS,
    SIZES,
    assert_kind,
    assert_near,
    filled,
    plain_or_not,
    seeds,
    tolerance,
)
from attention_side import arguments, attend, moderate, softmax
from hypothesis import strategies as st
from masks_and_biases import allowed, bias_values
from outcomes import Kind, mistakes

import attention_jax as aj

F4 = [(np.float32, False)]


# --- windows ---


@st.composite
def local_cases(draw):
    case = draw(arguments(scores=("scaled", "general", "dot")))
    batch, length, keys, *_ = case.size
    rng = np.random.default_rng(draw(seeds))
    lead = draw(st.sampled_from([(), batch]))
    centers = rng.integers(-2, keys + 2, (*lead, length)) + draw(st.sampled_from([0, 0.5, 0.25]))
    if draw(st.booleans()):
        centers = np.where(rng.random(centers.shape) < 0.2, np.nan, centers)
    radius = draw(st.sampled_from([0, 1, 2, 50]))
    sigma = draw(st.sampled_from([None, None, 0.5, 1, 25.0]))
    implementation = draw(st.sampled_from([None, "reference", "tiled"]))
    return case, centers.astype("f4"), radius, sigma, implementation


def call_local(case: Any) -> Any:
    given, centers, radius, sigma, implementation = case
    around = {"centers": centers, "radius": radius, "sigma": sigma}
    with jax.enable_x64(given.x64):
        keywords = given.keywords()
        output = aj.local_attention(
            **keywords, **around, implementation=implementation, block_sizes=aj.BlockSizes(2, 2)
        )
        del keywords["value"]
        return output, aj.local_attention_weights(**keywords, **around)


def expect_local(case: Any) -> Any:
    given, centers, radius, sigma, _ = case
    keys = np.arange(given.size[2])
    with np.errstate(all="ignore"):
        distance = keys - centers.astype(float)[..., :, None]
        window = np.abs(distance) <= radius
        expected = attend(given, window)
        damping = np.ones(window.shape) if sigma is None else np.exp(-((distance / sigma) ** 2) / 2)
    weights = np.where(window, expected.weights * np.where(window, damping, 0), 0)
    _, value = given.kept["key"], given.kept["value"]
    value = np.where(moderate(value), value, 0)  # rows with other values are not certain
    return expected, weights, weights @ np.broadcast_to(value, (*given.batch, *value.shape[-2:]))


def compare_local(case: Any, got: Any, expected: Any) -> None:
    given, _, _, sigma, _ = case
    attended, weights, output = expected
    bound = tolerance(given.dtype, given.x64, attended.size) * (1 if sigma is None else 4)
    if sigma is not None and given.x64:
        bound = 1e-5  # the centers are float32
    # A Gaussian far from all keys makes weights that are tiny compared with other rows'.
    for name, array, right, sure in (
        ("output", got[0], output, attended.sure_output[..., None]),
        ("weights", got[1], weights, attended.sure[..., None]),
    ):
        assert_kind(name, array, right.shape, given.output_dtype)
        assert_near(name, array, right, bound, where=sure)


MISTAKEN_CENTERS = [
    *(({"centers": bad}, "centers") for bad in (
        "text", None, True, np.ones(2, complex), 1.0, {}, np.ones(7), np.ones((7, 2)), [[1.0]] * 3,
        object())),
    *(({"radius": bad}, "radius") for bad in (-1, 1.0, "1", None, True, [1], np.ones(2))),
    *(({"sigma": bad}, "sigma") for bad in (0, -1.0, np.nan, "1", 1j, [1.0, 0.0], {}, np.ones(7),
                                            np.ones(2, int), True, -np.inf)),
    *(({name: bad}, name) for name in ("query", "key", "value") for bad in NO_FLOATS.values()),
    *(({"mask": bad}, "mask") for bad in ("causal", 1, np.ones((7, 7), bool), np.ones((2, 3)))),
    *(({"bias": bad}, "bias") for bad in ("alibi", 1, np.ones((7, 7), "f4"), np.ones((2, 3), int))),
    *(({"implementation": bad}, "implementation") for bad in ("flash", 3)),
    *(({"dropout_rate": bad}, "dropout_rate") for bad in (1.0, -1, "a")),
    ({"dropout_rate": 0.5}, "dropout_rng"),
]  # fmt: skip


def call_local_mistaken(case: Any) -> Any:
    rng = np.random.default_rng(0)
    good = {name: jnp.asarray(filled(rng, (n, 2)), "f4")
            for name, n in (("query", 2), ("key", 3), ("value", 3))}  # fmt: skip
    return aj.local_attention(**{**good, "centers": np.ones(2, "f4"), "radius": 1, **case[0]})


# --- coverage ---


@st.composite
def coverage_cases(draw):
    case = draw(arguments(scores=("dot", "general", "additive"), dtypes=F4))
    batch, _, keys, _, dk, _ = case.size
    rng = np.random.default_rng(draw(seeds))
    features = 17 if case.score == "additive" else dk
    kernel = filled(rng, (features,), draw(st.sampled_from(["plain", "plain", "zeros"])))
    before = draw(st.sampled_from([None, (keys,), (*batch, keys)]))
    before = before if before is None else np.abs(filled(rng, before))
    return case, kernel, before


def call_coverage(case: Any) -> Any:
    given, kernel, before = case
    before = None if before is None else jnp.asarray(before, jnp.float32)
    return aj.coverage_attention(
        **given.keywords(), coverage_kernel=jnp.asarray(kernel, jnp.float32), coverage=before
    )


def expect_coverage(case: Any) -> Any:
    """Computes one query after another; certain only if everything that is read is moderate."""
    given, kernel, before = case
    plain = attend(given)
    batch, length, keys, *_ = given.size
    may = allowed(given.mask, batch, length, keys)
    query, key, value = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in given.kept.values())
    bias, params = bias_values(given.bias, batch, length, keys), given.params
    with np.errstate(all="ignore"):
        if given.score == "additive":
            q, k = query @ params["query_kernel"], key @ params["key_kernel"]
        else:
            q, k = (query @ params["kernel"] if given.score == "general" else query), key
        covered = np.broadcast_to(0.0 if before is None else before, (*batch, keys))
        weights, loss = np.zeros((*batch, length, keys)), np.zeros((*batch, length))
        for t in range(length):
            features = k + covered[..., None] * kernel
            if given.score == "additive":
                logits = np.tanh(q[..., t, None, :] + features) @ params["v"]
            else:
                logits = (q[..., t, None, :] * features).sum(-1)
            row = softmax(logits + bias[..., t, :], may[..., t, :])[0]
            weights[..., t, :] = row
            loss[..., t] = np.minimum(row, np.where(may[..., t, :], covered, 0)).sum(-1)
            covered = covered + row
        output = weights @ np.where(moderate(value), value, 0)
    sure = plain.sure.all(-1)  # coverage carries a query's weights to all later queries
    sure_output = sure & plain.sure_output.all(-1)
    return (
        {"output": output, "weights": weights, "coverage": covered, "loss": loss},
        sure,
        (sure_output, plain.size),
    )


def compare_coverage(case: Any, got: Any, expected: Any) -> None:
    given, kernel, before = case
    right, sure, (sure_output, size) = expected
    covered = np.abs(kernel).max(initial=0) * (given.size[1] + (before is not None) * 4)
    bound = tolerance(np.float32, False, size + size * covered) * max(given.size[1], 1)
    for name, array in got._asdict().items():
        assert_kind(name, array, right[name].shape, np.float32)
        certain = sure_output if name == "output" else sure
        certain = certain.reshape(*certain.shape, *[1] * (right[name].ndim - certain.ndim))
        assert_near(name, array, right[name], bound, where=certain)


MISTAKEN_COVERAGE = [
    *(({"coverage_kernel": bad}, "coverage_kernel") for bad in (
        *NO_FLOATS.values(), None, 1.0, np.ones(3, "f4"), np.ones((7, 2), "f4"), np.ones(1, "f4"))),
    *(({"coverage": bad}, "coverage") for bad in (
        *NO_FLOATS.values(), 1.0, np.ones(2, "f4"), np.ones((7, 3), "f4"), np.ones(1, "f4"))),
    *(({name: bad}, name) for name in ("query", "key", "value") for bad in NO_FLOATS.values()),
    *(({"score": bad}, "score") for bad in ("addit", 3, None, [], "os:path")),
    *(({"mask": bad}, "mask") for bad in ("causal", 1, np.ones((7, 7), bool), np.ones((2, 3)))),
    *(({"params": bad}, "params") for bad in ({"v": 1.0}, 3, "text")),
]  # fmt: skip


def call_coverage_mistaken(case: Any) -> Any:
    good = {name: np.ones((n, 2), "f4") for name, n in (("query", 2), ("key", 3), ("value", 3))}
    good |= {"score": "dot", "coverage_kernel": np.ones(2, "f4")}
    return aj.coverage_attention(**{**good, **case[0]})


@st.composite
def loss_cases(draw):
    batch, length, keys, *_ = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(seeds))
    weights = np.abs(filled(rng, (*batch, length, keys), draw(plain_or_not)))
    before = draw(st.sampled_from([None, np.abs(filled(rng, (keys,)))]))
    return weights, before


def expect_loss(case: Any) -> np.ndarray:
    weights, before = case
    with np.errstate(all="ignore"):
        ahead = np.cumsum(weights, -2) - weights + (0 if before is None else before)
        return np.minimum(weights, ahead).sum(-1)


def compare_loss(case: Any, got: Any, expected: np.ndarray) -> None:
    sure = moderate(case[0]).all(-1)
    sure = np.logical_and.accumulate(sure, -1) if sure.size else sure
    assert_kind("loss", got, expected.shape, np.float32)
    assert_near("loss", got, expected, 1e-5, where=sure)


KINDS = [
    Kind("local_attention and its weights", local_cases(), call_local, expect_local, compare_local,
         250, 3),
    mistakes("local_attention, a mistake", MISTAKEN_CENTERS, call_local_mistaken),
    Kind("coverage_attention", coverage_cases(), call_coverage, expect_coverage, compare_coverage,
         250, 5),
    mistakes("coverage_attention, a mistake", MISTAKEN_COVERAGE, call_coverage_mistaken),
    Kind("coverage_loss", loss_cases(),
         lambda case: aj.coverage_loss(*(x if x is None else jnp.asarray(x, "f4") for x in case)),
         expect_loss, compare_loss, 200, 6),
]  # fmt: skip
