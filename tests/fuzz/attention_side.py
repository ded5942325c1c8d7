"""Attention in NumPy, and which of its rows are certain when arguments hold extreme numbers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    DTYPES,
    MODERATE,
    SIZES,
    filled,
    given,
    narrowed,
    plain_or_not,
    seeds,
)
from hypothesis import strategies as st
from masks_and_biases import allowed, bias_values, biases, built, built_bias, masks
from outcomes import Refused
from score_cases import SCORE_CASES

SCORES = [name for name in SCORE_CASES if name != "own"]
IMPLEMENTATIONS = [None, "reference", "tiled", "tiled"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Arguments of an attention function, in float64 before conversion to `dtype`."""

    size: tuple  # *B, T, S, Dq, Dk, Dv
    dtype: Any
    x64: bool
    score: str
    arrays: dict[str, np.ndarray]  # "query", "key", "value"
    container: str
    mask: Any  # a spec of masks_and_biases.py, or None
    bias: Any
    params: Any  # float64

    def __repr__(self) -> str:
        parts = {"size": self.size, "dtype": np.dtype(self.dtype).name, "x64": self.x64}
        parts |= {"score": self.score, "container": self.container, **self.arrays}
        parts |= {"mask": self.mask, "bias": self.bias, "params": self.params}
        return ", ".join(f"{name}={value!r}" for name, value in parts.items()).replace("\n", "")

    @property
    def batch(self) -> tuple[int, ...]:
        return self.size[0]

    @property
    def kept(self) -> dict[str, np.ndarray]:
        """Query, key and value as JAX keeps them, in float64."""
        return {name: narrowed(x, self.dtype, self.x64) for name, x in self.arrays.items()}

    @property
    def output_dtype(self) -> Any:
        return np.float32 if self.dtype == np.float64 and not self.x64 else self.dtype

    def keywords(self) -> dict[str, Any]:
        """Returns the arguments in the form that `attention` takes."""
        tokens = {name: given(x, self.dtype, self.container) for name, x in self.arrays.items()}
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf.astype(np.float32)), self.params)
        return {
            **tokens,
            "score": SCORE_CASES[self.score].score,
            "params": params,
            "mask": None if self.mask is None else built(self.mask),
            "bias": None if self.bias is None else built_bias(self.bias),
        }


@functools.cache
def params_of(score: str, query_dim: int, key_dim: int) -> Any:
    params = SCORE_CASES[score].score.init(jax.random.key(1), query_dim, key_dim)
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


@st.composite
def arguments(draw, scores=tuple(SCORES), sizes=tuple(SIZES), dtypes=tuple(DTYPES), shared=True):
    """Draws valid arguments with any contents; key and value may lack batch axes."""
    size = batch, length, keys, dq, dk, dv = draw(st.sampled_from(sizes))
    dtype, x64 = draw(st.sampled_from(dtypes))
    score = draw(st.sampled_from(scores))
    rng = np.random.default_rng(draw(seeds))
    leads = [batch, batch, batch] + ([batch[1:], (1,) * len(batch)] if shared else [])
    arrays = {
        "query": filled(rng, (*batch, length, dq), draw(plain_or_not)),
        "key": filled(rng, (*draw(st.sampled_from(leads)), keys, dk), draw(plain_or_not)),
        "value": filled(rng, (*draw(st.sampled_from(leads)), keys, dv), draw(plain_or_not)),
    }
    mask = draw(st.one_of(st.none(), masks(batch, length, keys), masks(batch, length, keys, 0)))
    bias = draw(st.one_of(st.none(), st.none(), biases(batch, length, keys)))
    if mask is not None and draw(st.booleans()):
        arrays = with_poison(arrays, allowed(mask, batch, length, keys), batch)
    container = draw(st.sampled_from(["jax", "jax", "numpy", "list"]))
    params = params_of(score, dq, dk)
    return Arguments(size, dtype, x64, score, arrays, container, mask, bias, params)


