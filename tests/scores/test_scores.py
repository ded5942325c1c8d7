"""Every score: values by hand, the formula and its derivatives, initialisation, options."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import assert_close, quick_jit
from oracles import complex_step, normal, softmax
from score_cases import DK, SCORE_CASES, features_of, numpy_params

from attention_jax import attention, attention_weights, get_score
from attention_jax.scores import (
    Cosine,
    NegativeSquaredDistance,
    ScaledDot,
    SoftCap,
)
from attention_jax.scores.literature import LITERATURE, Softplus

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
        return np.stack([case.pair(params, query[:, i], key[:, j]) for i, j in pairs], -1)

    values = formula(jax.tree.map(lambda leaf: leaf[None], arrays))[0].reshape(dlogits.shape)
    gradient = complex_step(lambda arrays: formula(arrays).imag @ dlogits.reshape(-1), arrays)
    with jax.enable_x64(True):
        assert_close("", run(arrays, dlogits), (values, gradient), 1e-12)


def test_second_derivatives_of_a_cosine():
    """The divisor that `direction` takes for a constant changes none of them."""
    query, key = normal(2, DK, dtype=float), normal(3, DK, dtype=float)

    def plain(q, k):
        lengths = (jnp.linalg.norm(x, axis=-1) for x in (q, k))
        return q @ k.T / jnp.outer(*lengths)

    @quick_jit
    def hessians(*tokens):
        losses = (lambda *x, f=f: jnp.sum(jnp.sin(f(*x))) for f in (ours, plain))
        return [jax.hessian(loss, (0, 1))(*tokens) for loss in losses]

    ours = functools.partial(Cosine(1.0), {})
    with jax.enable_x64(True):
        chex.assert_trees_all_close(*hessians(query, key), rtol=0, atol=1e-13)


@pytest.mark.parametrize("scale", [1, -0.5, np.float64(0.5), np.float32(0.25)])
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


def test_a_cosine_of_the_largest_floats():
    """1 / length, by which XLA multiplies, is 0 there."""
    query, key = tokens()
    cosine = jax.jit(functools.partial(Cosine(1.0), {}))
    actual = cosine(query * np.float32(3e38 / jnp.max(jnp.abs(query))), key)
    np.testing.assert_allclose(actual, cosine(query, key), atol=1e-6)


def test_a_cosine_of_zeros():
    """Everything is 0 there, in both orders, and nothing becomes NaN."""
    query, key = (jnp.asarray(x) for x in tokens())
    query, key = query.at[2].set(0), key.at[3].set(0)
    params = numpy_params(Cosine(), DK, DK)

    def total(arrays):
        return jnp.sum(jnp.cos(Cosine()(params, *arrays)))

    @quick_jit
    def derivatives(arrays):
        logits, ones = Cosine()(params, *arrays), jax.tree.map(jnp.ones_like, arrays)
        return (logits, logits.T), *jax.jvp(jax.grad(total), (arrays,), (ones,))

    logits, *of_both_orders = derivatives((query, key))
    chex.assert_tree_all_finite(of_both_orders)
    assert all(map(np.any, jax.tree.leaves(of_both_orders)))
    for dquery, dkey in (logits, *of_both_orders):
        assert not np.any(dquery[2])
        assert not np.any(dkey[3])


@pytest.mark.parametrize("offset", [0.0, 10.0, 100.0, 1000.0])
def test_rounding_of_the_distance_is_as_documented(offset):
    """eps scale (|q - c|^2 + |k - c|^2), and no more than a few of those."""
    query, key = (x + np.float32(offset) for x in tokens())
    q, k = np.float64(query)[:, None], np.float64(key)[None]
    error = np.abs(np.float64(NegativeSquaredDistance(1.0)({}, query, key)) + ((q - k) ** 2).sum(2))
    squares = ((q - offset) ** 2 + (k - offset) ** 2).sum(2)
    assert (error <= 3 * np.finfo(np.float32).eps * squares).all()
    narrow = [jnp.asarray(x, jnp.bfloat16) for x in (query, key)]  # computed in float32
    got, wide = (
        NegativeSquaredDistance(1.0)({}, *pair) for pair in (narrow, map(jnp.float32, narrow))
    )
    np.testing.assert_array_equal(got, wide)


@pytest.mark.parametrize("score", ["l2", "distance", "elliptical"])
@pytest.mark.parametrize(("size", "deviation"), [(64, 1), (128, 1), (128, 8)])
def test_distances_of_near_tokens_in_bfloat16(score, size, deviation):
    """The square of a token and the token itself are rounded together."""
    near = 2.8**0.5 * size**-0.25
    query = jnp.bfloat16(deviation * normal(32, size))
    key = jnp.bfloat16(np.float32(query) + near * normal(32, size, seed=1))
    params = numpy_params(get_score(score), size, size)
    pairs = jnp.eye(32, dtype=bool)
    _, statistics = attention(
        query, key, key, score=score, params=params, mask=pairs, return_statistics=True
    )
    with jax.enable_x64(True):
        wide = [np.float64(x) for x in (query, key)]
        expected = np.diagonal(get_score(score)(jax.tree.map(np.float64, params), *wide))
    bound = 2**-8 * deviation if score == "elliptical" else 2**-9
    np.testing.assert_allclose(statistics.logsumexp, expected, atol=bound * abs(expected).max())


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
@pytest.mark.parametrize("size", [32, 128])
def test_a_scale_rounds_no_16_bit_query_again(size, implementation):
    """Logits are those of float32 arithmetic, and outputs as right as those of `jax.nn`."""
    arrays = [jnp.bfloat16(x) for x in normal(3, 128, size) * np.float32([[[3]], [[3]], [[1]]])]
    wide = [np.float64(x) for x in arrays]
    for score in ("scaled", "softcap"):
        output, statistics = attention(
            *arrays, score=score, implementation=implementation, return_statistics=True
        )
        logits = wide[0] @ wide[1].T / size**0.5
        logits = 50 * np.tanh(logits / 50) if score == "softcap" else logits
        expected = np.log(np.exp(logits).sum(1))
        np.testing.assert_allclose(statistics.logsumexp, expected, rtol=2e-6)
        error = np.sqrt(np.mean((np.float64(output) - softmax(logits) @ wide[2]) ** 2))
        assert error < 2e-3


def test_an_offset_of_some_features_costs_no_digits_where_others_are_wide():
    """`elliptical` hardly weighs the wide features, which would hide the offset of the others."""
    wide, params = np.arange(8) >= 4, {"log_m": np.where(np.arange(8) < 4, 0, -16)}
    query, key = np.float32(np.where(wide, 400, 1) * normal(2, 7, 8) + np.where(wide, 0, 100))

    def weights(query, key):
        params_of_dtype = {"log_m": params["log_m"].astype(query.dtype)}
        return attention_weights(query, key, score="elliptical", params=params_of_dtype)

    got = weights(query, key)
    with jax.enable_x64(True):
        np.testing.assert_allclose(got, weights(np.float64(query), np.float64(key)), atol=2e-6)


# --- of literature.py, where formulas are singular or cancel ---


@pytest.mark.parametrize("name", LITERATURE)
def test_equal_tokens_and_zeros_have_finite_derivatives(name):
    """Of first and second order."""
    score, tokens = LITERATURE[name], normal(4, 6)
    tokens[1] = 0

    def total(arrays):
        return jnp.sum(jnp.sin(score(*arrays)))

    @quick_jit
    def first_and_second(arrays):
        return jax.jvp(jax.grad(total), (arrays,), (jax.tree.map(jnp.ones_like, arrays),))

    gradients, products = first_and_second((numpy_params(score, 6, 6), tokens, tokens))
    chex.assert_tree_all_finite((gradients, products))
    assert all(map(np.any, gradients[1:]))


@pytest.mark.parametrize("name", ["hyperbolic", "yat"])
def test_near_tokens_keep_their_digits(name):
    """Where sqrt(1 + |q|^2) sqrt(1 + |k|^2) - q . k is 1 in float32."""
    score, params = LITERATURE[name], {"log_beta": np.float32(0)}
    query = normal(5, 6)
    key = query + np.float32(1e-4) * normal(5, 6, seed=1)
    with jax.enable_x64(True):
        arrays = jax.tree.map(np.float64, (params, query, key))
        expected = np.diagonal(quick_jit(score)(*arrays))
    got = np.diagonal(quick_jit(score)(params, query, key))
    np.testing.assert_allclose(got, expected, rtol=2e-2)


def test_hyperbolic_tokens_far_from_0_keep_their_digits():
    """Parallel, opposite, near and other tokens: logits and gradients, against float64."""
    score, params = LITERATURE["hyperbolic"], {"log_beta": np.float32(0)}
    unit, other = (normal(1, 6, seed=seed) for seed in (0, 1))
    unit /= np.linalg.norm(unit)
    sizes = np.float32([0.3, 1, 30, 300, 1000, 2800])[:, None]
    queries = sizes * unit
    keys = np.concatenate([1.5 * queries, -queries, queries + 0.01 * other, sizes * other])
    sums = [np.sqrt(1 + (np.longdouble(x) ** 2).sum(-1)) for x in (queries, keys)]
    excess = sums[0][:, None] * sums[1] - np.longdouble(queries) @ np.longdouble(keys).T - 1
    logits = quick_jit(score)(params, queries, keys)
    np.testing.assert_allclose(logits, -np.arccosh(1 + np.float64(excess)), rtol=1e-5, atol=2e-6)

    @quick_jit
    def gradients(query, key):
        return jax.grad(lambda *x: score(params, *x).sum(), argnums=(0, 1))(query, key)

    # Along the tokens: across parallel ones, the gradient is that of the rounding of the tokens.
    for query, key in zip(itertools.cycle(queries), keys, strict=False):
        got = gradients(query[None], key[None])
        with jax.enable_x64(True):
            expected = gradients(np.float64(query[None]), np.float64(key[None]))
        for *pair, token in zip(got, expected, (query, key), strict=True):
            one, wanted, token = map(np.float64, (*pair, token))
            tolerance = 1e-4 * np.linalg.norm(wanted) * np.linalg.norm(token)
            np.testing.assert_allclose(one @ token, wanted @ token, rtol=0, atol=tolerance)


def test_softplus_of_any_logit():
    """softplus(x) is exp(x) at its left end, which float32 cannot hold, and x at its right end."""
    logits = np.float32([[-1e4, -100, -41, -39, -5, 50, 1e4]]).T
    got = quick_jit(Softplus())({}, logits, np.ones((1, 1), np.float32))
    expected = [-1e4, -100.0, -41.0, -39.0, np.log(np.log1p(np.exp(-5.0)))]
    expected += [np.log(50.0), np.log(1e4)]
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-6)
    slopes = quick_jit(jax.grad(lambda x: Softplus()({}, x, np.ones((1, 1), np.float32)).sum()))
    np.testing.assert_allclose(slopes(logits)[:3, 0], 1, rtol=1e-6)
