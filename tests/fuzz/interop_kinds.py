"""Kinds for `interop`, the functions with the signatures of jax.nn and Flax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from arrays import (
    NO_FLOATS,
    NO_INTEGERS,
    assert_kind,
    assert_near,
    filled,
    plain_or_not,
    seeds,
    tolerance,
)
from attention_side import Arguments, attend
from hypothesis import strategies as st
from outcomes import Kind, mistakes
from score_cases import SCORE_CASES

from attention_jax import interop

F4 = np.float32


@st.composite
def interop_cases(draw):
    """Draws arrays [B, T, N, D]; each head has the arguments of attention_side.py."""
    batch, length, keys, heads, key_heads, dim = draw(st.sampled_from([
        (2, 2, 3, 2, 1, 2), (1, 3, 2, 2, 2, 3), (2, 2, 3, 4, 2, 1), (0, 2, 3, 1, 1, 2),
        (2, 0, 3, 1, 1, 2), (2, 2, 0, 1, 1, 2), (1, 1, 1, 1, 1, 1),
    ]))  # fmt: skip
    rng = np.random.default_rng(draw(seeds))
    arrays = {
        "query": filled(rng, (batch, length, heads, dim), draw(plain_or_not)),
        "key": filled(rng, (batch, keys, key_heads, dim), draw(plain_or_not)),
        "value": filled(rng, (batch, keys, key_heads, 2), draw(plain_or_not)),
    }
    options = {
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.sampled_from([None, None, 1, (0, 2), (3, 0)])),
        "query_seq_lengths": draw(st.sampled_from([None, rng.integers(0, length + 1, batch)])),
        "key_value_seq_lengths": draw(st.sampled_from([None, rng.integers(0, keys + 1, batch)])),
        "mask": draw(st.sampled_from([None, rng.random((batch, heads, length, keys)) < 0.7,
                                      rng.random((1, 1, length, keys)) < 0.7])),
    }  # fmt: skip
    score = draw(st.sampled_from(["scaled", "scaled", "additive"]))
    unbatched = batch == 1 and draw(st.booleans())
    implementation = draw(st.sampled_from([None, "reference", "tiled"]))
    return arrays, options, score, unbatched, implementation, draw(st.booleans())


def _params(score: str, dim: int) -> Any:
    return SCORE_CASES[score].score.init(jax.random.key(1), dim, dim)


def call_interop(case: Any) -> Any:
    arrays, options, score, unbatched, implementation, residual = case
    with np.errstate(all="ignore"):
        arrays = {name: x.astype(F4)[0 if unbatched else slice(None)] for name, x in arrays.items()}
    if unbatched and options["mask"] is not None:
        options = {**options, "mask": options["mask"][0]}
    return interop.dot_product_attention(
        **arrays, **options, score=SCORE_CASES[score].score,
        params=_params(score, arrays["query"].shape[-1]), implementation=implementation,
        return_residual=residual,
    )  # fmt: skip


def expect_interop(case: Any) -> Any:
    arrays, options, score, _, _, _ = case
    batch, length, heads, dim = arrays["query"].shape
    keys, key_heads = arrays["key"].shape[1:3]
    i, j = np.arange(length)[:, None], np.arange(keys)
    may = np.ones((batch, heads, length, keys), bool)
    if options["is_causal"]:
        may &= j <= i
    if options["local_window_size"] is not None:
        size = options["local_window_size"]
        left, right = size if isinstance(size, tuple) else (size, size)
        may &= (i - left <= j) & (j <= i + right)
    for name, places in (("query_seq_lengths", i), ("key_value_seq_lengths", j)):
        if options[name] is not None:
            may &= places < options[name][:, None, None, None]
    if options["mask"] is not None:
        may &= options["mask"]
    shared = np.arange(heads) // (heads // key_heads)
    per_head = {
        "query": np.moveaxis(arrays["query"], 1, 2),
        **{name: np.moveaxis(arrays[name], 1, 2)[:, shared] for name in ("key", "value")},
    }
    params = jax.tree.map(lambda leaf: np.asarray(leaf, float), _params(score, dim))
    size = ((batch, heads), length, keys, dim, dim, 2)
    return attend(Arguments(size, F4, False, score, per_head, "jax", None, None, params), may)


def compare_interop(case: Any, got: Any, expected: Any) -> None:
    *_, unbatched, _, with_residual = case
    output, residual = got if with_residual else (got, None)
    bound = tolerance(F4, False, expected.size)
    for name, array, right, sure in (
        ("output", output, expected.output, expected.sure_output[..., None]),
        ("residual", residual, expected.logsumexp, expected.sure),
    ):
        if array is None:
            continue
        right, sure = (np.moveaxis(x, 1, 2)[0 if unbatched else slice(None)] for x in (right, sure))
        assert_kind(name, array, right.shape, F4)
        assert_near(name, array, right, bound, where=sure, terms=float(name == "residual"))


MISTAKEN_INTEROP = [
    *(({name: bad}, name) for name in ("query", "key", "value") for bad in (
        *NO_FLOATS.values(), np.ones((2, 2), "f4"), np.ones((1, 1, 1, 1, 1), "f4"))),
    *(({"key": np.ones(shape, "f4")}, "key")
      for shape in ((2, 3, 3, 2), (3, 3, 2, 2), (3, 2, 2), (2, 3, 2, 5), (2, 3, 0, 2))),
    *(({"value": np.ones(shape, "f4")}, "value")
      for shape in ((2, 3, 1, 2), (2, 4, 2, 2), (1, 3, 2, 2), (3, 2, 2))),
    *(({"mask": bad}, "mask") for bad in (
        "causal", 1, np.ones((2, 3)), np.ones((7, 3), bool), np.ones((3, 1, 2, 3), bool), {})),
    *(({"bias": bad}, "bias") for bad in (
        *(v for k, v in NO_FLOATS.items() if k != "function"), np.ones((7, 3), "f4"))),
    *(({"scale": bad}, "scale") for bad in ("text", [1.0], np.ones(2), {}, np.nan, np.inf)),
    ({"scale": 0.5, "score": "dot"}, "scale"),
    *(({name: bad}, name) for name in ("query_seq_lengths", "key_value_seq_lengths") for bad in (
        *NO_INTEGERS.values(), 3, np.ones(3, int), np.ones((2, 1), int))),
    *(({"local_window_size": bad}, "local_window_size") for bad in (
        -1, 1.5, "1", (1,), (1, 2, 3), (-1, 0), (None, 1), {}, [[1], 2])),
    *(({"implementation": bad}, "implementation") for bad in ("xla", "flash", 3, ["xla"])),
    *(({"score": bad}, "score") for bad in ("skaled", None, 3)),
    *(({"params": bad}, "params") for bad in ({"v": np.ones(2)}, 3, "text")),
]  # fmt: skip


def call_interop_mistaken(case: Any) -> Any:
    good = {name: np.ones((2, n, 2, 2), "f4") for name, n in
            (("query", 2), ("key", 3), ("value", 3))}  # fmt: skip
    return interop.dot_product_attention(**{**good, **case[0]})


KINDS = [
    Kind("interop.dot_product_attention", interop_cases(), call_interop, expect_interop,
         compare_interop, 100, 4),
    mistakes("interop, a mistake", MISTAKEN_INTEROP, call_interop_mistaken),
]  # fmt: skip
