"""Every score: values by hand, the formula and its derivatives, initialisation, options."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import assert_close, named, quick_jit
from finite_differences import check_derivatives
from oracles import complex_step, normal
from products import product_dtypes
from score_cases import CORE_SCORES, DK, DQ, SCORE_CASES, A, features_of, numpy_params

from attention_jax import attention
from attention_jax.scores import (
    Additive,
    Cosine,
    Dot,
    General,
    NegativeSquaredDistance,
    ScaledDot,
    Score,
    SoftCap,
    WrappedScore,
)

RNG = jax.random.key(3)
T, S = 5, 7


def tokens(query_dim=DK, dtype=np.float32):
    return normal(T, query_dim, dtype=dtype), normal(S, DK, dtype=dtype)


@pytest.mark.parametrize("name", SCORE_CASES)
def test_logits_and_pair_vjp_are_those_of_the_formula(name):
    case = SCORE_CASES[name]
    params = jax.tree.map(np.float64, numpy_params(case.score, case.query_dim, DK))
    arrays = params, *(normal(n, d, dtype=float) for n, d in ((2, case.query_dim), (3, DK)))
    dlogits = normal(2, 3, dtype=float)

    @quick_jit
    def run(arrays, dlogits):
        features, pull_back = jax.vjp(functools.partial(features_of, case.score), *arrays)
        dparams, *dfeatures = case.score.pair_vjp(arrays[0], *features, dlogits)
        dprojected, dquery, dkey = pull_back(tuple(dfeatures))
        return case.score(*arrays), (jax.tree.map(jnp.add, dparams, dprojected), dquery, dkey)

    def formula(arrays):
        """The logits of each pair [P, 6]; the arrays have an axis of perturbations."""
        params, query, key = arrays
        pairs = np.ndindex(dlogits.shape)
        return np.stack([case.logits(params, query[:, i], key[:, j]) for i, j in pairs], -1)

    values = formula(jax.tree.map(lambda leaf: leaf[None], arrays))[0].reshape(dlogits.shape)
    gradient = complex_step(lambda arrays: formula(arrays).imag @ dlogits.reshape(-1), arrays)
    with jax.enable_x64(True):
        got = named(run(arrays, dlogits))
    for path, expected in named((values, gradient)).items():
        assert_close(path, got[path], expected, 1e-12)


@pytest.mark.parametrize("name", ["additive", "cosine"])  # the others' rules are JAX's own
def test_second_derivatives(name):
    case = SCORE_CASES[name]
    with jax.enable_x64(True):
        params = numpy_params(case.score, case.query_dim, DK)
        check_derivatives(case.score, params, normal(2, case.query_dim), normal(3, DK))


@pytest.mark.parametrize("scale", [2.0, 1, 0, -0.5, np.float64(0.5), np.float32(0.25)])
def test_fixed_scales_and_their_dtype(scale):
    query, key = tokens()
    for score in (ScaledDot, Cosine, NegativeSquaredDistance):
        expected = float(scale) * np.float64(score(1.0)({}, query, key))
        for x64 in (False, True):
            with jax.enable_x64(x64):
                got = score(scale)({}, query, key)
                assert SoftCap(cap=np.float64(2.0))({}, query, key).dtype == jnp.float32
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, expected, atol=3e-6 * max(1, abs(expected).max()))
        assert score(scale).init(RNG, DK, DK) == {}


# --- initialisation ---


@pytest.mark.parametrize("name", SCORE_CASES)
def test_how_many_parameters(name):
    shapes = jax.eval_shape(lambda: SCORE_CASES[name].score.init(RNG, 64, 64))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == SCORE_CASES[name].params_at_64


@pytest.mark.parametrize("name", [name for name in CORE_SCORES if name not in ("dot", "own")])
def test_first_logits_have_standard_deviation_1(name):
    case = SCORE_CASES[name]
    score = case.score if name != "softcap" else SoftCap(General())
    query_dim, key_dim = (37, 37) if score.needs_equal_dims else (DQ, DK)

    def logits(rng):
        params_rng, query_rng, key_rng = jax.random.split(rng, 3)
        query = jax.random.normal(query_rng, (4, query_dim))
        key = jax.random.normal(key_rng, (4, key_dim))
        return score(score.init(params_rng, query_dim, key_dim), query, key)

    sample = quick_jit(jax.vmap(logits))(jax.random.split(RNG, 400))
    assert 0.9 < sample.std() < 1.1
    # A distance has a mean, which the softmax does not see: E|q - k|^2 = 2 Dk.
    mean = -2 * key_dim / math.sqrt(8 * key_dim) if name == "distance" else 0
    assert abs(sample.mean() - mean) < 0.1


# --- rounding and extremes ---


@pytest.mark.parametrize("length", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_lengths_of_vectors_do_not_matter_to_a_cosine(length):
    """Squares of these overflow or vanish in float32; the gradient is 1 / length times as large."""
    query, key = tokens()

    @jax.jit
    def run(query, key):
        return jax.value_and_grad(lambda q: jnp.sum(jnp.sin(Cosine(1.0)({}, q, key))))(query)

    value, gradient = run(query * np.float32(length), key / np.float32(length))
    expected, expected_gradient = run(query, key)
    np.testing.assert_allclose(value, expected, atol=1e-5)
    assert_close("gradient", gradient * length, expected_gradient, 2e-6)


def test_a_cosine_of_zeros():
    """Everything is 0 there, in any order and mode, and nothing becomes NaN."""
    query, key = (jnp.asarray(x) for x in tokens())
    query, key = query.at[2].set(0), key.at[3].set(0)
    params = numpy_params(Cosine(), DK, DK)

    def total(arrays):
        return jnp.sum(jnp.cos(Cosine()(params, *arrays)))

    def of_gradient(arrays):
        return sum(jnp.sum(jnp.sin(x) + x**2) for x in jax.grad(total)(arrays))

    derivatives = quick_jit(
        lambda arrays: [jax.grad(total)(arrays), jax.grad(of_gradient)(arrays),
                        jax.hessian(total)(arrays)]
    )  # fmt: skip
    *first_and_second, hessian = derivatives((query, key))
    for leaf in jax.tree.leaves((first_and_second, hessian)):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)
    for dquery, dkey in ((Cosine()(params, query, key), Cosine()(params, query, key).T),
                         *first_and_second):  # fmt: skip
        assert not np.any(dquery[2])
        assert not np.any(dkey[3])


@pytest.mark.parametrize("shift", [0.0, 10.0, 100.0])
def test_rounding_of_the_distance_is_as_documented(shift):
    """Where the three terms cancel: eps scale (|q|^2 + |k|^2), and no more than a few of those."""
    query, key = (x + np.float32(shift) for x in tokens())
    q, k = np.float64(query)[:, None], np.float64(key)[None]
    error = np.abs(np.float64(NegativeSquaredDistance(1.0)({}, query, key)) + ((q - k) ** 2).sum(2))
    assert (error <= 2 * np.finfo(np.float32).eps * (q**2 + k**2).sum(2)).all()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (query, key)]  # computed in float32
    got, wide = (
        NegativeSquaredDistance(1.0)({}, *pair) for pair in (narrow, map(jnp.float32, narrow))
    )
    np.testing.assert_array_equal(got, wide)


@pytest.mark.parametrize("inner", [Dot(), Cosine(1.0), NegativeSquaredDistance(), SoftCap()])
def test_a_cap_multiplies_bfloat16_tokens_in_bfloat16(inner):
    def gradient(query, key):
        def total(query):
            return attention(query, key, key, score=SoftCap(inner), implementation="tiled").sum()

        return jax.grad(total)(query)

    assert product_dtypes(gradient, *tokens(dtype=jnp.bfloat16)) == {("bfloat16", "bfloat16")}


# --- keys that are projected once ---


# --- classes of one's own ---


def test_a_new_pair_says_what_describes_it():
    """Inherited in silence, it would be the gradient of another function."""

    class Tripled(Score):
        def pair(self, params, q_features, k_features):
            return 3 * super().pair(params, q_features, k_features)

    with pytest.raises(TypeError, match=r"TripledAdditive .* pair_vjp = Score\.pair_vjp"):
        type("TripledAdditive", (Tripled, Additive), {})
    with pytest.raises(TypeError, match=r"Doubled .* round = WrappedScore\.round"):
        type("Doubled", (WrappedScore,), {"pair": Tripled.pair})

    class TripledAdditive(Tripled, Additive):
        pair_vjp = Score.pair_vjp
        tile_params = Additive.tile_params
        finite_slopes = Additive.finite_slopes

    (query, key), params = tokens(DQ), numpy_params(Additive(A), DQ, DK)

    @quick_jit
    def run(params):  # whose hidden size the score takes from them
        tripled, plain = (
            jax.value_and_grad(
                lambda params, score=score: attention(
                    query, key, key, score=score, params=params, return_statistics=True
                )[1].max_logit.sum()
            )(params)
            for score in (TripledAdditive(), Additive(A))
        )
        return tripled, plain

    tripled, plain = run(params)
    np.testing.assert_allclose(tripled[0], 3 * plain[0], rtol=1e-6)
