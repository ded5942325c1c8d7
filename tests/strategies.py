"""Strategies for hypothesis: calls of the library, each with what NumPy makes of it in float64.

A mask is drawn with its table, and a bias with its values, so that a property compares two
computations that share nothing. Letters: `*B` batch axes, `T` queries, `S` keys.
"""

import bisect
import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from conformance import short
from hypothesis import strategies as st
from oracles import assert_close
from score_cases import CORE_SCORES, SCORE_CASES, numpy_params

import attention_jax as aj
from attention_jax.scores.literature import LITERATURE

Shape = tuple[int, ...]
MODERATE = 100.0  # products of entries up to this size neither overflow nor lose precision
EXTREME = {
    "zeros": (0.0,), "huge": (1e30, -1e30), "max": (np.finfo(np.float32).max,), "tiny": (1e-40,),
    "nan": (np.nan,), "nonfinite": (np.nan, np.inf, -np.inf), "-inf": (-np.inf,),
}  # fmt: skip
SIZES = [  # *B, T, S, Dq, Dk, Dv; only a few, so that examples share compiled programs
    ((2,), 2, 3, 2, 2, 3),
    ((), 2, 3, 2, 2, 2),
    ((2,), 3, 2, 3, 3, 1),
    ((2,), 2, 3, 3, 2, 2),
    ((), 5, 3, 2, 2, 2),
    ((2, 1), 2, 3, 2, 2, 2),
    ((), 1, 1, 1, 1, 1),
    ((0,), 2, 3, 2, 2, 2),
    ((2,), 0, 3, 2, 2, 2),
    ((2,), 2, 0, 2, 2, 2),
    ((), 2, 3, 2, 2, 0),
]
SCORES = [name for name in CORE_SCORES if name != "own"]
if hypothesis.settings().max_examples > 100:  # the profile `nightly`: each is a program of its own
    SCORES += LITERATURE
F4, F8 = (np.float32, False), (np.float64, True)  # dtype, and whether float64 is on
DTYPES = [F4, F4, F8, (jnp.bfloat16, False), (np.float16, False), (np.float64, False)]

seeds = st.integers(0, 2**20)
fillings = st.one_of(st.just("plain"), st.just("plain"), st.sampled_from(list(EXTREME)))


