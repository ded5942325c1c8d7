"""Coverage and monotonic attention in chunks of queries: values, gradients, NaN, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import ordered_cases as cases
import pytest
from conformance import quick_jit
from ordered_cases import BOTH, S

import attention_jax as aj

both = pytest.mark.parametrize("name", BOTH)


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


def monotonic_output(*tokens, **options):
    mask = aj.causal_mask(64) & aj.padding_mask(np.asarray(200))
    return aj.monotonic_attention(*tokens, mask=mask, return_weights=False, **options)


def covered_output(*tokens, **options):
    options["coverage_kernel"] = tokens[0][0]
    mask = aj.causal_mask(64) & aj.padding_mask(np.asarray(200))
    result = aj.coverage_attention(*tokens, mask=mask, return_weights=False, **options)
    return result.output + result.loss[:, None]


@pytest.mark.parametrize("attend", [monotonic_output, covered_output])
def test_memory_is_far_from_quadratic(attend):
    """The gradient, lowered and compiled; nothing runs."""
    target, source = 8192, 256
    query, key = (jax.ShapeDtypeStruct((length, 8), jnp.float32) for length in (target, source))
    gradient = jax.grad(lambda *tokens: (attend(*tokens) ** 2).sum(), (0, 1, 2))
    compiled = quick_jit(gradient).lower(query, key, key).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * target * source / 2  # half a table
