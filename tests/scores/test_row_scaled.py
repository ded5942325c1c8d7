"""A factor for each row of logits: against NumPy, through attention, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import DK, DV, SCORE_CASES, S, T, assert_close, quick_jit
from finite_differences import check_derivatives
from jax.test_util import check_grads
from numpy_model import softmax_where
from score_cases import features_of

from attention_jax import BlockSizes, attention, attention_weights, causal_mask
from attention_jax.scores import Dot, General, RowScaled, ScaledDot, SoftCap

RNG = jax.random.key(3)
NAMES = ("additive", "concat", "dot", "general", "scaled")
every_score = pytest.mark.parametrize("name", NAMES)


def arrays(name, dtype=np.float64):
    """(score, params, query with its factor behind, key, value)"""
    case, rng = SCORE_CASES[name], np.random.default_rng(1)
    query, key = rng.normal(size=(T, case.query_dim)), rng.normal(size=(S, DK))
    factor = rng.uniform(-1.0, 3.0, size=(T, 1))  # of either sign: a factor may be any number
    params = jax.tree.map(lambda leaf: np.asarray(leaf, dtype), case.score.init(RNG, *dims(name)))
    query = np.concatenate([query, factor], axis=1).astype(dtype)
    return RowScaled(case.score), params, query, *(
        x.astype(dtype) for x in (key, rng.normal(size=(S, DV)))
    )  # fmt: skip


def dims(name):
    return SCORE_CASES[name].query_dim, DK


def numpy_logits(name, params, query, key):
    """The formula of each pair, times the factor of its row."""
    logits = SCORE_CASES[name].pair(params, query[:, None, :-1], key[None])
    return query[:, -1:] * logits


# --- logits and parameters ---


@every_score
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_are_multiplied_row_by_row(name, dtype):
    with jax.enable_x64(dtype is np.float64):
        score, params, query, key, _ = arrays(name, dtype)
        logits = jax.jit(score)(params, query, key)
        assert logits.dtype == dtype
        assert_close(
            "logits", logits, numpy_logits(name, params, np.float64(query), np.float64(key)),
            1e-12 if dtype is np.float64 else 2e-6,
        )  # fmt: skip


@every_score
def test_parameters_are_those_of_the_inner_score(name):
    inner, (query_dim, key_dim) = SCORE_CASES[name].score, dims(name)
    found = RowScaled(inner).init(RNG, query_dim + 1, key_dim)
    plain = inner.init(RNG, query_dim, key_dim)
    assert jax.tree.structure(found) == jax.tree.structure(plain)
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert RowScaled(inner).tile_cost == inner.tile_cost
    assert not RowScaled(inner).needs_equal_dims  # the query has one feature more


def test_a_factor_of_half_precision_keeps_the_dtype_of_logits():
    query, key = jnp.ones((3, 5), jnp.bfloat16), jnp.ones((7, 4), jnp.bfloat16)
    query = query.at[:, -1].set(jnp.array([2.0, 0.5, -1.0], jnp.bfloat16))
    logits = RowScaled(Dot())({}, query, key)
    assert logits.dtype == Dot()({}, query[:, :-1], key).dtype
    np.testing.assert_array_equal(
        np.float32(logits), np.float32([[8.0], [2.0], [-4.0]] * np.ones(7))
    )


def test_factors_and_caps_do_not_commute():
    """Each wraps the other: 2 * 3 tanh(l / 3) is not 3 tanh(2 l / 3)."""
    query, key = jnp.array([[4.0, 2.0]]), jnp.array([[1.0], [-0.25]])
    logits = np.array([[4.0, -1.0]])
    outside = RowScaled(SoftCap(Dot(), 3.0))({}, query, key)
    inside = SoftCap(RowScaled(Dot()), 3.0)({}, query, key)
    np.testing.assert_allclose(outside, 6 * np.tanh(logits / 3), rtol=1e-6)
    np.testing.assert_allclose(inside, 3 * np.tanh(2 * logits / 3), rtol=1e-6)


# --- through attention ---


@every_score
@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_attention_uses_the_scaled_logits(name, implementation):
    with jax.enable_x64(True):
        score, params, query, key, value = arrays(name)

        @quick_jit
        def attend(params, query, key, value):
            return attention(
                query, key, value, score=score, params=params, mask=causal_mask(1),
                implementation=implementation, block_sizes=BlockSizes(2, 3),
            )  # fmt: skip

        output = attend(params, query, key, value)
        allowed = np.arange(S)[None, :] <= np.arange(T)[:, None] + 1
        weights = softmax_where(numpy_logits(name, params, query, key), allowed)
        assert_close("output", output, weights @ value, 1e-12)


def test_a_factor_is_an_inverse_temperature():
    query = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)
    key = np.random.default_rng(3).normal(size=(7, 3)).astype(np.float32)
    # By hand: 0 forgets the keys, 1 changes nothing, 1e4 chooses one.
    query[:, -1] = [0.0, 1.0, 1e4]
    weights = np.asarray(attention_weights(query, key, score=RowScaled(ScaledDot())))
    np.testing.assert_allclose(weights[0], np.full(7, 1 / 7), rtol=1e-6)
    logits = np.float64(query[:, :-1]) @ key.T / np.sqrt(3)
    np.testing.assert_allclose(weights[1], softmax_where(logits[1]), atol=1e-6)
    np.testing.assert_allclose(weights[2], np.eye(7)[np.argmax(logits[2])], atol=1e-6)


# --- gradients ---


@every_score
def test_gradients_of_two_orders(name):
    """Against finite differences, the factor's among them."""
    with jax.enable_x64(True):
        score, params, query, key, _ = arrays(name)
        check_derivatives(score, params, query[:3], key[:2])