def examples(percent: int) -> hypothesis.settings:
    """Returns the settings of a property that takes a share of the profile's examples."""
    every = hypothesis.settings().max_examples
    return hypothesis.settings(max_examples=max(1, percent * every // 100))


def filled(rng: np.random.Generator, shape: Shape, filling: str = "plain") -> np.ndarray:
    """Returns float64 numbers that bfloat16 can hold; a third of them is of an extreme filling."""
    array = short(rng.normal(size=shape))
    if filling == "plain":
        return array
    return np.where(rng.random(shape) < 0.35, rng.choice(EXTREME[filling], shape), array)


def moderate(array: np.ndarray) -> np.ndarray:
    """Returns where float32 loses nothing: 0, or neither too small nor too large."""
    size = np.abs(array)
    return (size == 0) | ((size > 1e-30) & (size <= MODERATE))


# --- masks and biases ---


@st.composite
def masks(draw, batch: Shape, length: int, keys: int, depth: int = 1) -> tuple[Any, np.ndarray]:
    """Draws a mask and its table, bool [*B, T, S]."""
    kinds = ["table", "table", "causal", "local", "padding", "segment", "window"]
    kind = draw(st.sampled_from(kinds + ["and", "or", "not"] * bool(depth)))
    i, j = np.arange(length)[:, None], np.arange(keys)
    rng = np.random.default_rng(draw(seeds))
    lead = draw(st.sampled_from([batch, (), (1,) * len(batch)]))
    if kind in ("and", "or", "not"):
        left, right = (draw(masks(batch, length, keys, depth - 1)) for _ in range(2))
        if kind == "not":
            return ~left[0], ~left[1]
        pairs = zip(left, right, strict=True)
        return tuple(a & b if kind == "and" else a | b for a, b in pairs)
    if kind == "table":
        shape = draw(st.sampled_from([(length, keys), (1, keys), (length, 1), (1, 1)]))
        mask = table = rng.random((*lead, *shape)) < draw(st.sampled_from([0.7, 0.5, 0.0, 1.0]))
    elif kind == "causal":
        offset = draw(st.sampled_from([0, 0, 1, -1, -9, 2**31 - 1, -(2**31) + 1]))
        if draw(st.booleans()):
            offset = np.full(lead, offset) + rng.integers(0, 2, lead) * (offset < 9)
        mask, table = aj.causal_mask(offset), j <= i + np.asarray(offset)[..., None, None]
    elif kind == "local":
        sides = draw(st.tuples(*[st.sampled_from([None, 0, 1, 9, 2**31 - 1])] * 2))
        left, right = (2**40 if side is None else side for side in sides)
        mask, table = aj.local_mask(*sides), (i - left <= j) & (j <= i + right)
    elif kind == "padding":
        ends = rng.integers(0, keys + 1, lead).astype(draw(st.sampled_from(["i4", "i1", "u2"])))
        query_ends = rng.integers(0, length + 1, lead)
        mask = aj.padding_mask(ends, query_ends)
        table = (j < ends[..., None, None]) & (i < query_ends[..., None, None])
    elif kind == "segment":
        queries, segments = rng.integers(0, 3, (*lead, length)), rng.integers(0, 3, (*lead, keys))
        mask = aj.segment_mask(queries, segments)
        table = queries[..., :, None] == segments[..., None, :]
    else:
        centers = rng.integers(-1, keys + 2, (*lead, length)) + np.float32(draw(st.floats(0, 1)))
        radius = draw(st.sampled_from([0, 1, 2**31 - 1]))
        centers = np.where(rng.random(centers.shape) < 0.2, np.inf, centers).astype("f4")
        mask = aj.window_mask(centers, radius)
        table = np.abs(j - centers[..., None].astype(float)) <= radius
    return mask, np.broadcast_to(table, (*batch, length, keys))


@st.composite
def biases(draw, batch: Shape, length: int, keys: int, depth: int = 1) -> tuple[Any, np.ndarray]:
    """Draws a bias of float32 arrays and its values, float64 [*B, T, S]."""
    kinds = ["array", "array", "alibi", "relative", "t5", "gaussian"]
    kind = draw(st.sampled_from(kinds + ["sum"] * bool(depth)))
    rng, lead = np.random.default_rng(draw(seeds)), draw(st.sampled_from([batch, ()]))
    distance = np.arange(keys) - np.arange(length)[:, None]
    filling = draw(fillings)

    def array(*shape: int, filling: str = filling) -> np.ndarray:
        return filled(rng, (*lead, *shape), filling).astype("f4")

    if kind == "sum":
        left = draw(biases(batch, length, keys, depth - 1))
        numbers = array(1, keys)
        nothing = aj.alibi_bias(jnp.float32(0))  # that sums of arrays are biases, of any ranks
        with np.errstate(invalid="ignore"):  # of infinities of both signs
            return nothing + left[0] + jnp.asarray(numbers), left[1] + numbers.astype(float)
    if kind == "array":
        bias = array(*draw(st.sampled_from([(length, keys), (1, keys), (length, 1)])))
        values = bias.astype(float)
    elif kind == "alibi":
        slopes = array(filling="zeros")
        bias = aj.alibi_bias(slopes)
        values = -slopes[..., None, None].astype(float) * np.abs(distance)
    elif kind == "relative":
        radius = draw(st.integers(0, 3))
        table = array(2 * radius + 1)
        bias = aj.relative_bias(table)
        values = table.astype(float)[..., np.clip(distance, -radius, radius) + radius]
    elif kind == "t5":
        both, table = draw(st.booleans()), array(draw(st.sampled_from([4, 8])))
        most = draw(st.sampled_from([8, 128]))
        bias = aj.t5_bias(table, bidirectional=both, max_distance=most)
        numbers = [bucket_of(d, table.shape[-1], most, both) for d in distance.reshape(-1)]
        values = table.astype(float)[..., np.array(numbers, int).reshape(distance.shape)]
    else:
        centers, sigma = array(length, filling="zeros"), draw(st.sampled_from([1.0, 0.5, 3.0]))
        bias = aj.gaussian_bias(centers, sigma)
        values = -(((np.arange(keys) - centers[..., None].astype(float)) / sigma) ** 2) / 2
    return bias, np.broadcast_to(values, (*batch, length, keys))


def bucket_of(distance: int, buckets: int, max_distance: int, both: bool) -> int:
    """The bucket of one distance, by Raffel et al. 2020, in integers."""
    n = buckets // 2 if both else buckets
    first = n if both and distance > 0 else 0
    d, m = abs(distance) if both else max(-distance, 0), n // 2
    if d < m:
        return first + d

    def is_before(i: int) -> bool:  # log(d / m) / log(max_distance / m) (n - m) < i
        return bool(d ** (n - m) * m**i < max_distance**i * m ** (n - m))

    return first + m + bisect.bisect_left(range(1, n - m), True, key=is_before)


# --- calls of attention ---


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of an attention function, and what NumPy reads of them."""

    size: tuple  # *B, T, S, Dq, Dk, Dv
    dtype: Any
    x64: bool
    score: str
    arrays: dict[str, np.ndarray]  # "query", "key", "value", in float64
    container: Any  # what holds the arrays: jnp.asarray, np.asarray or lists
    mask: tuple[Any, np.ndarray]  # the mask, and its table, bool [*B, T, S]
    bias: tuple[Any, np.ndarray]
    params: Any  # float64; the library takes them as float32

    @property
    def kept(self) -> dict[str, np.ndarray]:
        """Query, key and value as JAX keeps them, in float64; too large numbers are infinite."""
        dtype = self.dtype if self.x64 or self.dtype != np.float64 else np.float32
        with np.errstate(all="ignore"):
            return {k: x.astype(dtype).astype(np.float64) for k, x in self.arrays.items()}

    @property
    def output_dtype(self) -> Any:
        return np.float32 if self.dtype == np.float64 and not self.x64 else self.dtype

    def keywords(self, *without: str) -> dict[str, Any]:
        """Returns the arguments in the form that `attention` takes."""
        with np.errstate(all="ignore"):
            tokens = {k: self.container(x.astype(self.dtype)) for k, x in self.arrays.items()}
        score, params = SCORE_CASES[self.score].score, jax.tree.map(jnp.float32, self.params)
        more = {"score": score, "params": params, "mask": self.mask[0], "bias": self.bias[0]}
        return {k: v for k, v in (tokens | more).items() if k not in without}


def as_list(array: np.ndarray) -> Any:
    """Returns nested lists where these say the dtype and the shape."""
    return array.tolist() if array.dtype == np.float32 and array.size else array


@st.composite
def calls(
    draw, scores=tuple(SCORES), sizes=tuple(SIZES), dtypes=tuple(DTYPES), extreme=True
) -> Call:
    """Draws a right call with any numbers; key and value may lack axes of the batch."""
    score = draw(st.sampled_from(scores))
    equal = SCORE_CASES[score].score.needs_equal_dims
    sizes = [size for size in sizes if not equal or size[3] == size[4]]
    size = batch, length, keys, dq, dk, dv = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(seeds))
    content = fillings if extreme else st.just("plain")
    leads = st.sampled_from([batch, batch, batch[1:], (1,) * len(batch)] if extreme else [batch])
    arrays = {
        "query": filled(rng, (*batch, length, dq), draw(content)),
        "key": filled(rng, (*draw(leads), keys, dk), draw(content)),
        "value": filled(rng, (*draw(leads), keys, dv), draw(content)),
    }
    everything = None, np.ones((*batch, length, keys), bool)
    mask = draw(st.one_of(masks(batch, length, keys), st.just(everything)))
    nothing = None, np.zeros((*batch, length, keys))
    bias = draw(st.one_of(st.just(nothing), biases(batch, length, keys))) if extreme else nothing
    if draw(st.booleans()):  # NaN in each token that no allowed pair reads
        for name, unread in unread_tokens(mask[1]).items():
            if arrays[name].shape[:-2] == batch:
                arrays[name] = np.where(unread[..., None], np.nan, arrays[name])
    container = draw(st.sampled_from([jnp.asarray, jnp.asarray, np.asarray, as_list]))
    params = jax.tree.map(short, numpy_params(SCORE_CASES[score].score, dq, dk))
    dtype = draw(st.sampled_from(dtypes))
    return Call(size, *dtype, score, arrays, container, mask, bias, params)


def unread_tokens(table: np.ndarray) -> dict[str, np.ndarray]:
    """Returns which queries [*B, T], keys and values [*B, S] are in no allowed pair."""
    return {"query": ~table.any(-1), "key": ~table.any(-2), "value": ~table.any(-2)}


# --- the NumPy side ---


def logits_of(call: Call, arrays: dict, bias: np.ndarray, params: Any) -> np.ndarray:
    """Returns the logits of all pairs [*B, T, S]; arrays may be complex."""
    query, key = arrays["query"][..., :, None, :], arrays["key"][..., None, :, :]
    with np.errstate(all="ignore"):
        logits = SCORE_CASES[call.score].pair(params, query, key)
        if call.score in ("cosine", "ngpt"):  # 0 for a vector of zeros, as documented
            logits = np.where(query.any(-1) & key.any(-1), logits, 0)
        return logits + bias


def softmax(logits: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns weights [*B, T, S] and the statistics of rows; masked pairs are not read."""
    with np.errstate(all="ignore"):
        visible = np.where(table, logits, 0)
        largest = np.max(visible.real, axis=-1, initial=-np.inf, where=table)
        shift = np.where(largest == -np.inf, 0, largest)[..., None]
        exponentials = np.where(table, np.exp(visible - shift), 0)
        total = exponentials.sum(-1)
        weights = exponentials / np.where(total == 0, 1, total)[..., None]
        logsumexp = np.where(total == 0, -np.inf, np.log(total) + shift[..., 0])
        entropy = -(weights * np.log(np.where(weights == 0, 1, weights))).sum(-1)
    return weights, {"logsumexp": logsumexp, "entropy": entropy, "max_logit": largest}


def averaged(weights: np.ndarray, value: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the output [*B, T, Dv]; values of masked pairs are not read."""
    with np.errstate(all="ignore"):
        read = np.where(table[..., None], value[..., None, :, :], 0)
        return (weights[..., None] * read).sum(-2)


def certain_rows(call: Call, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns which rows [*B, T] of weights, and of the output, read only moderate numbers."""
    query, key, value = (moderate(x).all(-1) for x in call.kept.values())
    bias = call.bias[1]
    pairs = query[..., :, None] & key[..., None, :] & (moderate(bias) | (bias == -np.inf))
    sure = (pairs | ~table).all(-1)
    # A value that is not finite and that any query sees may reach all of its example: 0 times NaN.
    spoiled = ~np.isfinite(call.kept["value"]).all(-1) & table.any(-2)
    sure_output = sure & (value[..., None, :] | ~table).all(-1) & ~spoiled.any(-1)[..., None]
    return sure, sure_output


def tolerance(call: Call, logits: np.ndarray, sure: np.ndarray, table: np.ndarray) -> float:
    """Returns the relative tolerance: rounding of the dtype, and of the terms of the logits."""
    squares = [np.where(moderate(x), x, 0) ** 2 for x in list(call.kept.values())[:2]]
    terms = max(np.max(square.sum(-1), initial=0.0) for square in squares)
    read = table & sure[..., None] & np.isfinite(logits)
    terms += np.max(np.abs(logits), where=read, initial=1.0)
    if call.x64:
        return 1e-12 * (1 + terms)
    rounding = {jnp.bfloat16: 2.0**-8, np.float16: 2.0**-10}.get(call.dtype, 0.0)
    if call.score not in ("dot", "scaled"):  # whose features are the tokens, which are not rounded
        rounding *= 2
    return 2e-6 + rounding + 4 * 2.0**-23 * terms


def assert_near(name, got, expected, bound, where=True, terms=0.0) -> None:
    """`assert_close` for the entries `where`, a broadcastable bool."""
    got = np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape, f"{name}: shape {got.shape}, not {expected.shape}"
    got, expected = (np.where(where, array, 0) for array in (got, expected))
    # XLA flushes denormal numbers to 0.
    assert_close(name, got, expected, bound, max(terms, 1e-37 / bound))
