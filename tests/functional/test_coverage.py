"""Coverage against See et al.'s equations in NumPy, a query and a key at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from numpy_model import softmax_where
from score_cases import numpy_params

import attention_jax as aj
from attention_jax import SCORES, Additive, Score, causal_mask, padding_mask
from attention_jax.functional.coverage import (
    coverage_attention,
    coverage_kernel_size,
    coverage_loss,
)

B, T, S, DQ, DK, DV, A = 2, 5, 7, 3, 11, 13, 17


# --- each score's logit of q and k at coverage c with coverage_kernel w, in NumPy ---


def case(name, *batch, target=T, source=S, seed=1, dtype=np.float32):
    """Arguments by name, of any score."""
    score = SCORES[name]
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


@functools.cache
def gradients_of(name):
    """Returns a compiled function of (arrays, mask, coverage): gradients of a loss, and results."""

    @quick_jit
    @functools.partial(jax.grad, argnums=(0, 2), has_aux=True)
    def gradients(arrays, mask, coverage):
        result = coverage_attention(**arrays, score=name, mask=mask, coverage=coverage)
        return (result.output + result.output**2).sum() + result.loss.sum(), result

    return gradients


def agree(result, expected, tolerance=3e-6):
    for name, wanted in zip(result._fields, expected, strict=True):
        np.testing.assert_allclose(
            getattr(result, name), wanted, rtol=tolerance, atol=tolerance, err_msg=name
        )


@pytest.mark.parametrize("name", SCORES)
def test_every_score_adds_coverage_to_the_features_of_keys(name):
    score, arrays, rng = SCORES[name], case(name, B), np.random.default_rng(2)
    bias = rng.normal(size=(B, T, S)).astype(np.float32)
    coverage = rng.uniform(0, 2, size=(B, S)).astype(np.float32)
    lengths = np.array([S - 2, S])
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
            logits = score.pair(params, queries[i : i + 1], keys + np.outer(covered, kernel))
            weights = softmax_where(np.float64(logits)[0] + bias[b, i], allowed[b, i])
            rows.append((weights, np.minimum(weights, covered).sum()))
            covered += np.float32(weights)
        weights, loss = map(np.array, zip(*rows, strict=True))
        expected = weights @ arrays["value"][b], weights, covered, loss
        agree(jax.tree.map(lambda leaf, b=b: leaf[b], result), expected, 2e-5)


def test_see_et_al():
    """Equations 10-12, in their letters: columns, and matrices from the left."""
    rng = np.random.default_rng(0)
    W_h, W_s = rng.normal(size=(A, DK)), rng.normal(size=(A, DQ))  # noqa: N806
    w_c, v = rng.normal(size=A), rng.normal(size=A)
    h, s = rng.normal(size=(S, DK)), rng.normal(size=(T, DQ))
    c, contexts, attentions, covloss = np.zeros(S), [], [], []
    for t in range(T):
        e = [v @ np.tanh(W_h @ h[i] + W_s @ s[t] + w_c * c[i]) for i in range(S)]
        a = np.exp(e) / np.sum(np.exp(e))
        covloss.append(sum(min(a[i], c[i]) for i in range(S)))
        contexts.append(sum(a[i] * h[i] for i in range(S)))
        attentions.append(a)
        c = c + a
    with jax.enable_x64(True):
        params = {"query_kernel": W_s.T, "key_kernel": W_h.T, "v": v}
        result = coverage_attention(s, h, h, score="additive", params=params, coverage_kernel=w_c)
        assert result.loss.dtype == result.output.dtype == jnp.float64
    agree(result, (contexts, attentions, c, covloss), 1e-12)


def test_three_steps_on_paper():
    # Two equal keys, logits -c log 3. The first query may see the first key only: c = (1, 0).
    # The second weighs them 3^-1 : 1, so c = (5/4, 3/4); the third 3^-5/4 : 3^-3/4 = 1 : sqrt 3.
    third = np.array([1, 3**0.5]) / (1 + 3**0.5)
    result = coverage_attention(
        *(np.float32(tokens) for tokens in (np.ones((3, 1)), np.ones((2, 1)), np.eye(2))),
        coverage_kernel=-np.log(np.float32([3])), score="dot",
        mask=np.array([[True, False], [True, True], [True, True]]),
    )  # fmt: skip
    weights = [[1, 0], [0.25, 0.75], third]
    agree(result, (weights, weights, np.add(third, [1.25, 0.75]), [0, 0.25, 1]), 1e-6)


@pytest.mark.parametrize("name", ["additive", pytest.param("general", marks=pytest.mark.slow)])
def test_step_by_step_is_all_at_once(name):
    arrays = case(name, B)
    query = arrays.pop("query")
    allowed = np.random.default_rng(3).random((B, T, S)) < 0.6
    attend = quick_jit(functools.partial(coverage_attention, score=name))
    at_once = attend(query, **arrays, mask=allowed)
    coverage = np.zeros((B, S), np.float32)
    for t in range(T):
        here = slice(t, t + 1)
        result = attend(query[:, here], **arrays, mask=allowed[:, here], coverage=coverage)
        coverage = np.asarray(result.coverage)
        for field in ("output", "weights", "loss"):
            np.testing.assert_allclose(
                getattr(result, field), getattr(at_once, field)[:, here], atol=1e-6
            )
    np.testing.assert_allclose(coverage, at_once.coverage, atol=1e-6)


@pytest.mark.parametrize("name", ["additive", pytest.param("scaled", marks=pytest.mark.slow)])
def test_a_kernel_of_zeros_is_attention(name):
    arrays = case(name, B)
    kernel = np.zeros_like(arrays.pop("coverage_kernel"))

    @quick_jit
    def run(value, arrays):
        options = arrays | {"score": name, "mask": causal_mask(1)}
        return (
            coverage_attention(value=value, **options, coverage_kernel=kernel),
            aj.attention(value=value, **options),
            aj.attention_weights(**options),
        )

    result, output, weights = run(arrays.pop("value"), arrays)
    np.testing.assert_allclose(result.output, output, atol=2e-6)
    np.testing.assert_allclose(result.weights, weights, atol=1e-6)
    np.testing.assert_allclose(result.coverage, np.sum(weights, -2), atol=3e-6)


def test_coverage_loss():
    loss = quick_jit(coverage_loss)
    weights = np.float32([[0.5, 0.5, 0.0], [0.25, 0.0, 0.75], [0.0, 1.0, 0.0]])
    np.testing.assert_allclose(loss(weights), [0, 0.25, 0.5])
    earlier = np.float32([0.125, 0.0, 1.0])
    np.testing.assert_allclose(loss(weights, earlier), [0.125, 0.25 + 0.75, 0.5])
    # Batches, and the loss that came with the weights.
    arrays = case("dot", B, 3)
    coverage = np.random.default_rng(4).uniform(size=(B, 1, S)).astype(np.float32)
    attend = quick_jit(functools.partial(coverage_attention, score="dot"))
    result = attend(**arrays, coverage=coverage)
    np.testing.assert_allclose(loss(result.weights, coverage), result.loss, atol=1e-6)
    assert np.all((np.asarray(result.loss) > 0) & (np.asarray(result.loss) < 1 + 1e-6))
    assert coverage_loss(np.zeros((0, 3), np.float32)).shape == (0,)


@pytest.mark.parametrize("name", ["additive", pytest.param("scaled", marks=pytest.mark.slow)])
def test_nan_in_padding_reaches_nothing(name):
    arrays = case(name)
    allowed = np.ones((T, S), bool)
    allowed[3], allowed[:, 4:] = False, False
    coverage = np.random.default_rng(5).uniform(size=S).astype(np.float32)

    def run(arrays, coverage):
        return gradients_of(name)(arrays, allowed, coverage)

    expected, clean = run(arrays, coverage)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((expected, clean)))
    np.testing.assert_array_equal(np.asarray(expected[1]) != 0, np.arange(S) < 4)
    bad = {name: np.array(array) for name, array in arrays.items() if name != "params"}
    for token, padded in (("query", 3), ("key", slice(4, None)), ("value", slice(4, None))):
        bad[token][padded] = np.nan
    gradients, result = run({**arrays, **bad}, coverage)
    jax.tree.map(np.testing.assert_array_equal, result, clean)
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)
    # Coverage of padding is handed on as it came, and changes nothing else.
    bad_coverage = np.where(np.arange(S) < 4, coverage, np.nan).astype(np.float32)
    gradients, result = run(arrays, bad_coverage)
    np.testing.assert_array_equal(np.asarray(result.coverage)[:4], np.asarray(clean.coverage)[:4])
    assert np.all(np.isnan(np.asarray(result.coverage)[4:]))
    np.testing.assert_array_equal(result.output, clean.output)
    np.testing.assert_array_equal(result.loss, clean.loss)
    jax.tree.map(np.testing.assert_array_equal, gradients, expected)


def test_batches_are_loops_and_jit_changes_nothing():
    arrays = case("additive", B, 3)
    # One key and value for the three heads, a kernel of each head, a coverage of each example.
    arrays["key"], arrays["value"] = arrays["key"][:, :1], arrays["value"][0, 0]
    rng = np.random.default_rng(7)
    arrays["coverage_kernel"] = rng.normal(size=(3, DK)).astype(np.float32)
    coverage = rng.uniform(size=(B, 1, S)).astype(np.float32)
    lengths = np.array([[4], [S]])

    def run(arrays, coverage, lengths):
        return coverage_attention(
            **arrays, score="additive", mask=padding_mask(lengths), coverage=coverage
        )

    result = jax.tree.map(np.asarray, run(arrays, coverage, lengths))
    assert [leaf.shape for leaf in result] == [(B, 3, T, DV), (B, 3, T, S), (B, 3, S), (B, 3, T)]
    agree(quick_jit(run)(arrays, coverage, lengths), result, 1e-6)
    attend = quick_jit(functools.partial(coverage_attention, score="additive"))
    one = {"value": arrays["value"], "params": arrays["params"]}
    for b, n in np.ndindex(B, 3):
        one["query"], one["key"] = arrays["query"][b, n], arrays["key"][b, 0]
        one["coverage_kernel"] = arrays["coverage_kernel"][n]
        mask = padding_mask(lengths[b, 0])
        alone = attend(**one, mask=mask, coverage=coverage[b, 0])
        agree(jax.tree.map(lambda leaf, at=(b, n): leaf[at], result), alone, 1e-6)
    # A vmap from outside is the same once more.
    in_axes = {"query": 0, "key": 0, "value": None, "params": None, "coverage_kernel": None}
    mapped = quick_jit(jax.vmap(run, (in_axes, 0, 0)))(arrays, coverage, lengths)
    agree(mapped, result, 1e-6)


def test_bfloat16_computes_in_float32():
    wide = case("additive")
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide)
    result = coverage_attention(**narrow, score="additive")
    assert [leaf.dtype.name for leaf in result] == ["bfloat16"] * 2 + ["float32"] * 2
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float32), narrow)
    same = coverage_attention(**wide, score="additive")
    output = np.asarray(result.output).astype(np.float32)
    np.testing.assert_allclose(output, same.output, rtol=4e-3, atol=4e-3)
    np.testing.assert_array_equal(result.coverage, same.coverage)
    np.testing.assert_array_equal(result.loss, same.loss)
    assert jax.eval_shape(coverage_loss, result.weights).dtype == jnp.float32


# --- features of keys ---


@dataclasses.dataclass(frozen=True)
class Pieces(Score):
    """A score whose features of keys are a pair of arrays."""

    def project_key(self, params, key):
        return key, jnp.sum(key, axis=-1)

    def pair(self, params, q_features, k_features):
        return q_features @ k_features[0].T + k_features[1][None, :]


def test_the_size_of_the_kernel_is_that_of_the_features():
    assert coverage_kernel_size(Additive(A), DQ, DK) == A
    given = numpy_params(Additive(A), DQ, DK)
    assert coverage_kernel_size("additive", DQ, DK, given) == A
    assert coverage_kernel_size("general", DQ, DK) == DK
    tokens = [np.ones(shape, np.float32) for shape in ((T, DK), (S, DK), (S, DV))]
    with pytest.raises(ValueError, match=r"must project keys to one .* array \[S, Fk\].*Pieces"):
        coverage_attention(*tokens, score=Pieces(), coverage_kernel=np.ones(DK, np.float32))
