"""Every score: formulas, derivatives, initialisation, names; and four of them by hand."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_SCORES, DK, DQ, SCORE_CASES, S, T, quick_jit
from finite_differences import check_derivatives
from score_cases import features_of

from attention_jax import attention
from attention_jax.scores import (
    Additive,
    Concat,
    Cosine,
    Dot,
    General,
    NegativeSquaredDistance,
    ScaledDot,
    Score,
    SoftCap,
    WrappedScore,
    get_score,
)

RNG = jax.random.key(3)
DECODER_STATE = jnp.array([[1.0, -0.5, 0.3, 0.8]])  # s of chapter 38
ENCODER_STATE = jnp.array([[0.6, 0.2, -0.4, 1.0]])  # h of chapter 38


def tokens(query_dim=DQ, dtype=np.float32, target=T, source=S):
    rng = np.random.default_rng(1)
    query, key = rng.normal(size=(target, query_dim)), rng.normal(size=(source, DK))
    return jnp.asarray(query, dtype), jnp.asarray(key, dtype)


# --- worked examples ---


def test_chapter_38_dot_and_scaled():
    # 0.6 - 0.1 - 0.12 + 0.8 = 1.18, and half of it since sqrt(4) = 2
    np.testing.assert_allclose(Dot()({}, DECODER_STATE, ENCODER_STATE), [[1.18]], rtol=1e-6)
    np.testing.assert_allclose(ScaledDot()({}, DECODER_STATE, ENCODER_STATE), [[0.59]], rtol=1e-6)


def test_general_by_hand():
    params = {"kernel": jnp.array([[1.0, 0.0, -1.0], [0.5, 2.0, 0.0]])}
    query, key = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 1.0, 2.0]])
    # W k = (1, 3.5), q . W k = 1 + 7; and what is projected is the query: q W = (2, 4, -1)
    assert General()(params, query, key).tolist() == [[8.0]]
    assert General().project_query(params, query).tolist() == [[2.0, 4.0, -1.0]]


def test_additive_by_hand():
    params = {
        "query_kernel": jnp.array([[1.0, 0.0], [0.0, 2.0]]),
        "key_kernel": jnp.array([[1.0, 2.0], [-1.0, 0.5]]),
        "v": jnp.array([1.0, -3.0]),
    }
    query, key = jnp.array([[0.5, 0.25]]), jnp.array([[0.0, 1.0]])
    # (0.5, 0.5) + (-1, 0.5) = (-0.5, 1); tanh = (-0.4621172, 0.7615942); minus 3 times the second
    np.testing.assert_allclose(Additive()(params, query, key), [[-2.7468997]], rtol=1e-6)


# --- identities ---


@pytest.mark.parametrize("name", ALL_SCORES)
def test_matrix_form_is_the_loop_form(name):
    case = SCORE_CASES[name]
    query, key = tokens(case.query_dim)
    params = case.score.init(RNG, case.query_dim, DK)
    wide = jax.tree.map(np.float64, params)
    expected = [[case.pair(wide, np.float64(q), np.float64(k)) for k in key] for q in query]
    got = jax.jit(case.score)(params, query, key)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


def test_a_new_pair_says_what_describes_it():
    """Inherited in silence, it would be the gradient of another function."""

    class Tripled(Score):
        def pair(self, params, q_features, k_features):
            return 3 * super().pair(params, q_features, k_features)

    with pytest.raises(TypeError, match=r"TripledAdditive .* pair_vjp = Score\.pair_vjp"):
        type("TripledAdditive", (Tripled, Additive), {})
    with pytest.raises(TypeError, match=r"Doubled .* round_query = WrappedScore\.round_query"):
        type("Doubled", (WrappedScore,), {"pair": Tripled.pair})

    class TripledAdditive(Tripled, Additive):
        pair_vjp = Score.pair_vjp
        tile_params = Additive.tile_params
        finite_slopes = Additive.finite_slopes

    query, key = jnp.ones((2, 3)), jnp.full((4, 3), 0.5)
    params = TripledAdditive().init(jax.random.key(0), 3, 3)

    tripled = TripledAdditive().pair_vjp(params, query, key, jnp.ones((2, 4)))[0]["v"]
    plain = Additive().pair_vjp(params, query, key, jnp.ones((2, 4)))[0]["v"]
    np.testing.assert_allclose(tripled, 3 * plain, rtol=1e-6)


def test_general_is_dot_on_projected_keys():
    query, key = tokens()
    params = General().init(RNG, DQ, DK)
    projected = np.float32(np.float64(key) @ np.float64(params["kernel"]).T)  # once per key
    expected = Dot()({}, query, jnp.asarray(projected))
    np.testing.assert_allclose(General()(params, query, key), expected, atol=2e-6)


def test_general_with_the_identity_is_dot():
    query, key = tokens(DK)
    identity = {"kernel": jnp.eye(DK)}
    np.testing.assert_allclose(General()(identity, query, key), Dot()({}, query, key), atol=2e-6)


def test_additive_is_one_stacked_matrix():
    query, key = tokens()
    params = Additive(17).init(RNG, DQ, DK)
    stacked = np.concatenate([params["query_kernel"], params["key_kernel"]]).astype(np.float64)
    got = np.asarray(Additive(17)(params, query, key))
    for i, q in enumerate(np.float64(query)):
        for j, k in enumerate(np.float64(key)):
            expected = np.float64(params["v"]) @ np.tanh(np.concatenate([q, k]) @ stacked)
            np.testing.assert_allclose(got[i, j], expected, atol=2e-6)


@pytest.mark.parametrize("scale", [2.0, 1, 0, -0.5, np.float64(0.5), np.float32(0.25)])
def test_scale(scale):
    query, key = tokens(DK)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            got = ScaledDot(scale)({}, query, key)
        assert got.dtype == jnp.float32
        expected = float(scale) * (np.float64(query) @ np.float64(key).T)
        np.testing.assert_allclose(got, expected, atol=3e-6)


@pytest.mark.parametrize("name", ALL_SCORES)
def test_a_tile_of_features_is_the_block_of_the_whole(name):
    case = SCORE_CASES[name]
    query, key = tokens(case.query_dim)
    params = case.score.init(RNG, case.query_dim, DK)

    @jax.jit
    def tile_and_whole(params, query, key):
        q_features, k_features = features_of(case.score, params, query, key)
        tile = case.score.pair(params, q_features[1:4], k_features[2:4])
        return tile, case.score(params, query, key)

    tile, whole = tile_and_whole(params, query, key)
    np.testing.assert_allclose(tile, whole[1:4, 2:4], atol=2e-6)


@pytest.mark.parametrize("name", ALL_SCORES)
def test_pair_vjp_against_finite_differences(name):
    case = SCORE_CASES[name]
    with jax.enable_x64(True):
        query, key = tokens(case.query_dim, np.float64, target=2, source=3)
        params = jax.tree.map(np.float64, case.score.init(RNG, case.query_dim, DK))
        features = jax.jit(lambda *x: features_of(case.score, *x))(params, query, key)
        features = jax.tree.map(np.asarray, (params, *features))
        dlogits = np.random.default_rng(2).normal(size=(2, 3))
        rng = np.random.default_rng(4)
        directions = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), features)
        step = 1e-6

        @quick_jit
        def slope_and_pairs(features, dlogits):
            slope = case.score.pair_vjp(*features, dlogits)
            moved = (
                jax.tree.map(lambda x, d, h=h: x + h * d, features, directions)
                for h in (step, -step)
            )
            return slope, *(case.score.pair(*each) for each in moved)

        got, up, down = slope_and_pairs(features, jnp.asarray(dlogits))
        got = jax.tree.leaves(got)
    numeric = ((np.asarray(up) - np.asarray(down)) / (2 * step) * dlogits).sum()
    pairs = [(np.asarray(g), d) for g, d in zip(got, jax.tree.leaves(directions), strict=True)]
    np.testing.assert_allclose(sum((g * d).sum() for g, d in pairs), numeric, rtol=1e-7)


@pytest.mark.parametrize("name", ["additive", "cosine", "general"])  # the others: test_reference.py
def test_gradients_of_two_orders(name):
    case = SCORE_CASES[name]
    with jax.enable_x64(True):
        query, key = tokens(case.query_dim, np.float64, target=2, source=3)
        params = case.score.init(RNG, case.query_dim, DK)
        check_derivatives(case.score, params, query, key)


def test_half_precision_accumulates_in_float32():
    query, key = (jnp.full((1, 2048), 0.5, jnp.bfloat16) for _ in range(2))
    logits = Dot()({}, query.at[0, 0].set(0.75), key)
    assert logits.dtype == jnp.float32
    assert logits.item() == 512.125  # in bfloat16 it would be 512


# --- initialisation ---


@pytest.mark.parametrize(
    ("score", "count"),
    [("additive", 8256), ("concat", 8256), ("cosine", 1), ("distance", 0), ("dot", 0),
     ("general", 4096), ("scaled", 0), ("softcap", 0)],
)  # fmt: skip
def test_parameter_counts_at_64(score, count):
    params = get_score(score).init(RNG, 64, 64)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


@pytest.mark.parametrize(
    ("score", "query_dim", "key_dim"),
    [
        *((score, 3, 11) for score in (General(), Additive(), Additive(hidden_dim=29), Concat())),
        *((score, 37, 17) for score in (General(), Additive())),
        *((score, 37, 37) for score in (ScaledDot(), Cosine(), NegativeSquaredDistance())),
        (SoftCap(), 37, 37),
        (SoftCap(General()), 3, 11),
    ],
)
def test_initial_logits_have_standard_deviation_1(score, query_dim, key_dim):
    def logits(rng):
        params_rng, query_rng, key_rng = jax.random.split(rng, 3)
        query = jax.random.normal(query_rng, (4, query_dim))
        key = jax.random.normal(key_rng, (4, key_dim))
        return score(score.init(params_rng, query_dim, key_dim), query, key)

    sample = quick_jit(jax.vmap(logits))(jax.random.split(RNG, 400))
    assert 0.9 < sample.std() < 1.1
    # A distance has a mean, which the softmax does not see: E|q - k|^2 = 2 Dk.
    distance = isinstance(score, NegativeSquaredDistance)
    mean = -2 * key_dim / math.sqrt(8 * key_dim) if distance else 0
    assert abs(sample.mean() - mean) < 0.1


def test_tanh_variance():
    z, weights = np.polynomial.hermite_e.hermegauss(101)
    from attention_jax.scores import additive

    expected = (weights * np.tanh(z) ** 2).sum() / math.sqrt(2 * math.pi)
    np.testing.assert_allclose(additive._TANH_VARIANCE, expected, atol=1e-6)


def test_hidden_dim_of_given_parameters():
    query, key = tokens()
    params = Additive(17).init(RNG, DQ, DK)
    value = jnp.ones((S, 1))
    got = attention(query, key, value, score=Additive(), params=params)
    np.testing.assert_allclose(got, np.ones((T, 1)), rtol=1e-6)


def test_additive_can_be_subclassed():
    @dataclasses.dataclass(frozen=True)
    class WithBias(Additive):
        def init(self, rng, query_dim, key_dim):
            return {**super().init(rng, query_dim, key_dim), "bias": jnp.zeros(())}

        pair_vjp = Score.pair_vjp
        tile_params = Additive.tile_params
        finite_slopes = Additive.finite_slopes

        def pair(self, params, q_features, k_features):
            return super().pair(params, q_features, k_features) + params["bias"]

    query, key = tokens()
    params = {**WithBias(17).init(RNG, DQ, DK), "bias": jnp.float32(2.0)}
    for score in (WithBias(), WithBias(17)):
        _, statistics = attention(
            query, key, jnp.ones((S, 1)), score=score, params=params, return_statistics=True
        )
        plain = Additive(17)(params, query, key)
        np.testing.assert_allclose(statistics.max_logit, plain.max(1) + 2, rtol=1e-6)


# --- names and values ---


def test_scores_are_equal_and_hashed_by_value():
    assert len({ScaledDot(), ScaledDot(), ScaledDot(0.5), Dot(), General(), Additive(3)}) == 5
    assert Additive(3) == Additive(3) != Additive(4)
    assert Dot() != General()


@dataclasses.dataclass(frozen=True)
class NeedsPower(Score):
    power: int


def test_a_cached_property():
    @dataclasses.dataclass(frozen=True)
    class Caches(Dot):
        @functools.cached_property
        def table(self):
            return [1, 2]

    score = Caches()
    assert score.table == [1, 2]
    assert get_score(score) is score


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ScaledDot(math.inf), "scale must be a finite float or None; got inf"),
        (lambda: ScaledDot("1"), "scale must be a finite float or None; got '1'"),
        (lambda: Additive(0), "hidden_dim must be at least 1; got 0"),
        (lambda: Additive(2.5), "hidden_dim must be an integer; got 2.5"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_score_must_define_pair():
    with pytest.raises(NotImplementedError, match=r"NeedsPower must define pair\(params, q, k\)"):
        NeedsPower(2)({}, *tokens(DK))
