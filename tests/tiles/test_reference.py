"""The reference implementation: any derivative, in any mode, of any order."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_cases import check_derivatives, numbers_of, point_of
from oracles import assert_close, softmax, softmax_gradient
from score_cases import CORE_SCORES, SCORE_CASES, each_score, slow_unless

import attention_jax as aj

T, S = 3, 5  # small: a Hessian has the square


def number_of(point, score, mask):
    """A number that depends on the output and all statistics."""
    return numbers_of(
        aj.attention(
            **point, score=SCORE_CASES[score].score, mask=mask, implementation="reference",
            return_statistics=True,
        )
    )  # fmt: skip


@pytest.mark.parametrize("score", each_score(CORE_SCORES, fast=("general", "distance")))
def test_two_orders_in_both_modes(score):
    """With a query that has no key, and a key that has no query."""
    with jax.enable_x64(True):
        mask = (aj.causal_mask() | aj.padding_mask(jnp.array(2))) & ~aj.local_mask(0, 0)
        mask = mask & aj.causal_mask(2)
        point = point_of(score, T, S)
        if SCORE_CASES[score].score.translation_invariant:  # the origin has no derivative
            point |= {name: point[name] + 10 for name in ("query", "key")}
        check_derivatives(lambda point: number_of(point, score, mask), point)


def test_second_derivatives_see_no_nan_of_masked_places():
    with jax.enable_x64(True):
        point = point_of("own", T, S)
    point = jax.tree.map(np.float32, point)
    point["query"][2], point["key"][3], point["value"][4] = np.nan, np.inf, np.nan
    mask = aj.padding_mask(jnp.array(3), jnp.array(2))

    def gradient_norm(point):
        gradient = jax.grad(number_of)(point, "own", mask)
        return sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient))

    gradient = jax.jit(jax.grad(gradient_norm))(point)
    chex.assert_tree_all_finite(gradient)
    assert all(map(np.any, jax.tree.leaves(gradient)))
    assert not gradient["query"][2:].any()
    assert not gradient["key"][3:].any()
    assert not gradient["value"][3:].any()


# --- few queries over many keys, and few keys under many queries ---


def scaled_dot(query, key, value, doutput):
    """float64: the output, and the gradients of query, key and value."""
    query, key, value, doutput = (np.float64(x) for x in (query, key, value, doutput))
    scale = query.shape[-1] ** -0.5
    weights = softmax(scale * query @ key.T)
    dlogits = scale * softmax_gradient(weights, doutput @ value.T)
    return weights @ value, dlogits @ key, dlogits.T @ query, weights.T @ doutput


def tokens_of(uniform, queries, keys, dim=8):
    """A query, key, value and cotangent; `uniform` weights of the values 0.1 and 0.2 in turns."""
    random = np.random.default_rng(0)
    query, key, value, doutput = (
        random.standard_normal((length, dim)).astype(np.float32)
        for length in (queries, keys, keys, queries)
    )
    if uniform:
        value = np.where(np.arange(keys) % 2, 0.1, 0.2)[:, None] + np.zeros((1, dim), np.float32)
        query, key, doutput = 0 * query, value, 0 * doutput + 0.1
    return [np.float32(x) for x in (query, key, value, doutput)]


check_close = functools.partial(assert_close, "")


def check_sums(queries, keys, uniform, **options):
    """Output within 2e-6 and gradients within 2e-5 of the largest, as the contract says."""
    *tokens, doutput = tokens_of(uniform, queries, keys)
    output, pull_back = jax.vjp(lambda *tokens: aj.attention(*tokens, **options), *tokens)
    expected = scaled_dot(*tokens, doutput)
    check_close(output, expected[0], 2e-6)
    for got, gradient in zip(pull_back(doutput), expected[1:], strict=True):
        if np.abs(gradient).max() > 1e-9:
            check_close(got, gradient, 2e-5)


FAST = [(1, 2**16), (8, 2**13), (1, 9973), (2**16, 1)]
SLOW = [*itertools.product(range(1, 9), (2**10, 2**12, 2**14, 10**5, 2**17, 2**20))]


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize(("queries", "keys"), slow_unless(FAST, FAST + SLOW))
def test_long_sums(queries, keys, implementation):
    for uniform in (True, False):
        check_sums(queries, keys, uniform, implementation=implementation)


def test_long_sums_of_batches():
    query, key, value, doutput = tokens_of(True, 3, 2**15)
    output = scaled_dot(query, key, value, doutput)[0]
    shared = jax.vmap(lambda query: aj.attention(query[None], key, value))(query)
    keys = np.stack([key] * 3)
    for got in (shared, aj.attention(query[:, None], keys, keys)):
        check_close(got[:, 0], output, 2e-6)


def test_long_sums_of_tangents_and_second_derivatives():
    query, key, value, doutput = tokens_of(True, 1, 2**15)
    output = scaled_dot(query, key, value, doutput)[0]
    attend = functools.partial(aj.attention, query, key)
    check_close(jax.jvp(attend, [value], [10 * value])[1], 10 * output, 2e-6)

    def curvature(query, key, value, doutput):
        def slope(query):
            return (jax.grad(lambda q: (aj.attention(q, key, value) * doutput).sum())(query)).sum()

        return jax.grad(slope)(query)

    tokens = query + np.float32(0.5), key, value, doutput
    got = curvature(*tokens)
    with jax.enable_x64(True):
        expected = np.asarray(curvature(*map(np.float64, tokens)))
    check_close(got, expected, 2e-5)


def test_long_sums_of_queries_in_order():
    query, key, value, _ = tokens_of(True, 1, 2**15)
    kernel = np.zeros(key.shape[1], np.float32)
    output = aj.coverage_attention(query, key, value, coverage_kernel=kernel).output
    check_close(output, value.mean(0, dtype=float)[None], 2e-6)
    initial = np.full(len(key), 1 / len(key), np.float32)
    output, weights = aj.monotonic_attention(query, key, value, initial=initial)
    check_close(output, np.float64(weights) @ np.float64(value), 2e-6)
