"""Coverage against See et al.'s equations in NumPy, a query and a key at a time."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import quick_jit
from finite_differences import check_derivatives
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


def _direction(x):
    return x / np.sqrt((x * x).sum())


def _concat(p, q, k, c, w):
    return p["v"] @ np.tanh(np.concatenate([q, k]) @ p["kernel"] + c * w)


def _distance(p, q, k, c, w):  # whose features of a query are [2 scale q, -scale |q|^2, 1, 1]
    scale = (8 * k.size) ** -0.5
    square = -scale * (q @ q)
    rounded = float(jnp.bfloat16(square))  # two features: what bfloat16 holds, and the remainder
    of_query = np.concatenate([2 * scale * q, [rounded, square - rounded, 1, 1]])
    return -scale * ((q - k) ** 2).sum() + c * (of_query @ w)


FORMULAS = {
    "additive": lambda p, q, k, c, w: (
        p["v"] @ np.tanh(q @ p["query_kernel"] + k @ p["key_kernel"] + c * w)
    ),
    "concat": _concat,
    "cosine": lambda p, q, k, c, w: (
        np.exp(p["log_scale"]) * _direction(q) @ (_direction(k) + c * w)
    ),
    "distance": _distance,
    "dot": lambda p, q, k, c, w: q @ (k + c * w),
    "general": lambda p, q, k, c, w: q @ p["kernel"] @ (k + c * w),
    "scaled": lambda p, q, k, c, w: q @ (k + c * w) / np.sqrt(k.size),
    "softcap": lambda p, q, k, c, w: 50 * np.tanh(q @ (k + c * w) / np.sqrt(k.size) / 50),
}


def by_hand(logit, query, key, value, allowed=None, bias=None, coverage=None):
    """One example; `logit(q, k, c)`. Returns output, weights, coverage, loss."""
    t, s = len(query), len(key)
    coverage = np.zeros(s) if coverage is None else np.array(coverage, np.float64)
    output, weights, loss = np.zeros((t, value.shape[1])), np.zeros((t, s)), np.zeros(t)
    for i in range(t):
        keys = [j for j in range(s) if allowed is None or allowed[i, j]]
        exps = {}
        for j in keys:
            added = 0 if bias is None else bias[i, j]
            exps[j] = np.exp(logit(query[i], key[j], coverage[j]) + added)
        for j in keys:
            weights[i, j] = exps[j] / sum(exps.values())
            output[i] += weights[i, j] * value[j]
            loss[i] += min(weights[i, j], coverage[j])
        coverage = coverage + weights[i]
    return output, weights, coverage, loss


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


@pytest.mark.parametrize("name", SCORES)
def test_every_score_with_mask_bias_and_earlier_coverage(name):
    arrays = case(name, B)
    rng = np.random.default_rng(2)
    bias = rng.normal(size=(B, T, S)).astype(np.float32)
    coverage = rng.uniform(0, 2, size=(B, S)).astype(np.float32)
    lengths = np.array([S - 2, S])
    allowed = np.tril(np.ones((T, S), bool), 1) & (np.arange(S) < lengths[:, None, None])
    result = quick_jit(functools.partial(coverage_attention, score=name))(
        **arrays, mask=causal_mask(1) & padding_mask(lengths), bias=bias, coverage=coverage
    )
    wide = jax.tree.map(np.float64, arrays)

    def logit(q, k, c):
        return FORMULAS[name](wide["params"], q, k, c, wide["coverage_kernel"])

    for b in range(B):
        tokens = (wide[token][b] for token in ("query", "key", "value"))
        expected = by_hand(logit, *tokens, allowed[b], bias[b], coverage[b])
        agree(jax.tree.map(lambda leaf, b=b: leaf[b], result), expected, 2e-5)


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


def test_rows_without_keys():
    arrays, allowed = case("additive"), np.ones((T, S), bool)
    allowed[2] = False
    coverage = np.zeros(S, np.float32)  # 0 and 0 tie in the minimum: no gradient may pass
    _, result = gradients_of("additive")(arrays, allowed, coverage)
    for field in ("output", "weights", "loss"):
        assert not np.any(getattr(result, field)[2])
    wide = jax.tree.map(np.float64, arrays)
    formula = functools.partial(FORMULAS["additive"], wide["params"])
    skipped = by_hand(
        lambda q, k, c: formula(q, k, c, wide["coverage_kernel"]),
        np.delete(wide["query"], 2, 0), wide["key"], wide["value"],
    )  # fmt: skip
    np.testing.assert_allclose(result.coverage, skipped[2], atol=3e-6)
    np.testing.assert_allclose(np.delete(result.output, 2, 0), skipped[0], atol=3e-6)
    gradients, _ = gradients_of("additive")(arrays, np.zeros((T, S), bool), coverage)
    for leaf in jax.tree.leaves(gradients):
        assert not np.any(leaf)


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


@pytest.mark.parametrize("name", ["general", pytest.param("additive", marks=pytest.mark.slow)])
def test_derivatives(name):
    def results(arrays, coverage):
        return coverage_attention(**arrays, score=name, mask=causal_mask(2), coverage=coverage)

    with jax.enable_x64(True):
        arrays = case(name, target=3, source=5, dtype=np.float64)
        coverage = np.random.default_rng(6).uniform(size=5)
        check_derivatives(results, arrays, coverage)


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


def test_nothing_to_attend_to():
    arrays = case("dot", target=0)
    result = coverage_attention(**arrays, score="dot", coverage=np.ones(S, np.float32))
    assert result.loss.shape == (0,)
    np.testing.assert_array_equal(result.coverage, np.ones(S))
    result = coverage_attention(**case("dot", source=0), score="dot")
    assert not np.any(result.output)
    assert not np.any(result.loss)


# --- what users get wrong ---


@dataclasses.dataclass(frozen=True)
class Pieces(Score):
    """A score whose features of keys are a pair of arrays."""

    def project_key(self, params, key):
        return key, jnp.sum(key, axis=-1)

    def pair(self, params, q_features, k_features):
        return q_features @ k_features[0].T + k_features[1][None, :]


def test_features_that_are_not_one_array():
    tokens = [np.ones(shape, np.float32) for shape in ((T, DK), (S, DK), (S, DV))]
    assert aj.attention(*tokens, score=Pieces(), implementation="reference").shape == (T, DV)
    with pytest.raises(ValueError, match=r"must project keys to one .* array \[S, Fk\].*Pieces"):
        coverage_attention(*tokens, score=Pieces(), coverage_kernel=np.ones(DK, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"coverage_kernel": np.ones(A, np.float32)}, r"coverage_kernel must be \[11\].*\[17\]"),
        ({"coverage_kernel": np.ones((3, DK), np.float32)}, r"must be \[11\], with .*\[3, 11\]"),
        ({"coverage_kernel": np.ones(1, np.float32)}, r"coverage_kernel must be \[11\].*got \[1\]"),
        ({"coverage_kernel": None}, "coverage_kernel must be an array; got NoneType"),
        ({"coverage": np.ones((B, T), np.float32)}, r"coverage must be \[7\], with .* \[2\]; got"),
        ({"coverage": np.ones((B, 1), np.float32)}, r"coverage must be \[7\].*got \[2, 1\]"),
        ({"coverage": np.ones((1, B, S), np.float32)}, r"coverage must be \[7\].*got \[1, 2, 7\]"),
        ({"coverage": np.ones((B, S), int)}, "coverage must be floating-point; got dtype int"),
        ({"score": "additiv"}, "did you mean 'additive'"),
        ({"params": {}}, "params must be"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        coverage_attention(**{"score": "additive", **case("additive", B), **changes})


def test_bad_weights():
    with pytest.raises(ValueError, match=r"weights must be \[\*B, T, S\]; got \[7\]"):
        coverage_loss(np.ones(S, np.float32))
    with pytest.raises(ValueError, match="weights must be floating-point"):
        coverage_loss(np.ones((T, S), int))
    with pytest.raises(ValueError, match=r"coverage must be \[7\]; got \[5\]"):
        coverage_loss(np.ones((T, S), np.float32), np.ones(T, np.float32))


def test_size_of_the_kernel():
    assert coverage_kernel_size(Additive(A), DQ, DK) == A
    given = numpy_params(Additive(A), DQ, DK)
    assert coverage_kernel_size("additive", DQ, DK, given) == A
    assert coverage_kernel_size("general", DQ, DK) == DK