def with_poison(arrays: dict, table: np.ndarray, batch: tuple[int, ...]) -> dict:
    """Returns the arrays with NaN in each query, key and value that is in no allowed pair."""
    unused = {"query": ~table.any(-1), "key": ~table.any(-2), "value": ~table.any(-2)}
    poisoned = {}
    for name, x in arrays.items():
        unread, lead = unused[name], x.shape[:-2]
        while unread.ndim - 1 > len(lead):  # a shared array: unused by all examples
            unread = unread.all(0)
        for axis, n in enumerate(lead):
            if n == 1:
                unread = unread.all(axis, keepdims=True)
        poisoned[name] = np.where(unread[..., None], np.nan, x)
    return poisoned


@dataclasses.dataclass(frozen=True)
class Expected:
    """Expected results in float64, and which of their rows are certain."""

    logits: np.ndarray  # [*B, T, S]
    weights: np.ndarray
    output: np.ndarray  # [*B, T, Dv]
    logsumexp: np.ndarray
    entropy: np.ndarray
    max_logit: np.ndarray
    sure: np.ndarray  # bool [*B, T]: rows whose logits are certain
    sure_output: np.ndarray  # bool [*B, T]: rows whose output is certain
    size: float  # of the largest term of a certain logit


def check_dims(case: Arguments) -> None:
    *_, query_dim, key_dim, _ = case.size
    if SCORE_CASES[case.score].score.needs_equal_dims and query_dim != key_dim:
        raise Refused("key")


def attend(case: Arguments, extra: np.ndarray | None = None) -> Expected:
    """Computes attention pair by pair; masked pairs are not read.

    Args:
        case: the arguments.
        extra: bool [*B, T, S], a further mask.
    """
    check_dims(case)
    batch, length, keys, *_ = case.size
    query, key, value = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in case.kept.values())
    table = allowed(case.mask, batch, length, keys)
    table = table if extra is None else table & extra
    bias = bias_values(case.bias, batch, length, keys)
    pair = SCORE_CASES[case.score].pair
    with np.errstate(all="ignore"):
        logits = pair(case.params, query[..., :, None, :], key[..., None, :, :])
        if case.score == "cosine":  # 0 for a vector of zeros, as documented
            zeros = ~query.any(-1)[..., :, None] | ~key.any(-1)[..., None, :]
            logits = np.where(zeros, 0, logits)
        logits = np.broadcast_to(logits, table.shape) + bias
    certain = moderate(query).all(-1)[..., :, None] & moderate(key).all(-1)[..., None, :]
    if case.score == "cosine":
        certain &= ~lost(query)[..., :, None] & ~lost(key)[..., None, :]
    # A bias of -inf masks.
    certain &= moderate(bias) | (bias == -np.inf)
    sure = (certain | ~table).all(-1)
    read = table.any(-2)
    values_fine = (moderate(value).all(-1) | ~read).all(-1)[..., None]
    lengths = [np.where(moderate(x), x, 0) ** 2 for x in (query, key)]
    size = max(np.max((x.sum(-1)), initial=0.0) for x in lengths) + np.max(
        np.abs(logits), where=certain & table & np.isfinite(logits), initial=1.0
    )
    results = softmax(logits, table)
    with np.errstate(all="ignore"):
        products = np.where(table[..., None], value[..., None, :, :], 0) * results[0][..., None]
        output = products.sum(-2)
    return Expected(logits, results[0], output, *results[1:], sure, sure & values_fine, size)


def lost(vectors: np.ndarray) -> np.ndarray:
    """Returns whether a vector loses its direction when denormal numbers are flushed to 0."""
    largest = np.max(np.abs(vectors), axis=-1)
    return (largest > 0) & (largest < np.finfo(np.float32).tiny)


def moderate(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.abs(array) <= MODERATE


def softmax(logits: np.ndarray, may: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns (weights, logsumexp, entropy, largest logit); 0, -inf, 0, -inf without keys."""
    with np.errstate(all="ignore"):
        visible = np.where(may, logits, -np.inf)
        largest = np.max(visible, axis=-1, initial=-np.inf)
        shift = np.where(largest == -np.inf, 0, largest)[..., None]
        exponentials = np.exp(visible - shift)
        total = exponentials.sum(-1)
        weights = exponentials / np.where(total == 0, 1, total)[..., None]
        logsumexp = np.where(total == 0, -np.inf, np.log(total) + shift[..., 0])
        surprise = np.where(weights > 0, -weights * np.log(np.where(weights > 0, weights, 1)), 0)
    return weights, logsumexp, surprise.sum(-1), largest
