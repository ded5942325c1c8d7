"""Coverage and monotonic attention in chunks of queries: values, gradients, NaN, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ordered_cases as cases
import pytest
from conformance import quick_jit
from ordered_cases import BOTH, S, T

import attention_jax as aj
from attention_jax import analysis

both = pytest.mark.parametrize("name", BOTH)
HIDDEN = (66,), (0, 1), (40, 65, 66)  # queries without keys: at the end, the beginning, between


def same(ours, expected, tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    jax.tree_util.tree_map_with_path(
        lambda path, left, right: np.testing.assert_allclose(
            left, right, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path)
        ),
        ours,
        expected,
    )


def cotangents(results, seed=7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), results)


# --- chunks ---


@both
def test_chunks_are_one_plain_program(name):
    """In both modes, for queries that do not fill their last chunk."""
    with jax.enable_x64(True):
        arrays, allowed = cases.arrays(dtype=np.float64), cases.allowed((66,))
        tangents = jax.tree.map(np.cos, arrays)

        @quick_jit
        def derivatives(arrays):
            def of(attend):
                def run(arrays):
                    return attend(arrays, allowed)

                results, moved = jax.jvp(run, (arrays,), (tangents,))
                return results, moved, jax.vjp(run, arrays)[1](cotangents(results))[0]

            return [of(attend) for attend in BOTH[name]]

        same(*derivatives(arrays), 1e-9)


def test_the_hard_walk_goes_on_from_chunk_to_chunk():
    arrays, allowed = cases.arrays(), cases.allowed(())
    arrays |= {"offset": np.float32(1.0), "initial": np.eye(S, dtype=np.float32)[0]}
    attend = quick_jit(
        lambda arrays: [attend(arrays, allowed, hard=True) for attend in BOTH["monotonic"]]
    )
    same(*attend(arrays), 1e-5)


def test_noise_of_a_query_does_not_depend_on_the_others():
    arrays = cases.arrays()
    query, *tokens = [arrays[name] for name in ("query", "key", "value")]

    @quick_jit
    def run(query, key, value):
        options = {"score": "dot", "noise_rng": jax.random.key(1), "noise_scale": 2.0}
        return (
            aj.monotonic_attention(query, key, value, **options)[1],
            aj.monotonic_attention(query[:50], key, value, **options)[1],
            aj.monotonic_attention(query, key, value, score="dot")[1],
        )

    weights, fewer, quiet = jax.tree.map(np.asarray, run(query, *tokens))
    np.testing.assert_allclose(weights[:50], fewer, atol=1e-6)
    assert np.max(np.abs(weights - quiet)) > 0.01


def test_weights_only_on_request():
    arrays = cases.arrays()
    tokens = [arrays[name] for name in ("query", "key", "value")]

    @quick_jit
    def monotonic(*tokens):
        return [
            aj.monotonic_attention(*tokens, return_weights=weights)
            for weights in (True, False, "last")
        ]

    (output, weights), alone, (again, last) = monotonic(*tokens)
    np.testing.assert_array_equal(alone, output)
    np.testing.assert_array_equal(again, output)
    np.testing.assert_array_equal(last, np.asarray(weights)[-1])

    @quick_jit
    def coverage(*tokens):
        attend = functools.partial(aj.coverage_attention, coverage_kernel=arrays["kernel"])
        return attend(*tokens), attend(*tokens, return_weights=False)

    result, without = coverage(*tokens)
    assert without.weights is None
    same(without, result._replace(weights=None), 1e-6)
    last_of = quick_jit(functools.partial(aj.monotonic_attention, return_weights="last"))
    none = last_of(tokens[0][:0], *tokens[1:], initial=last)
    np.testing.assert_array_equal(none[1], last)  # no query moves the walk


@both
def test_weights_are_captured_with_the_other_matrices_only(name):
    attend, arrays, allowed = BOTH[name][0], cases.arrays(), cases.allowed((66,))
    results = quick_jit(attend)(arrays, allowed)
    for matrices in (True, False):
        captured = analysis.capture(lambda: attend(arrays, allowed), matrices=matrices)
        seen = next(iter(captured.attentions.values()))
        np.testing.assert_allclose(seen.output, results["output"], atol=1e-6)
        assert (seen.mask is not None) == (seen.weights is not None) == matrices
        if matrices:
            np.testing.assert_allclose(seen.weights, results["weights"], atol=1e-6)
            np.testing.assert_array_equal(seen.mask, allowed)


# --- NaN ---


def poisoned(cotangent, hidden, bad):
    """The same cotangents with something bad in the rows of hidden queries."""
    rows = np.zeros(T, bool)
    rows[np.asarray(hidden, int)] = True

    def spoil(leaf):
        if leaf.shape[:1] != (T,):
            return leaf
        return np.where(rows.reshape(T, *[1] * (leaf.ndim - 1)), bad, leaf).astype(leaf.dtype)

    return jax.tree.map(spoil, cotangent)


@both
def test_cotangents_of_queries_without_keys_reach_nothing(name):
    attend = BOTH[name][0]
    arrays = cases.arrays()
    arrays["value"][S - 1] = np.nan  # no query sees it

    @quick_jit
    def gradient(arrays, allowed, cotangent):
        results, pull_back = jax.vjp(lambda arrays: attend(arrays, allowed), arrays)
        return results, pull_back(cotangent)[0]

    shapes = jax.eval_shape(attend, arrays, cases.allowed(()))
    cotangent = cotangents(shapes)
    for hidden in HIDDEN:
        table = cases.allowed(hidden)
        # Written safely: what is hidden is left out before the loss, so that 0 arrives there.
        results, expected = gradient(arrays, table, poisoned(cotangent, hidden, 0))
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((results, expected)))
        for leaf in jax.tree.leaves(results):
            assert leaf.shape[0] != T or not np.any(np.asarray(leaf)[list(hidden)])
        for bad in (np.nan, np.inf):
            found = gradient(arrays, table, poisoned(cotangent, hidden, bad))[1]
            jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(expected))


def test_nan_in_a_value_that_others_see_spares_queries_without_keys():
    arrays = cases.arrays()
    arrays["value"][0] = np.nan
    allowed = cases.allowed((66,))

    @quick_jit
    def outputs(arrays):
        return [attend(arrays, allowed)["output"] for attend, _ in BOTH.values()]

    for output in map(np.asarray, outputs(arrays)):
        assert np.all(np.isnan(output[:66]).any(1))
        assert not np.any(output[66])


def test_a_nan_cotangent_of_the_coverage_reaches_queries_that_may_attend_to_the_key():
    arrays, table = cases.arrays(), cases.allowed((40, 66))

    def covered(arrays):
        return cases.library_coverage(arrays, table)["coverage"]

    gradient = quick_jit(lambda cotangent: jax.vjp(covered, arrays)[1](cotangent)[0])
    hidden = gradient(np.where(np.arange(S) == S - 1, np.nan, 0).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(hidden.pop("initial")), np.arange(S) == S - 1)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(hidden))
    seen = gradient(np.where(np.arange(S) == 3, np.nan, 0).astype(np.float32))
    np.testing.assert_array_equal(np.isnan(seen["query"]).any(1), table.any(1))


def test_masked_bias_may_hold_nan():
    arrays, table = cases.arrays(), cases.allowed((66,))

    @quick_jit
    def gradients(bias):
        def loss(arrays):
            return sum((attend(arrays, table)["output"] ** 2).sum() for attend, _ in BOTH.values())

        return jax.grad(loss)({**arrays, "bias": bias})

    bias = arrays["bias"]
    expected = gradients(np.where(table, bias, 0))
    found = gradients(np.where(table, bias, np.nan))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# --- memory ---


def reserved(attend, target, source, score="scaled", dim=8):
    """Bytes of temporaries that the gradient takes; nothing runs."""

    def loss(tokens, params):
        return (attend(*tokens, score=score, params=params) ** 2).sum()

    params = jax.eval_shape(lambda: aj.get_score(score).init(jax.random.key(0), dim, dim))
    tokens = tuple(
        jax.ShapeDtypeStruct((length, dim), jnp.float32) for length in (target, source, source)
    )
    compiled = quick_jit(jax.grad(loss, (0, 1))).lower(tokens, params).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def monotonic_output(*tokens, **options):
    mask = aj.causal_mask(64) & aj.padding_mask(np.asarray(1000))
    return aj.monotonic_attention(*tokens, mask=mask, return_weights=False, **options)


def covered_output(*tokens, **options):
    options["coverage_kernel"] = tokens[0][0]
    mask = aj.causal_mask(64) & aj.padding_mask(np.asarray(1000))
    result = aj.coverage_attention(*tokens, mask=mask, return_weights=False, **options)
    return result.output + result.loss[:, None]


@pytest.mark.parametrize("attend", [monotonic_output, covered_output])
def test_memory_is_far_from_quadratic(attend):
    once, twice = (reserved(attend, length, length) for length in (1024, 2048))
    assert twice < 4 * 2048**2 / 2  # half of one table of float32
    assert twice / once < 2.6  # twice the keys, and a little for as many more queries


def test_coverage_saves_no_features_of_pairs():
    target, source, hidden = 64, 128, 64
    taken = reserved(covered_output, target, source, "additive", hidden)
    assert taken < target * source * hidden * 4 / 4  # [T, S] four times, [S, A] a few times