@pytest.mark.parametrize(
    ("name", "implementation", "order"),
    [("scaled", "tiled", 1), pytest.param("additive", "reference", 2, marks=pytest.mark.slow)],
)
def test_gradients_through_attention(name, implementation, order):
    """Against finite differences and, in the factor alone, the derivative of a softmax."""
    with jax.enable_x64(True):
        score, params, query, key, value = arrays(name)

        def attend(params, query, key):
            return attention(
                query, key, value, score=score, params=params, implementation=implementation,
                block_sizes=BlockSizes(2, 3),
            )  # fmt: skip

        if order == 2:
            check_derivatives(attend, params, query, key)
        else:
            check_grads(jax.jit(attend), (params, query, key), 1, ["rev"], atol=1e-5, rtol=1e-5)
        dquery = quick_jit(jax.grad(lambda query: attend(params, query, key).sum()))(query)
        # d output / d factor = sum_j w_j (l_j - sum_k w_k l_k) v_j, l before the factor
        logits = SCORE_CASES[name].pair(params, query[:, None, :-1], key[None])
        weights = softmax_where(query[:, -1:] * logits)
        centred = logits - (weights * logits).sum(1, keepdims=True)
        assert_close("factor", dquery[:, -1], ((weights * centred) @ value).sum(1), 1e-10)


@pytest.mark.parametrize("name", [*NAMES, "softcap", "own"])
def test_the_hand_written_gradient_equals_that_of_jax(name):
    with jax.enable_x64(True):
        score, params, query, key, _ = arrays(name)
        dlogits = np.random.default_rng(5).normal(size=(T, S))

        @quick_jit
        def both(params, query, key, dlogits):
            features = params, *features_of(score, params, query, key)
            _, vjp = jax.vjp(lambda *args: score.pair(*args), *features)
            return score.pair_vjp(*features, dlogits), vjp(dlogits)

        found, expected = both(params, query, key, dlogits)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for got, leaf in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert_close("gradient", got, leaf, 1e-12)
        assert np.all(found[1][1] != 0)  # of the factor


# --- mistakes ---


@pytest.mark.parametrize("wrong", ["scaled", 2.0, None, Dot])
def test_only_a_score_can_be_scaled(wrong):
    with pytest.raises(ValueError, match="score must be a Score; got "):
        RowScaled(wrong)


def test_parameters_for_a_query_without_its_factor():
    query, key = jnp.ones((T, 4)), jnp.ones((S, DK))
    params = General().init(RNG, 3, DK)
    assert attention(query, key, key, score=RowScaled(General()), params=params).shape == (T, DK)
    with pytest.raises(ValueError, match=r"params\['kernel'\] must be \[3, 11\]"):
        attention(query, key, key, score=RowScaled(General()), params=General().init(RNG, 4, DK))


def test_mismatched_sizes():
    query, key = jnp.ones((T, 6)), jnp.ones((S, 7))
    with pytest.raises(ValueError, match=r"query must have 8 features, .* keys of 7 .*; got 6"):
        attention(query, key, key, score=RowScaled(Dot()))
    with pytest.raises(ValueError, match="query must have at least 2 features"):
        RowScaled(General()).init(RNG, 1, DK)
