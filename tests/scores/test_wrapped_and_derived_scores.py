"""Cosine, distance, concat and soft-cap scores, and keys that are projected once."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import DK, DQ, SCORE_CASES, OwnCosine, S, T, assert_close, quick_jit
from products import product_dtypes

from attention_jax import attention, attention_weights, causal_mask
from attention_jax.scores import (
    SCORES,
    Additive,
    Concat,
    Cosine,
    Dot,
    General,
    NegativeSquaredDistance,
    ScaledDot,
    SoftCap,
    project_keys,
)

RNG = jax.random.key(3)


def tokens(query_dim=DK, dtype=np.float32, seed=1):
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(T, query_dim)), rng.normal(size=(S, DK))
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype)


# --- cosine ---


def test_cosine_by_hand():
    query, key = jnp.array([[3.0, 4.0]]), jnp.array([[5.0, 12.0], [-30.0, -40.0], [0.0, 0.0]])
    # (15 + 48) / (5 * 13), the opposite direction, and none at all
    expected = np.array([[63 / 65, -1.0, 0.0]])
    np.testing.assert_allclose(Cosine(1.0)({}, query, key), expected, rtol=1e-6)
    params = {"log_scale": jnp.log(10.0)}
    np.testing.assert_allclose(Cosine()(params, query, key), 10 * expected, rtol=1e-6)


@pytest.mark.parametrize("scale", [2.0, 1, 0, -0.5, np.float64(0.5), np.float32(0.25)])
@pytest.mark.parametrize("of", [Cosine, NegativeSquaredDistance])
def test_fixed_scales(of, scale):
    query, key = tokens()
    q, k = np.float64(query), np.float64(key)
    if of is Cosine:
        cosine = (q / np.linalg.norm(q, axis=1)[:, None]) @ (
            k / np.linalg.norm(k, axis=1)[:, None]
        ).T
        expected = float(scale) * cosine
    else:
        expected = -float(scale) * ((q[:, None] - k[None]) ** 2).sum(-1)
    assert of(scale).init(RNG, DK, DK) == {}
    for x64 in (False, True):
        with jax.enable_x64(x64):
            got = jax.jit(of(scale))({}, query, key)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=2e-6 * max(1, np.abs(expected).max()))


def test_a_cosine_starts_with_scale_sqrt_dk():
    params = Cosine().init(RNG, 49, 49)
    np.testing.assert_allclose(jnp.exp(params["log_scale"]), 7, rtol=1e-6)
    assert not params["log_scale"].weak_type  # a trained one would compile everything again


@pytest.mark.parametrize("length", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_lengths_of_vectors_do_not_matter(length):
    """Squares of these overflow or vanish in float32; the gradient is 1 / length times as large."""
    query, key = tokens()
    np.testing.assert_allclose(
        Cosine(1.0)({}, query * length, key / length), Cosine(1.0)({}, query, key), atol=1e-6
    )

    def total(query):
        return jnp.sum(jnp.sin(Cosine(1.0)({}, query, key)))

    gradient = jax.jit(jax.grad(total))
    assert_close("gradient", gradient(query * length) * length, gradient(query), 2e-6)


def test_vectors_of_zeros():
    """Everything is 0 there, in any order and mode, and nothing becomes NaN."""
    query, key = tokens()
    query, key = query.at[2].set(0), key.at[3].set(0)
    params = Cosine().init(RNG, DK, DK)

    def total(arrays):
        return jnp.sum(jnp.cos(Cosine()(params, *arrays)))

    logits = Cosine()(params, query, key)
    assert not np.any(logits[2])
    assert not np.any(logits[:, 3])

    def of_gradient(arrays):
        return sum(jnp.sum(jnp.sin(x) + x**2) for x in jax.grad(total)(arrays))

    derivatives = jax.grad(total), jax.grad(of_gradient), jax.hessian(total)
    (dquery, dkey), (ddquery, ddkey), hessian = quick_jit(
        lambda arrays: [derivative(arrays) for derivative in derivatives]
    )((query, key))
    for leaf in jax.tree.leaves((dquery, dkey, ddquery, ddkey, hessian)):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)
    for array, row in ((dquery, 2), (dkey, 3), (ddquery, 2), (ddkey, 3)):
        assert not np.any(array[row])
    # and through attention, where all queries and keys are zeros: uniform weights
    zeros = jnp.zeros((T, DK))
    for implementation in ("reference", "tiled"):

        def attend(query, implementation=implementation):
            return attention(
                query, query, query + 1, score=Cosine(), params=params,
                implementation=implementation,
            ).sum()  # fmt: skip

        np.testing.assert_allclose(quick_jit(jax.grad(attend))(zeros), np.ones((T, DK)), rtol=1e-6)


def test_the_gradient_of_a_cosine_is_orthogonal():
    """The gradient is orthogonal to the vector: its length has no influence."""
    query, key = tokens()
    gradient = jax.grad(lambda query: jnp.sum(jnp.sin(Cosine(1.0)({}, query, key))))(query)
    np.testing.assert_allclose((gradient * query).sum(1), np.zeros(T), atol=2e-6)


# --- distance ---


def test_distance_by_hand():
    query, key = jnp.array([[1.0, 2.0]]), jnp.array([[4.0, 6.0], [1.0, 2.0]])
    # 9 + 16, times 1 / sqrt(16)
    np.testing.assert_allclose(NegativeSquaredDistance()({}, query, key), [[-6.25, 0.0]], atol=1e-6)


def test_weights_of_the_distance_are_gaussian():
    query, key = tokens()
    scale = 0.3
    got = attention_weights(query, key, score=NegativeSquaredDistance(scale))
    squares = ((np.float64(query)[:, None] - np.float64(key)[None]) ** 2).sum(-1)
    variance = 1 / (2 * scale)
    density = np.exp(-squares / (2 * variance))
    np.testing.assert_allclose(got, density / density.sum(1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize("shift", [0.0, 10.0, 100.0])
def test_rounding_of_the_distance_is_as_documented(shift):
    """Where the three terms cancel: eps scale (|q|^2 + |k|^2), and no more than a few of those."""
    query, key = (x + shift for x in tokens())
    exact = NegativeSquaredDistance(1.0)
    squares = ((np.float64(query)[:, None] - np.float64(key)[None]) ** 2).sum(-1)
    terms = (np.float64(query) ** 2).sum(1)[:, None] + (np.float64(key) ** 2).sum(1)[None]
    error = np.abs(np.float64(exact({}, query, key)) + squares)
    assert (error <= 2 * np.finfo(np.float32).eps * terms).all()


def test_distance_of_half_precision_is_computed_in_float32():
    query, key = (x.astype(jnp.bfloat16) for x in tokens())
    got = NegativeSquaredDistance(1.0)({}, query, key)
    wide = NegativeSquaredDistance(1.0)({}, query.astype(jnp.float32), key.astype(jnp.float32))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, wide)


# --- concat ---


@pytest.mark.parametrize("query_dim", [DQ, DK])
def test_concat_is_additive_with_one_kernel(query_dim):
    query, key = tokens(query_dim)
    joined = Concat(17).init(RNG, query_dim, DK)
    assert jax.tree.map(jnp.shape, joined) == {"kernel": (query_dim + DK, 17), "v": (17,)}
    split = {
        "query_kernel": joined["kernel"][:query_dim],
        "key_kernel": joined["kernel"][query_dim:],
        "v": joined["v"],
    }
    np.testing.assert_array_equal(Concat(17)(joined, query, key), Additive(17)(split, query, key))
    # and the other way round, with gradients
    split = Additive(17).init(jax.random.key(5), query_dim, DK)
    joined = {
        "kernel": jnp.concatenate([split["query_kernel"], split["key_kernel"]]),
        "v": split["v"],
    }

    def loss(params, score):
        output = attention(query, key, key, score=score, params=params, implementation="tiled")
        return jnp.sum(output**2)

    gradient = quick_jit(jax.grad(loss), static_argnums=1)
    of_joined, of_split = gradient(joined, Concat()), gradient(split, Additive())
    expected = jnp.concatenate([of_split["query_kernel"], of_split["key_kernel"]])
    assert_close("kernel", of_joined["kernel"], expected, 1e-6)
    assert_close("v", of_joined["v"], of_split["v"], 1e-6)


def test_concat_is_initialised_as_additive_is():
    joined, split = (score.init(RNG, DQ, DK) for score in (Concat(17), Additive(17)))
    stacked = np.concatenate([split["query_kernel"], split["key_kernel"]])
    np.testing.assert_array_equal(joined["kernel"], stacked)
    np.testing.assert_array_equal(joined["v"], split["v"])


def test_concat_checks_its_parameters():
    query, key = tokens(DQ)
    params = Additive(17).init(RNG, DQ, DK)
    with pytest.raises(ValueError, match=r"params must be {'kernel': \[14, 11\], 'v': \[11\]}"):
        attention(query, key, key, score=Concat(), params={"kernel": jnp.ones((14, 11))})
    with pytest.raises(ValueError, match=r"params must be {'kernel': \[14, 17\], 'v': \[17\]}"):
        attention(query, key, key, score=Concat(), params=params)


# --- soft cap ---


def test_soft_cap_by_hand():
    query, key = jnp.array([[1.0]]), jnp.array([[0.5], [-2.0], [1e6], [-1e30]])
    got = SoftCap(Dot(), cap=2.0)({}, query, key)
    expected = [[2 * math.tanh(0.25), -2 * math.tanh(1.0), 2.0, -2.0]]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_high_cap_changes_nothing():
    query, key = tokens()
    np.testing.assert_allclose(
        SoftCap(cap=1e5)({}, query, key), ScaledDot()({}, query, key), rtol=2e-6
    )


def test_logits_beyond_the_cap_have_no_gradient():
    def output(query):
        return attention(
            query, jnp.array([[1e4], [-1e4]]), jnp.ones((2, 1)), score=SoftCap(Dot(), 3.0),
            implementation="tiled", return_statistics=True,
        )  # fmt: skip

    query = jnp.array([[1.0], [1e-5]])
    _, statistics = output(query)
    np.testing.assert_allclose(statistics.max_logit, [3.0, 3 * math.tanh(0.1 / 3)], rtol=1e-6)
    gradient = jax.grad(lambda query: output(query)[1].logsumexp.sum())(query)
    assert gradient[0] == 0
    assert gradient[1] > 0


@pytest.mark.parametrize("inner", [Additive(17), Cosine(), OwnCosine(), SoftCap(General(), 3.0)])
def test_a_cap_on_any_score(inner):
    """Parameters, sizes and gradients are those of the score within."""
    score = SoftCap(inner, np.float64(0.7))
    query_dim = DK if inner.needs_equal_dims else DQ
    assert score.needs_equal_dims == inner.needs_equal_dims
    with jax.enable_x64(True):
        query, key = tokens(query_dim, np.float64)
        params = jax.tree.map(np.float64, score.init(RNG, query_dim, DK))

        def loss(arrays, score, implementation):
            params, query, key = arrays
            output = attention(
                query, key, key, score=score, params=params, implementation=implementation,
                mask=causal_mask(),
            )  # fmt: skip
            return jnp.sum(jnp.sin(output))

        expected = 0.7 * np.tanh(inner(params, query, key) / 0.7)
        np.testing.assert_allclose(score(params, query, key), expected, rtol=1e-12)
        got, plain = quick_jit(
            lambda arrays: [jax.grad(loss)(arrays, score, name) for name in ("tiled", "reference")]
        )((params, query, key))
        for ours, theirs in zip(*map(jax.tree.leaves, (got, plain)), strict=True):
            assert_close("gradient", ours, theirs, 1e-11)
            assert np.any(ours)


@pytest.mark.parametrize("inner", [Dot(), Cosine(1.0), NegativeSquaredDistance(), SoftCap()])
def test_a_cap_multiplies_bfloat16_tokens_in_bfloat16(inner):
    query, key = tokens(dtype=jnp.bfloat16)

    def gradient(query, key):
        return jax.grad(
            lambda query: attention(
                query, key, key, score=SoftCap(inner), implementation="tiled"
            ).sum()
        )(query)

    assert product_dtypes(gradient, query, key) == {("bfloat16", "bfloat16")}


def test_in_float32_a_cap_keeps_float32():
    query, key = tokens()
    for x64 in (False, True):
        with jax.enable_x64(x64):
            assert SoftCap(cap=np.float64(2.0))({}, query, key).dtype == jnp.float32


def test_a_cap_reports_mismatched_sizes():
    query, key = tokens(DQ)
    with pytest.raises(
        ValueError, match=r"key must be \[..., S, 3\] to match score SoftCap\(score="
    ):
        attention(query, key, key, score=SoftCap())


# --- keys that are projected once ---


@pytest.mark.parametrize("name", [*SCORES, "own"])
def test_projected_keys(name):
    case = SCORE_CASES[name]
    query, key = tokens(case.query_dim)
    params = case.score.init(RNG, case.query_dim, DK)

    def loss(arrays, project):
        params, query, key, value = arrays
        if project:
            key = project_keys(case.score, params, key)
        output = attention(
            query, key, value, score=case.score, params=params, mask=causal_mask(1),
            implementation="tiled" if name in ("additive", "dot", "own") else "reference",
        )  # fmt: skip
        return jnp.sum(output**2), output

    arrays = (params, query, key, key + 1)
    gradients = jax.grad(loss, has_aux=True)
    (gradient, output), (expected_gradient, expected) = quick_jit(
        lambda arrays: (gradients(arrays, True), gradients(arrays, False))
    )(arrays)
    assert_close("output", output, expected, 1e-6)
    for got, leaf in zip(*map(jax.tree.leaves, (gradient, expected_gradient)), strict=True):
        assert_close("gradient", got, leaf, 2e-6)


def test_projected_keys_with_parameters_per_head():
    score = Concat(17)
    params = jax.vmap(lambda rng: score.init(rng, DQ, DK))(jax.random.split(RNG, 3))
    query, key = (jnp.stack([x, x + 1, 2 * x]) for x in tokens(DQ))

    @quick_jit
    def both(params, query, key):
        projected = jax.vmap(lambda params, key: project_keys(score, params, key))(params, key)
        assert projected.shape == key.shape
        return [attention(query, k, key, score=score, params=params) for k in (projected, key)]

    got, expected = both(params, query, key)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_joint_projection_is_refused():
    class Old(Dot):
        def project(self, params, query, key):
            return query, key

    with pytest.raises(ValueError, match=r"Old defines project.*define project_query"):
        attention(*tokens(DK), tokens(DK)[1], score=Old())


# --- options ---


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cosine(math.nan), "scale must be a finite float or None; got nan"),
        (lambda: NegativeSquaredDistance("1"), "scale must be a finite float or None; got '1'"),
        (lambda: Concat(0), "hidden_dim must be at least 1; got 0"),
        (lambda: SoftCap(cap=0.0), "cap must be a finite float above 0; got 0.0"),
        (lambda: SoftCap(cap=-1), "cap must be a finite float above 0; got -1"),
        (lambda: SoftCap(cap=math.inf), "cap must be a finite float above 0; got inf"),
        (lambda: SoftCap(cap=math.nan), "cap must be a finite float above 0; got nan"),
        (lambda: SoftCap(cap="50"), "cap must be a finite float above 0; got '50'"),
        (lambda: SoftCap("scaled"), "score must be a Score; got 'scaled'"),
        (lambda: SoftCap(50.0), "score must be a Score; got 50.0"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()
