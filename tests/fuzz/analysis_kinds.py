"""Kinds for `masked_softmax`, and for the analysis of given weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    DTYPES,
    NO_FLOATS,
    SIZES,
    assert_kind,
    assert_near,
    filled,
    given,
    narrowed,
    plain_or_not,
    seeds,
    tolerance,
)
from attention_side import arguments, attend, moderate, softmax
from hypothesis import strategies as st
from masks_and_biases import allowed, built, masks
from outcomes import Kind, mistakes

import attention_jax as aj
from attention_jax import analysis

# --- the softmax ---


@st.composite
def softmax_cases(draw):
    batch, length, keys, *_ = draw(st.sampled_from(SIZES))
    dtype, x64 = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(seeds))
    filling, size = draw(plain_or_not), draw(st.sampled_from([1, 1, 8, 1e4]))
    logits = filled(rng, (*batch, length, keys), filling) * (size if filling == "plain" else 1)
    mask = draw(st.one_of(st.none(), masks(batch, length, keys)))
    # A `Mask` is over the last two axes, whichever axis the softmax is over.
    axis = draw(st.sampled_from([-1, -1, -2, 0, len(batch)]))
    return logits, dtype, x64, mask, axis, draw(st.sampled_from(["jax", "numpy", "list"]))


def call_softmax(case: Any) -> Any:
    logits, dtype, x64, mask, axis, container = case
    with jax.enable_x64(x64):
        mask = None if mask is None else built(mask)
        return aj.masked_softmax(given(logits, dtype, container), mask, axis)


def expect_softmax(case: Any) -> Any:
    logits, dtype, x64, mask, axis, _ = case
    logits = narrowed(logits, dtype, x64)
    allowed_pairs = allowed(mask, logits.shape[:-2], *logits.shape[-2:])
    moved = np.moveaxis(logits, axis, -1), np.moveaxis(allowed_pairs, axis, -1)
    read = np.where(moved[1], moved[0], 0)
    sure = (np.isfinite(read) | (read == -np.inf)).all(-1, keepdims=True)
    weights = np.moveaxis(softmax(*moved)[0], -1, axis)
    return weights, np.moveaxis(np.broadcast_to(sure, read.shape), -1, axis), allowed_pairs


def compare_softmax(case: Any, got: Any, expected: Any) -> None:
    weights, sure, may = expected
    _, dtype, x64, *_ = case
    kept = np.float32 if dtype == np.float64 and not x64 else dtype
    assert_kind("weights", got, weights.shape, kept)
    # The logits are given, so that their rounding does not count.
    assert_near("weights", got, weights, 2 * tolerance(dtype, x64, 0), where=sure)
    assert not np.nan_to_num(np.asarray(got, float)[~may]).any(), "masked entries have weights"


MISTAKEN_SOFTMAXES = [
    *(({"logits": bad}, "logits") for bad in (*NO_FLOATS.values(), None)),
    *(({"mask": bad}, "mask") for bad in (
        "causal", 1, 1.0, np.ones((7, 3), bool), np.ones((2, 3)), np.ones((1, 2, 3), bool), [[1]],
        {}, object(), np.array([["a"]]))),
    *(({"axis": bad}, "axis") for bad in (2, -3, 1.0, "last", None, [0], (0, 1), 100)),
    ({"logits": np.ones(3, "f4"), "mask": aj.causal_mask()}, "logits"),
    ({"logits": np.ones((), "f4"), "mask": aj.causal_mask()}, "logits"),
    ({"logits": np.ones((), "f4")}, ("axis", "logits")),
    ({"mask": aj.segment_mask(np.ones(5, int), np.ones(3, int))}, "mask"),
]  # fmt: skip


def call_softmax_mistaken(case: Any) -> Any:
    return aj.masked_softmax(**{"logits": np.ones((2, 3), "f4"), **case[0]})


# --- statistics of weights ---


@st.composite
def weight_cases(draw):
    batch, length, keys, *_ = draw(st.sampled_from(SIZES))
    dtype = draw(st.sampled_from([np.float32, np.float32, jnp.bfloat16, np.float16]))
    rng = np.random.default_rng(draw(seeds))
    raw = filled(rng, (*batch, length, keys)) * draw(st.sampled_from([1, 30]))
    may = rng.random(raw.shape) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    weights = softmax(raw, may)[0].astype(dtype)
    table = rng.random(raw.shape) < 0.7
    rows = rng.random((*batch, length)) < 0.7
    alignment = rng.integers(-1, keys + 1, (*batch, length))
    return weights, table, rows, alignment


def _mean(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    return np.where(counted, values, 0).sum(-1) / np.maximum(counted.sum(-1), 1)


def statistics_of(case: Any) -> dict[str, np.ndarray]:
    """Computes the statistics by their formulas, in float64."""
    weights, table, rows, alignment = case
    w = weights.astype(float)

    def entropy(w: np.ndarray) -> np.ndarray:
        return -(w * np.log(np.where(w > 0, w, 1))).sum(-1)

    def normalized(w: np.ndarray) -> np.ndarray:
        keys = table.sum(-1)
        return np.where(keys > 1, entropy(w) / np.log(np.maximum(keys, 2)), 0)

    masked = np.where(table, w, 0)
    seen = np.where(rows[..., None], w, 0)
    distance = np.abs(np.arange(w.shape[-1]) - alignment[..., None])
    has = seen.any(-1)
    aligned = has & (distance == 0).any(-1)
    summed = np.where(rows[..., None], masked, 0)
    kept = summed.any(-1)
    return {
        "weight_entropy": entropy(w),
        "normalized_entropy": normalized(masked),
        "effective_keys": np.where(w.any(-1), np.exp(entropy(w)), 0),
        "saturation": _mean((seen.max(-1, initial=0) > 0.75).astype(float), has),
        "alignment_error": _mean(1 - np.where(distance == 0, seen, 0).sum(-1), aligned),
        "expected_distance": _mean((seen * distance).sum(-1), aligned),
        "jensen_shannon": np.zeros(w.shape[:-1]),
        "summary entropy": _mean(entropy(summed), kept),
        "summary largest_weight": _mean(summed.max(-1, initial=0), kept),
        "softmax_jacobian": w[..., None] * (np.eye(w.shape[-1]) - w[..., None, :]),
        "softmax_jacobian_norm": np.sqrt(
            ((w[..., None] * (np.eye(w.shape[-1]) - w[..., None, :])) ** 2).sum((-1, -2))
        ),
        "softmax_vjp": w * (distance - (w * distance).sum(-1, keepdims=True)),
    }


def call_statistics(case: Any) -> dict[str, Any]:
    weights, table, rows, alignment = case
    summary = analysis.attention_summary(weights, mask=table, rows=rows)
    distance = np.abs(np.arange(weights.shape[-1]) - alignment[..., None]).astype("f4")
    return {
        "weight_entropy": analysis.weight_entropy(weights),
        "normalized_entropy": analysis.normalized_entropy(weights, table),
        "effective_keys": analysis.effective_keys(weights),
        "saturation": analysis.saturation(weights, bound=0.75, rows=rows),
        "alignment_error": analysis.alignment_error(weights, alignment, rows=rows),
        "expected_distance": analysis.expected_distance(weights, alignment, rows=rows),
        "jensen_shannon": analysis.jensen_shannon(weights, weights),
        "summary entropy": summary.entropy,
        "summary largest_weight": summary.largest_weight,
        "softmax_jacobian": analysis.softmax_jacobian(weights),
        "softmax_jacobian_norm": analysis.softmax_jacobian_norm(weights),
        "softmax_vjp": analysis.softmax_vjp(weights, distance),
    }


def compare_statistics(case: Any, got: dict, expected: dict) -> None:
    for name, array in got.items():
        assert_kind(name, array, expected[name].shape, np.float32)
        # Weights that are rounded to narrow floats do not sum to 1, which the norm assumes.
        loose = name == "softmax_jacobian_norm" and case[0].dtype != np.float32
        assert_near(name, array, expected[name], 2e-2 if loose else 4e-6, terms=1.0)


PAIRS = np.full((2, 3), 1 / 3, "f4")
STATISTICS = ("weight_entropy", "normalized_entropy", "effective_keys", "saturation")
WITH_ROWS = {"saturation": {}, "alignment_error": {"alignment": [0, 1]},
             "expected_distance": {"alignment": [0, 1]}}  # fmt: skip
MISTAKEN_STATISTICS = [
    *((name, {"weights": bad}, "weights") for name in STATISTICS
      for bad in (*NO_FLOATS.values(), None, 1.0, np.ones(3, "f4"))),
    *((name, {"weights": bad}, "weights")
      for name in ("softmax_jacobian", "softmax_jacobian_norm") for bad in NO_FLOATS.values()),
    *((name, {"weights": PAIRS, **also, "rows": bad}, "rows") for name, also in WITH_ROWS.items()
      for bad in ("all", 1, np.ones(2), np.ones(7, bool), [[]], {}, np.ones((7, 2), bool))),
    *((name, {"weights": PAIRS, "alignment": bad}, "alignment")
      for name in ("alignment_error", "expected_distance")
      for bad in ("diagonal", None, 1.0, np.ones(2, bool), np.ones(7, int), {}, [[1], []])),
    *(("saturation", {"weights": PAIRS, "bound": bad}, "bound")
      for bad in (1.0, -0.5, np.nan, "a", None, [0.5, 0.5], 1j)),
    *(("normalized_entropy", {"weights": PAIRS, "mask": bad}, "mask")
      for bad in ("causal", 1.0, np.ones((7, 3), bool), np.ones((2, 3)), {})),
    *(("jensen_shannon", {"weights_a": PAIRS, "weights_b": bad}, "weights_b")
      for bad in (*NO_FLOATS.values(), None, np.ones((3, 2), "f4"), np.ones((1, 2, 3), "f4"))),
    *(("logit_variance", {"logits": bad}, "logits") for bad in (*NO_FLOATS.values(), 1.0)),
    *(("softmax_vjp", {"weights": PAIRS, "dweights": bad}, "dweights")
      for bad in (*NO_FLOATS.values(), None, np.ones((3, 2), "f4"))),
    *(("gradient_through_top_keys", {"weights": PAIRS, "dlogits": PAIRS, "k": bad}, "k")
      for bad in (0, 4, -1, 1.0, "1", None, [1])),
    *(("attention_rollout", {"weights": bad}, "weights") for bad in (
        *(v for k, v in NO_FLOATS.items() if k not in ("dict", "set")), None, [],
        np.ones((2, 3), "f4"), np.ones((1, 1, 2, 3), "f4"), np.ones((0, 1, 2, 2), "f4"),
        [np.ones((1, 2, 2), "f4"), np.ones((1, 3, 3), "f4")], [np.ones((1, 2, 2), "f4"), "text"])),
    *(("attention_rollout", {"weights": np.ones((1, 1, 2, 2), "f4"), "residual": bad}, "residual")
      for bad in (1.0, -0.5, np.nan, "a", None, 1j)),
    *(("attention_rollout", {"weights": np.ones((1, 1, 2, 2), "f4"), "head_reduction": bad},
       "head_reduction") for bad in ("min", None, 3, [], {})),
    *(("cross_rollout", {"cross_weights": np.ones((1, 2, 3), "f4"), "encoder_rollout": bad},
       "encoder_rollout") for bad in (*NO_FLOATS.values(), np.ones((2, 3), "f4"), 1.0)),
    *((name, {"doutput": bad}, "doutput")
      for name in ("attention_gradients", "logit_scale_sweep")
      for bad in (*NO_FLOATS.values(), None, np.ones((3, 2), "f4"), np.ones((2, 2, 2), "f4"))),
    *(("attention_gradients", {key: bad}, key)
      for key in ("query", "key", "value") for bad in NO_FLOATS.values()),
    *(("logit_scale_sweep", {"scales": bad}, "scales")
      for bad in (*NO_FLOATS.values(), None, 1.0, np.ones((2, 2), "f4"))),
]  # fmt: skip


def call_statistics_mistaken(case: Any) -> Any:
    name, bad, _ = case
    tokens: dict[str, Any] = {}
    if name in ("attention_gradients", "logit_scale_sweep"):
        tokens = {n: np.ones((m, 2), "f4") for n, m in
                  (("query", 2), ("key", 3), ("value", 3), ("doutput", 2))}  # fmt: skip
    if name == "logit_scale_sweep":
        tokens["scales"] = np.ones(2, "f4")
    return getattr(analysis, name)(**{**tokens, **bad})


# --- gradients at every step of attention ---


@st.composite
def station_cases(draw):
    sizes = [size for size in SIZES if size[0] != (2, 1)]
    case = draw(arguments(sizes=sizes, scores=("scaled", "dot"), dtypes=DTYPES[:1], shared=False))
    batch, length, *_, dv = case.size
    return case, filled(np.random.default_rng(draw(seeds)), (*batch, length, dv))


def call_stations(case: Any) -> Any:
    given_, doutput = case
    doutput = jnp.asarray(doutput, jnp.float32)
    gradients = analysis.attention_gradients(**given_.keywords(), doutput=doutput)
    return gradients.dlogits, gradients.dweights


def expect_stations(case: Any) -> Any:
    given_, doutput = case
    plain = attend(given_)
    may = allowed(given_.mask, *given_.size[:3])
    value = given_.kept["value"]
    fine = plain.sure & (moderate(value).all(-1)[..., None, :] | ~may).all(-1)
    with np.errstate(all="ignore"):
        dweights = np.where(may, doutput @ np.swapaxes(np.nan_to_num(value), -1, -2), 0)
        through = plain.weights * dweights
        dlogits = plain.weights * (dweights - through.sum(-1, keepdims=True))
        return dlogits, dweights, fine, plain.size


def compare_stations(case: Any, got: Any, expected: Any) -> None:
    *right, fine, size = expected
    for name, array, correct in zip(("dlogits", "dweights"), got, right, strict=True):
        assert_kind(name, array, correct.shape, np.float32)
        largest = np.abs(right[1][fine]).max(initial=0)  # dlogits are differences of these
        bound = 4 * tolerance(np.float32, False, size)
        assert_near(name, array, correct, bound, where=fine[..., None], terms=largest)


@st.composite
def rollout_cases(draw):
    layers, heads, length = draw(st.sampled_from([(1, 1, 2), (2, 3, 5), (3, 2, 1), (1, 2, 0)]))
    batch = draw(st.sampled_from([(), (2,), (0,)]))
    rng = np.random.default_rng(draw(seeds))
    shape = (layers, *batch, heads, length, length)
    weights = softmax(filled(rng, shape), rng.random(shape) < 0.8)[0].astype("f4")
    return weights, draw(st.sampled_from([0, 0.5, 0.25])), draw(st.sampled_from(["mean", "max"]))


def call_rollout(case: Any) -> Any:
    weights, residual, reduction = case
    return analysis.attention_rollout(weights, residual=residual, head_reduction=reduction)


def expect_rollout(case: Any) -> np.ndarray:
    weights, residual, reduction = case

    def normalized(rows: np.ndarray) -> np.ndarray:
        total = rows.sum(-1, keepdims=True)
        return rows / np.where(total == 0, 1, total)

    eye = rollout = np.eye(weights.shape[-1])
    for layer in weights.astype(float):
        heads = layer.mean(-3) if reduction == "mean" else normalized(layer.max(-3))
        rollout = normalized((1 - residual) * heads + residual * eye) @ rollout
    return rollout


KINDS = [
    Kind("masked_softmax", softmax_cases(), call_softmax, expect_softmax, compare_softmax, 300, 10),
    mistakes("masked_softmax, a mistake", MISTAKEN_SOFTMAXES, call_softmax_mistaken),
    Kind("analysis: statistics of weights", weight_cases(), call_statistics, statistics_of,
         compare_statistics, 60, 3),
    Kind("analysis: gradients at every station", station_cases(), call_stations, expect_stations,
         compare_stations, 80, 3),
    Kind("analysis: attention_rollout", rollout_cases(), call_rollout, expect_rollout,
         lambda case, got, expected: assert_near("rollout", got, expected, 4e-6), 100, 3),
    mistakes("analysis, a mistake", MISTAKEN_STATISTICS, call_statistics_mistaken),
]  # fmt: skip
