"""Coverage against See et al.'s equations in NumPy, a query and a key at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from oracles import softmax
from score_cases import each_score, numpy_params

from attention_jax import SCORES, causal_mask, get_score, padding_mask
from attention_jax.functional.coverage import (
    coverage_attention,
    coverage_kernel_size,
    coverage_loss,
)

B, T, S, DQ, DK, DV, A = 2, 5, 7, 3, 11, 13, 17
NO_KEY_PART = "additive(key_part=False)"


def case(name, *batch, target=T, source=S, seed=1, dtype=np.float32):
    """Arguments by name, of any score."""
    score = get_score(name)
    rng = np.random.default_rng(seed)
    query_dim = DK if score.needs_equal_dims else DQ
    params = numpy_params(score, query_dim, DK, seed)
    shapes = {"query": (*batch, target, query_dim), "key": (*batch, source, DK)}
    shapes |= {"value": (*batch, source, DV)}
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    arrays["params"] = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), params)
    size = coverage_kernel_size(score, query_dim, DK, params)
    arrays["coverage_kernel"] = rng.normal(size=size).astype(dtype)
    return arrays


@pytest.mark.parametrize("name", each_score([*SCORES, NO_KEY_PART], fast=[NO_KEY_PART, "l2"]))
def test_every_score_adds_coverage_to_the_features_of_keys(name):
    score, arrays, rng = get_score(name), case(name, B), np.random.default_rng(2)
    bias = rng.normal(size=(B, T, S)).astype(np.float32)
    coverage = rng.uniform(0, 2, size=(B, S)).astype(np.float32)
    lengths = np.array([S - 2, S])
    coverage[0, S - 2 :] = np.nan  # of keys that no query sees
    allowed = np.tril(np.ones((T, S), bool), 1) & (np.arange(S) < lengths[:, None, None])
    result = quick_jit(functools.partial(coverage_attention, score=name))(
        **arrays, mask=causal_mask(1) & padding_mask(lengths), bias=bias, coverage=coverage
    )
    params, kernel = arrays["params"], arrays["coverage_kernel"]
    for b in range(B):
        queries = score.project_query(params, arrays["query"][b])
        keys = np.asarray(score.project_key(params, arrays["key"][b]))
        covered, rows = coverage[b].copy(), []
        for i in range(T):
            query = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], queries)
            logits = score.pair(params, query, keys + np.outer(covered, kernel))
            weights = softmax(np.float64(logits)[0] + bias[b, i], allowed[b, i])
            rows.append((weights, np.minimum(weights, covered)[allowed[b, i]].sum()))
            covered += np.float32(weights)
        weights, loss = map(np.array, zip(*rows, strict=True))
        expected = weights @ arrays["value"][b], weights, covered, loss
        for name, got, wanted in zip(result._fields, result, expected, strict=True):
            np.testing.assert_allclose(got[b], wanted, rtol=2e-5, atol=2e-5, err_msg=name)


def test_bfloat16_computes_in_float32():
    wide = case("additive")
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    attend = quick_jit(functools.partial(coverage_attention, score="additive"))
    result = attend(**narrow)
    assert [leaf.dtype.name for leaf in result] == ["bfloat16"] * 2 + ["float32"] * 2
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    same = attend(**wide)
    output = np.asarray(result.output).astype(np.float32)
    np.testing.assert_allclose(output, same.output, rtol=4e-3, atol=4e-3)
    np.testing.assert_array_equal(result.coverage, same.coverage)
    np.testing.assert_array_equal(result.loss, same.loss)
    assert jax.eval_shape(coverage_loss, result.weights).dtype == jnp.float32
    with jax.enable_x64(True):
        double = jax.tree.map(np.float64, {**narrow, "coverage": np.zeros(S)})
        for name, array in double.items():  # one argument is enough
            result = jax.eval_shape(attend, **{**narrow, name: array})
            assert result.coverage.dtype == result.loss.dtype == jnp.float64, name
        result = jax.eval_shape(functools.partial(coverage_attention, score="additive"), **narrow)
        assert result.coverage.dtype == result.loss.dtype == jnp.float32
        assert jax.eval_shape(coverage_loss, result.weights).dtype == jnp.float32
