"""Norms of the logits' gradient in tiles: equal to the materialised ones, in linear memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import (
    ALL_MASKS,
    ALL_SCORES,
    MASK_CASES,
    SCORE_CASES,
    TILE,
    B,
    S,
    T,
    allowed_table,
    assert_close,
    cotangents,
    inputs_of,
    numpy_example,
    poisoned,
    quick_jit,
)

import attention_jax as aj
from attention_jax.analysis import attention_gradients, gradient_flow

DOUTPUT = cotangents()["output"]


def norms(dlogits):
    squares = np.asarray(dlogits, np.float64) ** 2
    return {
        "by_query": np.sqrt(squares.sum(-1)),
        "by_key": np.sqrt(squares.sum(-2)),
        "total": np.sqrt(squares.sum((-2, -1))),
    }


def expected_norms(score_name, mask_name):
    """Norms in NumPy, with weights that are computed a pair at a time."""
    inputs, allowed = inputs_of(score_name), allowed_table(mask_name)
    dlogits = np.zeros((B, T, S))
    for b in range(B):
        example = {name: inputs[name][b] for name in ("query", "key", "bias")}
        example |= {"value": np.eye(S), "params": inputs["params"]}
        forward, _ = numpy_example(SCORE_CASES[score_name].pair, example, allowed[b])
        weights = forward["output"]  # of unit vectors
        dweights = DOUTPUT[b] @ inputs["value"][b].T
        dlogits[b] = weights * (dweights - np.sum(weights * dweights, -1, keepdims=True))
    return norms(dlogits)


def assert_norms(got, expected, tolerance):
    assert got._fields == tuple(expected)
    for name, array in got._asdict().items():
        assert_close(name, array, expected[name], tolerance)


def case(score_name, mask_name):
    """Arrays with NaN in every place that no allowed pair reads."""
    allowed = allowed_table(mask_name)
    arrays = poisoned(inputs_of(score_name), allowed)
    doutput = np.where(allowed.any(-1)[..., None], DOUTPUT, np.nan)
    options = {"score": SCORE_CASES[score_name].score, "mask": MASK_CASES[mask_name].build()}
    return arrays, doutput, options


def check(score_name, mask_name):
    with jax.enable_x64(True):
        arrays, doutput, options = case(score_name, mask_name)
        got = quick_jit(
            lambda arrays, doutput: gradient_flow(
                **arrays, doutput=doutput, block_sizes=TILE, **options
            )
        )(arrays, doutput)
    assert_norms(got, expected_norms(score_name, mask_name), 1e-13)


# Scores whose `pair` has a gradient by hand, infinite slopes, a matrix, another score inside.
SOME_SCORES = ("additive", "own", "general", "softcap")
# No mask, arrays of lengths, integers to compare. "combination" runs with the scores.
SOME_MASKS = ("none", "padding", "segment")


def others_slow(names, some):
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, marks=marks[name in some]) for name in names]


@pytest.mark.parametrize("score_name", others_slow(ALL_SCORES, SOME_SCORES))
def test_every_score(score_name):
    check(score_name, "combination")


@pytest.mark.parametrize("mask_name", others_slow(ALL_MASKS, SOME_MASKS))
def test_every_mask(mask_name):
    check("general", mask_name)


def test_tiles_change_nothing():
    arrays, doutput, options = case("general", "dense")
    arrays, doutput = jax.tree.map(np.float32, (arrays, doutput))
    sizes = [None, aj.BlockSizes(1, 1), aj.BlockSizes(5, 2)]

    @quick_jit
    def all_ways(arrays, doutput):
        def flow(arrays, block_sizes):
            return gradient_flow(**arrays, doutput=doutput, block_sizes=block_sizes, **options)

        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), arrays)
        return [*(flow(arrays, tile) for tile in sizes), flow(narrow, sizes[-1])]

    for got in all_ways(arrays, doutput):
        assert all(array.dtype == jnp.float32 for array in got)
        assert_norms(got, expected_norms("general", "dense"), 2e-5)


def test_biases_and_shared_inputs():
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        arrays = {
            "query": rng.normal(size=(3, 2, 5, 4)),
            "key": rng.normal(size=(2, 7, 4)),
            "value": rng.normal(size=(7, 3)),
        }
        doutput = rng.normal(size=(3, 2, 5, 3))
        bias = aj.alibi_bias(rng.random(2)) + aj.relative_bias(rng.normal(size=5))
        mask = aj.padding_mask(jnp.array([[7], [3], [0]]))
        options = {"bias": bias + rng.normal(size=(1, 7)), "mask": mask}

        @quick_jit
        def both(arrays):
            flow = gradient_flow(**arrays, doutput=doutput, block_sizes=TILE, **options)
            return flow, attention_gradients(**arrays, doutput=doutput, **options).dlogits

        got, dlogits = both(arrays)
        assert_norms(got, norms(dlogits), 1e-13)
        assert got.by_query.shape == (3, 2, 5)
        assert got.by_key.shape == (3, 2, 7)
        assert not np.any(got.total[2])  # the example without keys


def test_by_hand():
    # Weights 1/2 each. dweights (-3, 5) and (1, 1): rows of dlogits (-2, 2) and (0, 0).
    query, key = jnp.ones((2, 1)), jnp.zeros((2, 1))
    value, doutput = jnp.array([[-3.0, 1.0], [5.0, 1.0]]), jnp.eye(2)
    got = gradient_flow(query, key, value, doutput)
    np.testing.assert_allclose(got.by_query, [np.sqrt(8), 0], rtol=1e-6)
    np.testing.assert_allclose(got.by_key, [2, 2], rtol=1e-6)
    np.testing.assert_allclose(got.total, np.sqrt(8), rtol=1e-6)


def test_extreme_logits():
    query = jnp.array([[1e4], [-1e4], [0.0]])
    key, value = jnp.array([[1.0], [-1.0], [0.5]]), jnp.array([[1.0], [2.0], [4.0]])
    got = gradient_flow(query, key, value, jnp.ones((3, 1)), score="dot", block_sizes=TILE)
    expected = np.abs((np.array([1, 2, 4]) - 7 / 3) / 3)
    np.testing.assert_allclose(got.by_key, expected, rtol=1e-5)
    np.testing.assert_allclose(got.by_query, [0, 0, np.linalg.norm(expected)], rtol=1e-5)


def test_infinite_value_beside_a_row_without_keys():
    """Query 0 has no keys. Query 1 is in its tile and reads the infinite value."""
    tokens, value = jnp.ones((2, 1)), jnp.array([[jnp.inf], [1.0]])
    mask = jnp.array([[False, False], [True, True]])
    got = gradient_flow(tokens, tokens, value, jnp.ones((2, 1)), mask=mask)
    np.testing.assert_array_equal(got.by_query, [0, np.nan])


@pytest.mark.parametrize(("target", "source"), [(0, 3), (2, 0)])
def test_no_queries_or_no_keys(target, source):
    tokens = (jnp.ones((B, target, 4)), jnp.ones((B, source, 4)), jnp.ones((B, source, 3)))
    got = gradient_flow(*tokens, jnp.ones((B, target, 3)))
    assert [leaf.shape for leaf in got] == [(B, target), (B, source), (B,)]
    assert not any(np.any(leaf) for leaf in got)


def test_vmap_is_a_loop():
    """The NumPy side is the loop."""
    arrays, doutput, options = case("general", "causal")
    arrays, doutput = jax.tree.map(np.float32, (arrays, doutput))
    params = arrays.pop("params")

    def flow(arrays, doutput):
        return gradient_flow(**arrays, doutput=doutput, params=params, block_sizes=TILE, **options)

    mapped = quick_jit(jax.vmap(flow))(arrays, doutput)
    assert_norms(mapped, expected_norms("general", "causal"), 2e-5)


def test_forward_mode():
    arrays, doutput, options = case("general", "dense")
    arrays.pop("bias")

    def streamed(arrays):
        flow = gradient_flow(**arrays, doutput=doutput, block_sizes=TILE, **options)
        return flow.total

    def materialised(arrays):
        dlogits = attention_gradients(**arrays, doutput=doutput, **options).dlogits
        return jnp.linalg.norm(dlogits.reshape(B, -1), axis=-1)

    @quick_jit
    def tangents(arrays, direction):
        return [jax.jvp(f, (arrays,), (direction,))[1] for f in (streamed, materialised)]

    with jax.enable_x64(True):
        assert_close("tangent", *tangents(arrays, jax.tree.map(np.ones_like, arrays)), 1e-12)


@pytest.mark.parametrize(
    "score_name", ["scaled", "additive", pytest.param("own", marks=pytest.mark.slow)]
)
def test_memory_is_linear_in_the_length(score_name):
    score = aj.Additive(hidden_dim=4) if score_name == "additive" else SCORE_CASES[score_name].score

    def reserved(length, function):
        tokens = [jax.ShapeDtypeStruct((length, 4), jnp.float32) for _ in range(4)]
        params = jax.eval_shape(lambda: score.init(jax.random.key(0), 4, 4))
        key_length = jax.ShapeDtypeStruct((), jnp.int32)

        def call(tokens, params, key_length):
            mask = aj.causal_mask() & aj.padding_mask(key_length)
            return function(*tokens, params=params, score=score, mask=mask)

        compiled = quick_jit(call).lower(tokens, params, key_length).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def streamed(*tokens, **options):
        return gradient_flow(*tokens, block_sizes=aj.BlockSizes(64, 64), **options)

    def materialised(*tokens, **options):
        return norms_in_jax(attention_gradients(*tokens, **options).dlogits)

    once = reserved(1024, streamed)
    assert once < 4 * 1024**2  # one table of float32
    assert reserved(4096, streamed) < 4.5 * once
    if score_name == "scaled":  # and that it would be seen
        assert reserved(1024, materialised) > 4 * 1024**2


def norms_in_jax(dlogits):
    return jnp.linalg.norm(dlogits, axis=-1), jnp.linalg.norm(dlogits, axis=-2)


GOOD = (np.ones((2, 5, 4)), np.ones((2, 7, 4)), np.ones((7, 3)))


@pytest.mark.parametrize(
    ("doutput", "options", "message"),
    [
        (np.ones((2, 5, 4)), {}, r"doutput must be \[2, 5, 3\].*got \[2, 5, 4\]"),
        (np.ones((2, 5, 3)), {"block_sizes": 64}, "block_sizes must be a BlockSizes or None"),
        (np.ones((2, 5, 3)), {"score": "general"}, "params must be"),
        (np.ones((2, 5, 3)), {"mask": np.ones((5, 5), bool)}, "mask must broadcast"),
    ],
)
def test_bad_input(doutput, options, message):
    with pytest.raises(ValueError, match=message):
        gradient_flow(*GOOD, doutput, **options)
