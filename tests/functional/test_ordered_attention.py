"""Coverage and monotonic attention in chunks of queries: values, gradients, memory.

They are compared with plain programs, without chunks, Score and Mask. There are more queries than a
chunk holds, and not a whole number of chunks.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit

import attention_jax as aj

T, S, D, DV = 67, 7, 3, 5


def monotonic(arrays, allowed, hard=False):
    """Monotonic attention by its formula: dot scores, a sigmoid, a scan over queries and keys."""
    logits = arrays["query"] @ arrays["key"].T + arrays["bias"] + arrays["offset"]
    p = jnp.where(allowed, 1 / (1 + jnp.exp(-jnp.where(allowed, logits, 0))), 0)
    if hard:
        p = jnp.where(p >= 0.5, 1.0, 0.0)

    def query(previous, p):
        def key(reached, now):
            p, previous = now
            reached = reached + previous
            return (1 - p) * reached, p * reached

        weights = jax.lax.scan(key, jnp.zeros((), p.dtype), (p, previous))[1]
        return weights, weights

    last, weights = jax.lax.scan(query, arrays["initial"], p)
    return {"output": weights @ arrays["value"], "weights": weights, "last": last}


def coverage(arrays, allowed):
    """Coverage attention by its formula, one query after another."""

    def step(covered, row):
        query, allowed, bias = row
        seen = jnp.where(allowed, covered, 0)
        logits = (arrays["key"] + seen[:, None] * arrays["kernel"][None, :]) @ query + bias
        exponentials = jnp.where(allowed, jnp.exp(jnp.where(allowed, logits, 0)), 0)
        weights = exponentials / jnp.where(allowed.any(), exponentials.sum(), 1)
        # As in the library, where a masked tie gets no gradient.
        loss = jnp.where(weights <= seen, weights, seen).sum()
        return covered + weights, (weights, loss)

    rows = (arrays["query"], allowed, arrays["bias"])
    covered, (weights, loss) = jax.lax.scan(step, arrays["initial"], rows)
    return {
        "output": weights @ arrays["value"], "weights": weights, "coverage": covered, "loss": loss
    }  # fmt: skip


def library_monotonic(arrays, allowed, hard=False):
    options = {name: arrays[name] for name in ("query", "key", "value", "bias", "offset")}
    options |= {"initial": arrays["initial"], "score": "dot", "mask": allowed, "hard": hard}
    output, weights = aj.monotonic_attention(**options)
    again, last = aj.monotonic_attention(**options, return_weights="last")
    return {"output": (output + again) / 2, "weights": weights, "last": last}


def library_coverage(arrays, allowed):
    options = {name: arrays[name] for name in ("query", "key", "value", "bias")}
    result = aj.coverage_attention(
        **options, coverage=arrays["initial"], coverage_kernel=arrays["kernel"], score="dot",
        mask=allowed,
    )  # fmt: skip
    return result._asdict()


BOTH = {
    "monotonic": (library_monotonic, monotonic),
    "coverage": (library_coverage, coverage),
}


def arrays_of(seed=3, dtype=np.float32):
    """Returns the arguments of one example, by name."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (T, D), "key": (S, D), "value": (S, DV), "bias": (T, S), "kernel": (D,),
        "initial": (S,),
    }  # fmt: skip
    found = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    found["initial"] = rng.uniform(0.01, 1 / S, size=S).astype(dtype)
    # The walk is so slow that many queries find a key.
    return found | {"offset": np.asarray(2.5, dtype)}


def allowed_of(hidden):
    """Returns a mask, bool [T, S]: queries in `hidden` have no key, all others at least one."""
    table = np.random.default_rng(5).random((T, S)) < 0.7
    table[:, 3] = True
    table[:, S - 1] = False  # a key that no query may attend to
    table[np.asarray(hidden, int)] = False
    return table


def same(ours, expected, tolerance):
    chex.assert_trees_all_close(ours, expected, rtol=tolerance, atol=tolerance)


def cotangents(results, seed=7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), results)


@pytest.mark.parametrize("name", BOTH)
def test_chunks_are_one_plain_program(name):
    """In both modes, for queries that do not fill their last chunk."""
    with jax.enable_x64(True):
        arrays, allowed = arrays_of(dtype=np.float64), allowed_of((66,))
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
    arrays, allowed = arrays_of(), allowed_of(())
    arrays |= {"offset": np.float32(1.0), "initial": np.eye(S, dtype=np.float32)[0]}
    attend = quick_jit(
        lambda arrays: [attend(arrays, allowed, hard=True) for attend in BOTH["monotonic"]]
    )
    same(*attend(arrays), 1e-5)


def test_weights_only_on_request():
    arrays = arrays_of()
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
