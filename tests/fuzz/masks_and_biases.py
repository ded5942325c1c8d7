"""Kinds for masks and biases: random ones, each with its table in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from arrays import (
    MODERATE,
    NO_FLOATS,
    NO_INTEGERS,
    assert_near,
    filled,
    plain_or_not,
    seeds,
)
from hypothesis import strategies as st
from outcomes import Kind, mistakes

import attention_jax as aj
from attention_jax.pairwise.biases import as_bias
from attention_jax.pairwise.masks import as_mask

Shape = tuple[int, ...]
offsets = st.sampled_from([0, 0, 1, 2, -1, -2, 7, -9, 2**31 - 1, -(2**31) + 1])
sides = st.sampled_from([None, 0, 1, 2, 9, 2**31 - 1])


# --- masks, as ("kind", *NumPy arguments) ---


@st.composite
def masks(draw, batch: Shape, length: int, keys: int, depth: int = 2):
    """Draws a tree of masks that fits [*B, T, S]."""
    kinds = ["causal", "local", "padding", "segment", "window", "table", "table", "table"]
    kind = draw(st.sampled_from(kinds + (["and", "or", "not"] if depth else [])))
    if kind in ("and", "or", "not"):
        parts = [masks(batch, length, keys, depth - 1) for _ in range(1 if kind == "not" else 2)]
        return (kind, *map(draw, parts))
    if kind == "causal":
        return kind, draw(offsets)
    if kind == "local":
        return kind, draw(sides), draw(sides)
    rng = np.random.default_rng(draw(seeds))
    lead = draw(st.sampled_from([(), batch, (1,) * len(batch)]))
    if kind == "padding":
        lengths = rng.integers(0, keys + 1, lead).astype(draw(st.sampled_from(["i4", "i1", "u2"])))
        return kind, lengths, draw(st.sampled_from([None, rng.integers(0, length + 1, lead)]))
    if kind == "segment":
        return kind, rng.integers(0, 3, (*lead, length)), rng.integers(0, 3, (*lead, keys))
    if kind == "window":
        centers = rng.integers(-1, keys + 2, (*lead, length))
        centers = draw(st.sampled_from([centers, centers + rng.random(centers.shape)]))
        if draw(st.booleans()) and centers.dtype == float:
            centers = np.where(rng.random(centers.shape) < 0.3, np.nan, centers)
        return (
            kind,
            centers.astype("f4" if centers.dtype == float else "i4"),
            draw(st.sampled_from([0, 1, 2, 2**31 - 1])),
        )
    shape = draw(st.sampled_from([(length, keys), (1, keys), (length, 1), (1, 1)]))
    return kind, rng.random((*lead, *shape)) < draw(st.sampled_from([0.0, 0.5, 0.7, 1.0]))


def built(spec: Any) -> Any:
    """Builds the library's mask."""
    kind, *parts = spec
    if kind in ("and", "or"):
        left, right = map(built, parts)
        return left & right if kind == "and" else left | right
    if kind == "not":
        return ~built(parts[0])
    if kind == "table":
        return parts[0]
    makers = {
        "causal": aj.causal_mask, "local": aj.local_mask, "padding": aj.padding_mask,
        "segment": aj.segment_mask, "window": aj.window_mask,
    }  # fmt: skip
    return makers[kind](*parts)


def allowed(spec: Any, batch: Shape, length: int, keys: int) -> np.ndarray:
    """Returns the table of a mask, bool [*B, T, S]."""
    full = (*batch, length, keys)
    if spec is None:
        return np.ones(full, bool)
    kind, *parts = spec
    i, j = np.arange(length)[:, None], np.arange(keys)[None, :]
    if kind in ("and", "or"):
        left, right = (allowed(part, batch, length, keys) for part in parts)
        return left & right if kind == "and" else left | right
    if kind == "not":
        return ~allowed(parts[0], batch, length, keys)
    if kind == "causal":
        table = j <= i + parts[0]
    elif kind == "local":
        left, right = (2**40 if side is None else side for side in parts)
        table = (i - left <= j) & (j <= i + right)
    elif kind == "padding":
        ends, query_ends = parts
        table = j < ends.astype(int)[..., None, None]
        if query_ends is not None:
            table = table & (i < query_ends[..., None, None])
    elif kind == "segment":
        table = parts[0][..., :, None] == parts[1][..., None, :]
    elif kind == "window":
        table = np.abs(j - parts[0][..., :, None].astype(float)) <= parts[1]
    else:
        table = parts[0]
    return np.broadcast_to(table, full)


@st.composite
def mask_cases(draw):
    batch = draw(st.sampled_from([(), (), (2,), (2, 1), (0,)]))
    length, keys = draw(st.sampled_from([0, 1, 2, 3, 5])), draw(st.sampled_from([0, 1, 2, 3, 5]))
    return draw(masks(batch, length, keys, 3)), batch, length, keys


