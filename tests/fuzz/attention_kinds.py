"""Kinds for `attention`, its weights, gradients and dropout, with every implementation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import (
    NO_FLOATS,
    NO_SIZES,
    SIZES,
    assert_kind,
    assert_near,
    fits,
    tolerance,
)
from attention_side import IMPLEMENTATIONS, Arguments, Expected, arguments, attend
from conformance import numpy_example
from hypothesis import strategies as st
from masks_and_biases import allowed
from outcomes import Kind, Refused, mistakes, never
from score_cases import SCORE_CASES

import attention_jax as aj

TILE = aj.BlockSizes(query=2, key=2)


def with_implementation(cases: st.SearchStrategy) -> st.SearchStrategy:
    return st.tuples(cases, st.sampled_from(IMPLEMENTATIONS))


def call(case: Any) -> Any:
    given, implementation = case
    with jax.enable_x64(given.x64):
        return aj.attention(
            **given.keywords(), implementation=implementation, block_sizes=TILE,
            return_statistics=True,
        )  # fmt: skip


def compare(case: Any, got: Any, expected: Expected) -> None:
    """Compares certain rows by value, and all others by shape and dtype."""
    given, _ = case
    output, statistics = got
    bound = tolerance(given.dtype, given.x64, expected.size)
    assert_kind("output", output, expected.output.shape, given.output_dtype)
    assert_near("output", output, expected.output, bound, where=expected.sure_output[..., None])
    wide = np.float64 if given.x64 else np.float32
    bound = tolerance(np.float32, given.x64, expected.size)
    for name, array in statistics._asdict().items():
        right = getattr(expected, name)
        assert_kind(name, array, right.shape, wide)
        # The entropy's error is as large as the logits', even where the entropy is small.
        assert_near(name, array, right, bound, where=expected.sure, terms=1.0)
    rows = expected.weights.sum(-1) == 0
    empty = np.asarray(output).astype(float)[rows & expected.sure]
    assert not empty.any(), f"rows without keys: {empty}"


def call_weights(case: Arguments) -> Any:
    with jax.enable_x64(case.x64):
        keywords = case.keywords()
        del keywords["value"]
        return aj.attention_weights(**keywords)


def compare_weights(case: Arguments, got: Any, expected: Expected) -> None:
    assert_kind("weights", got, expected.weights.shape, case.output_dtype)
    bound = tolerance(case.dtype, case.x64, expected.size)
    assert_near("weights", got, expected.weights, bound, where=expected.sure[..., None])
    masked = ~allowed(case.mask, *case.size[:3])
    weights = np.asarray(got).astype(float)
    nonzero = np.nan_to_num(weights[masked])  # all of a row that reads NaN may be NaN
    assert not nonzero.any(), f"masked pairs have weights {nonzero}"
    finite = np.isfinite(weights).all(-1)
    sums = weights.sum(-1)[finite]
    off = np.minimum(np.abs(sums), np.abs(sums - 1))
    assert np.max(off, initial=0) <= 8 * max(bound, 2e-6), f"rows sum to {sums}"


# --- invalid arguments ---


@st.composite
def mistaken(draw):
    """Draws valid arguments, one invalid argument, and names for the error."""
    good = draw(arguments(sizes=SIZES[:6], scores=("scaled", "additive", "general")))
    batch, length, keys, dq, dk, dv = good.size
    kind = draw(st.sampled_from(["token", "shape", "batch", "params", "pairs", "options", "rng"]))
    if kind == "token":
        name = draw(st.sampled_from(["query", "key", "value"]))
        bad = draw(st.sampled_from(list(NO_FLOATS.values())))
        return good, {name: bad}, (name,)
    if kind == "shape":
        name, shape = draw(st.sampled_from([
            ("query", ()), ("query", (dq,)), ("query", (*batch, length, 0)), ("key", (3,)),
            ("key", (*batch, keys, 0)), ("value", (dv,)), ("value", (*batch, keys + 7, dv)),
            ("value", ()), ("key", ()), ("query", (7, *batch, length, dq)),
        ]))  # fmt: skip
        # A query with more batch axes is valid if the other arguments fit it.
        names = ("query", "key", "value", "mask", "bias", "params")
        if name == "query" and len(shape) == len(batch) + 3:
            return good, {name: np.ones((*batch, length, dq + 11), "f4")}, names
        return good, {name: np.ones(shape, "f4")}, (name, "key" if name == "query" else name)
    if kind == "batch":
        name = draw(st.sampled_from(["key", "value"]))
        lead = draw(st.sampled_from([(7,), (2, 7), (1, 2, 1), (0,), (3,), (2,), (1,), ()]))
        if fits(lead, batch):
            lead = (7, *batch)
        dim = dk if name == "key" else dv
        return good, {name: np.ones((*lead, keys, dim), "f4")}, (name,)
    if kind == "params":
        bad = draw(st.sampled_from([
            3.0, "kernel", [1.0], {"kernel": 3.0}, {"wrong": np.ones((2, 2), "f4")},
            {"kernel": np.ones((dq, dk), int)}, {"kernel": np.ones((dq + 1, dk), "f4")},
            {"kernel": np.ones((7, dq, dk), "f4")}, {"kernel": None}, {"kernel": "text"},
            {"kernel": np.ones((dq, dk), complex)}, (), {"kernel": {"kernel": np.ones(2)}},
        ]))  # fmt: skip
        return good, {"params": bad}, ("params",)
    if kind == "pairs":
        name = draw(st.sampled_from(["mask", "bias"]))
        bools, floats = np.ones((2, 2), bool), np.ones((2, 2), "f4")
        wrong = floats if name == "mask" else bools
        shapes = [(keys + 4, length + 4), (7, 7), (1, 1, 7), (7, *batch, 1, 1)]
        shape = draw(st.sampled_from(shapes))
        misfit = np.ones(shape, bool if name == "mask" else "f4")
        others = [v for k, v in NO_FLOATS.items() if k not in ("bools", "dict")]
        return good, {name: draw(st.sampled_from([wrong, misfit, misfit, *others]))}, (name,)
    if kind == "options":
        name, bad = draw(st.sampled_from([
            *(("dropout_rate", x) for x in (1.0, -0.1, np.nan, np.inf, "half", None, [0.1], 2, 1j,
                                            np.ones(2))),
            *(("implementation", x) for x in ("flash", "", 3, ["tiled"], object, "Tiled")),
            *(("block_sizes", x) for x in ((2, 2), 4, "4", {}, True, [])),
            *(("score", x) for x in ("skaled", "", ":", "nowhere:Score", "os:path", "math:", 3,
                                     None, object(), aj.Score, ["dot"], "..:x", "a b:c", "json:")),
        ]))  # fmt: skip
        names = ("score", "pair") if name == "score" else (name,)
        return good, {name: bad}, names
    bad = draw(st.sampled_from([
        None, 7, 1.5, "key", [1, 2], np.zeros(3, np.uint32), np.zeros((2, 2), np.uint32), {},
        np.zeros(2, np.int32), np.zeros(2), jax.random.split(jax.random.key(0), 2), True,
    ]))  # fmt: skip
    return good, {"dropout_rate": 0.5, "dropout_rng": bad}, ("dropout_rng",)


def call_mistaken(case: Any) -> Any:
    good, changed, _ = case
    return aj.attention(**{**good.keywords(), **changed})


def refuse_mistaken(case: Any) -> Any:
    good, _, names = case
    try:
        attend(good)
    except Refused as also:  # the error may name a second mistake first
        names = (*names, *also.names)
    raise Refused(*names)


# --- gradients, against the complex step ---


@st.composite
def gradient_cases(draw):
    sizes = [SIZES[i] for i in (1, 2, 3)]
    implementation = draw(st.sampled_from(["reference", "reference", "tiled"]))
    f4 = [(np.float32, False)]
    case = draw(arguments(sizes=sizes, dtypes=f4, shared=False))
    batch, length, keys, *_ = case.size
    # A table and not a mask, so that all masks share one program.
    table = draw(st.integers(0, 2 ** (2 * length * keys) - 1))
    bits = [table >> n & 1 for n in range(2 * length * keys)]
    table = np.array(bits, bool).reshape(*batch, length, keys)
    bias = ("array", np.zeros((*batch, length, keys), "f4"))
    return case, table, bias, implementation


def call_gradients(case: Any) -> Any:
    given, table, (_, bias), implementation = case
    names = ("query", "key", "value", "bias", "params")
    keywords = {**given.keywords(), "bias": jnp.asarray(bias)}
    arrays = {name: keywords[name] for name in names}
    arrays = jax.tree.map(jnp.asarray, {k: jnp.asarray(v, jnp.float32) if k != "params" else v
                                        for k, v in arrays.items()})  # fmt: skip
    doutput = jnp.asarray(_cotangent(given)["output"], jnp.float32)
    return _pulled_back(implementation, given.score)(arrays, jnp.asarray(table), doutput)


_PULLED: dict = {}


def _pulled_back(implementation: str, score: str) -> Any:
    if (implementation, score) not in _PULLED:

        @jax.jit
        def gradients(arrays, mask, doutput):
            def forward(arrays):
                return aj.attention(
                    **arrays, mask=mask, score=SCORE_CASES[score].score,
                    implementation=implementation, block_sizes=TILE,
                )  # fmt: skip

            return jax.vjp(forward, arrays)[1](doutput)[0]

        _PULLED[implementation, score] = gradients
    return _PULLED[implementation, score]


def _cotangent(given: Arguments) -> dict[str, np.ndarray]:
    batch, length, _, _, _, dv = given.size
    rng = np.random.default_rng(3)
    zeros = np.zeros((*batch, length))
    output = rng.integers(-2, 3, (*batch, length, dv)).astype(float)
    return {"output": output, "logsumexp": zeros, "entropy": zeros, "max_logit": zeros}


def expect_gradients(case: Any) -> Any:
    """The gradients of each example; None if it reads numbers that are not moderate."""
    given, table, (_, bias), _ = case
    attend(given)
    by_example = []
    for b in range(given.batch[0]):
        arrays = {name: x[b] for name, x in given.kept.items()}
        read = {"query": table[b].any(1), "key": table[b].any(0), "value": table[b].any(0)}
        arrays_read = [arrays[name][read[name]] for name in arrays]
        moderate = all((np.abs(x) <= 100).all() for x in arrays_read)
        zeros = given.score == "cosine" and any((x == 0).all(-1).any() for x in arrays_read[:2])
        if not moderate or zeros:  # a cosine with a zero vector has no derivative
            by_example.append(None)
            continue
        # Rows that are in no allowed pair are not read: any number will do.
        clean = {
            name: np.where(read[name][:, None], x, 1.0 + number)
            for number, (name, x) in enumerate(arrays.items())
        }
        cotangent = {name: x[b] for name, x in _cotangent(given).items()}
        example = {**clean, "bias": bias[b].astype(float), "params": given.params}
        pair = SCORE_CASES[given.score].pair
        by_example.append(numpy_example(pair, example, table[b], cotangent)[1])
    return by_example


def compare_gradients(case: Any, got: Any, expected: list) -> None:
    given, table, _, _ = case
    for b, right in enumerate(expected):
        for name in ("query", "key", "value"):
            nobody = ~table[b].any(1 if name == "query" else 0)
            assert not np.asarray(got[name])[b][nobody].any(), f"gradient of {name} in padding"
        masked = np.nan_to_num(np.asarray(got["bias"])[b][~table[b]])
        assert not masked.any(), f"gradient of a masked bias: {masked}"
        if right is not None:
            size = max(np.abs(x[np.abs(x) <= 100]).max(initial=1) for x in given.kept.values())
            scale = max(np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(right))
            for name in ("query", "key", "value", "bias"):
                bound = 2e-5 + 1e-6 * size**2
                assert_near(f"gradient of {name}", got[name][b], right[name], bound, terms=scale)
    if all(right is not None for right in expected):
        total = jax.tree.map(lambda *parts: sum(parts), *(right["params"] for right in expected))
        for path, leaf in jax.tree.leaves_with_path(got["params"]):
            of_path = dict(jax.tree.leaves_with_path(total))[path]
            assert_near(f"gradient of params{path}", leaf, of_path, 1e-4, terms=1.0)


# --- dropout ---


@st.composite
def dropout_cases(draw):
    f4 = [(np.float32, False)]
    good = draw(arguments(sizes=SIZES[:3], scores=("scaled", "general"), dtypes=f4))
    rng = draw(st.sampled_from([jax.random.key(5), jax.random.PRNGKey(7), np.array([1, 2], "u4")]))
    return (
        good,
        rng,
        draw(st.sampled_from([0.25, 0.5, 0.875, 1 - 2**-24])),
        draw(st.sampled_from(IMPLEMENTATIONS)),
    )


def call_dropout(case: Any) -> Any:
    """Returns the weights after dropout, by attending to unit vectors."""
    good, rng, rate, implementation = case
    keywords = {**good.keywords(), "value": jnp.eye(good.size[2])}
    options = {"dropout_rate": rate, "dropout_rng": rng, "block_sizes": TILE}
    return aj.attention(**keywords, **options, implementation=implementation)


def compare_dropout(case: Any, got: Any, expected: Expected) -> None:
    _, _, rate, _ = case
    assert_kind("weights", got, expected.weights.shape, np.float32)
    weights, kept = np.asarray(got, float), expected.weights / (1 - rate)
    error = np.minimum(np.abs(weights), np.abs(weights - kept))
    bound = tolerance(np.float32, False, expected.size) * max(1.0, kept.max(initial=0))
    assert not (error[expected.sure] > bound).any(), (weights, kept)


MISTAKEN_TILES = [({name: bad}, name) for name in ("query", "key") for bad in NO_SIZES.values()]

KINDS = [
    Kind("attention", with_implementation(arguments()), call, lambda case: attend(case[0]),
         compare, 1200, 8),
    Kind("attention, a mistake", mistaken(), call_mistaken, refuse_mistaken, never, 1500, 60),
    mistakes("BlockSizes, a mistake", MISTAKEN_TILES, lambda case: aj.BlockSizes(**case[0])),
    Kind("attention, dropout", dropout_cases(), call_dropout, lambda case: attend(case[0]),
         compare_dropout, 200, 3),
    Kind("attention, gradients", gradient_cases(), call_gradients, expect_gradients,
         compare_gradients, 300, 3),
    Kind("attention_weights", arguments(), call_weights, attend, compare_weights, 400, 6),
]  # fmt: skip