def table_of(case: Any) -> np.ndarray:
    spec, _, length, keys = case
    mask = built(spec)
    if not isinstance(mask, aj.Mask):  # one table, or a combination of tables
        mask = as_mask(mask)
    return np.asarray(mask.materialize(length, keys))


def same_table(case: Any, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == bool
    # A mask has only the batch axes of its own arrays.
    assert got.shape[-2:] == expected.shape[-2:]
    assert np.array_equal(np.broadcast_to(got, expected.shape), expected), (got, expected)


MISTAKEN_MASKS = [  # (function, arguments, name in the error)
    *((aj.causal_mask, (bad,), "offset") for bad in (1.0, "1", None, [1], 2**31, -(2**31))),
    *((aj.local_mask, (bad, 1), "left") for bad in (-1, 1.5, "1", [1], 2**31)),
    *((aj.local_mask, (None, bad), "right") for bad in (-1, 1.5, "1", (1, 2), 2**40)),
    *((aj.padding_mask, (bad,), "key_lengths") for bad in NO_INTEGERS.values()),
    *((aj.padding_mask, (3, bad), "query_lengths") for bad in NO_INTEGERS.values()),
    *((aj.segment_mask, (bad, [1]), "query_segments") for bad in (*NO_INTEGERS.values(), 3)),
    *((aj.segment_mask, ([1], bad), "key_segments") for bad in (*NO_INTEGERS.values(), 3)),
    *((aj.window_mask, ([1.0], bad), "radius") for bad in (-1, 1.0, "1", None, True, [1])),
    *(
        (aj.window_mask, (NO_FLOATS[bad], 1), "centers")
        for bad in NO_FLOATS if bad not in ("ints",)
    ),
    *((lambda bad: aj.causal_mask() & bad, (bad,), "mask") for bad in (
        "causal", 1, 1.0, np.ones((2, 2)), [[1, 0]], np.ones((2, 2), complex), object(), {}, None
    )),
    *((lambda bad: bad | aj.local_mask(1, 1), (bad,), "mask") for bad in (
        "causal", 1, 1.0, np.ones((2, 2)), [[1, 0]], np.ones((2, 2), complex), object(), {}, None
    )),
]  # fmt: skip

# Masks that do not fit T = 2 queries and S = 3 keys.
MISFITS = [
    (as_mask(np.ones((3, 2), bool)), "mask"),
    (aj.segment_mask(np.ones(3, int), np.ones(3, int)), "query_segments"),
    (aj.segment_mask(np.ones(2, int), np.ones(2, int)), "key_segments"),
    (aj.window_mask(np.ones(3), 1), "centers"),
    (~as_mask(np.ones((3, 2), bool)), "mask"),
    (aj.causal_mask() & np.ones((5, 3), bool), "mask"),
]
MISTAKEN_MASKS += [(lambda mask: mask.materialize(2, 3), (mask,), name) for mask, name in MISFITS]


def call_of(case: Any) -> Any:
    function, arguments, _ = case
    return function(*arguments)


# --- biases ---


@st.composite
def bias_cases(draw):
    length, keys = draw(st.sampled_from([0, 1, 2, 3, 5])), draw(st.sampled_from([0, 1, 2, 3, 5]))
    return draw(biases((), length, keys, 2)), (), length, keys


@st.composite
def biases(draw, batch: Shape, length: int, keys: int, depth: int = 1):
    """Draws a tree of biases that fits [*B, T, S], with float32 arrays."""
    kinds = ["array", "array", "alibi", "relative", "t5", "gaussian"]
    kind = draw(st.sampled_from(kinds + (["sum"] if depth else [])))
    rng = np.random.default_rng(draw(seeds))
    if kind == "sum":
        return (kind, *(draw(biases(batch, length, keys, depth - 1)) for _ in range(2)))
    lead = draw(st.sampled_from([(), batch]))
    filling = draw(plain_or_not)
    if kind == "array":
        shape = draw(st.sampled_from([(length, keys), (1, keys), (length, 1), ()]))
        return kind, filled(rng, (*lead, *shape) if shape else (), filling).astype("f4")
    if kind == "alibi":
        return kind, filled(rng, lead, filling).astype("f4")
    if kind == "relative":
        return kind, filled(rng, (*lead, draw(st.sampled_from([1, 3, 7]))), filling).astype("f4")
    if kind == "t5":
        both = draw(st.booleans())
        table = filled(rng, (*lead, draw(st.sampled_from([4, 8]))), filling).astype("f4")
        return kind, table, both, draw(st.sampled_from([8, 128]))
    centers = filled(rng, (*lead, length), draw(st.sampled_from(["plain", "plain", "nan"])))
    return kind, centers.astype("f4"), draw(st.sampled_from([0.5, 1.0, 3.0]))


def built_bias(spec: Any) -> Any:
    kind, *parts = spec
    if kind == "sum":
        left, right = map(built_bias, parts)
        if not isinstance(left, aj.Bias) and not isinstance(right, aj.Bias):
            left = as_bias(left)
        return left + right
    if kind == "array":
        return parts[0]
    if kind == "t5":
        return aj.t5_bias(parts[0], bidirectional=parts[1], max_distance=parts[2])
    makers = {"alibi": aj.alibi_bias, "relative": aj.relative_bias, "gaussian": aj.gaussian_bias}
    return makers[kind](*parts)


def bias_values(spec: Any, batch: Shape, length: int, keys: int) -> np.ndarray:
    """Returns the table of a bias, float64 [*B, T, S]."""
    full = (*batch, length, keys)
    if spec is None:
        return np.zeros(full)
    kind, *parts = spec
    distance = np.arange(keys)[None, :] - np.arange(length)[:, None]
    with np.errstate(all="ignore"):
        if kind == "sum":
            return sum(bias_values(part, batch, length, keys) for part in parts)
        array = parts[0].astype(float)
        if kind == "array":
            table = array
        elif kind == "alibi":
            table = -array[..., None, None] * np.abs(distance)
        elif kind == "relative":
            radius = array.shape[-1] // 2
            table = array[..., np.clip(distance, -radius, radius) + radius]
        elif kind == "t5":
            of_pair = [
                _bucket(d, array.shape[-1], parts[1], parts[2]) for d in distance.reshape(-1)
            ]
            table = array[..., np.array(of_pair, int).reshape(distance.shape)]
        else:  # a window around NaN is empty; its Gaussian is that around 0
            centers = np.where(np.isnan(array), 0, array)[..., :, None]
            table = -((np.arange(keys) - centers) ** 2) / (2 * parts[1] ** 2)
    return np.broadcast_to(table, full)


def _bucket(distance: int, buckets: int, both: bool, max_distance: int) -> int:
    """The bucket of one distance, by Raffel et al. 2020."""
    n = buckets // 2 if both else buckets
    first = n if both and distance > 0 else 0
    d = abs(distance) if both else max(-distance, 0)
    m = n // 2
    if d < m:
        return first + d
    return first + min(m + int(np.log(d / m) / np.log(max_distance / m) * (n - m) + 1e-9), n - 1)


def same_bias(case: Any, got: Any, expected: np.ndarray) -> None:
    got = np.broadcast_to(got, expected.shape)
    moderate = np.abs(expected) < MODERATE
    assert_near("table", got, expected, 2e-6, where=moderate)


def bias_table(case: Any) -> Any:
    spec, _, length, keys = case
    bias = built_bias(spec)
    return np.asarray(as_bias(bias).materialize(length, keys))


MISTAKEN_BIASES = [
    *((aj.alibi_bias, (bad,), "slopes") for bad in NO_FLOATS.values()),
    *((aj.relative_bias, (bad,), "table") for bad in (*NO_FLOATS.values(), np.ones(4), 1.0)),
    *((aj.t5_bias, (bad,), "table") for bad in (*NO_FLOATS.values(), 1.0)),
    *((aj.t5_bias, (np.ones(bad),), "buckets") for bad in (0, 1, 2, 3, 5)),
    *(
        (lambda bad: aj.t5_bias(np.ones(8), max_distance=bad), (bad,), "max_distance")
        for bad in (0, -3, 2, 8.0, "8", None)
    ),
    *((aj.alibi_slopes, (bad,), "heads") for bad in (0, -1, 2.5, "2", None)),
    *((aj.gaussian_bias, (bad, 1.0), "centers") for bad in (
        "text", None, True, np.ones(2, complex), 1.0, {})),
    *((aj.gaussian_bias, (np.ones(2), bad), "sigma") for bad in (
        0, -1.0, np.nan, "1", None, [1.0, 0.0], 1j, np.ones(2, int), {})),
    *((as_bias, (bad,), "bias") for bad in NO_FLOATS.values()),
    *((lambda bad: aj.alibi_bias(0.5) + bad, (bad,), "bias") for bad in NO_FLOATS.values()),
]  # fmt: skip

KINDS = [
    Kind(
        "masks and their combinations",
        mask_cases(),
        table_of,
        lambda case: allowed(*case),
        same_table,
        many=700,
        few=12,
    ),
    mistakes("masks, a mistake", MISTAKEN_MASKS, call_of),
    Kind(
        "biases and their sums",
        bias_cases(),
        bias_table,
        lambda case: bias_values(*case),
        same_bias,
        many=500,
        few=8,
    ),
    mistakes("biases, a mistake", MISTAKEN_BIASES, call_of),
]
