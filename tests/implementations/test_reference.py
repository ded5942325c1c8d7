"""The reference implementation: any derivative, in any mode, of any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conformance import ALL_SCORES, SCORE_CASES
from finite_differences import check_derivatives

from attention_jax import attention, causal_mask, local_mask, padding_mask, segment_mask

T, S, DV = 3, 5, 2  # smaller: a Hessian has the square


# Each leaves some query without a key, or some key without a query, but the one that is None.
MASKS = {
    "none": lambda: None,
    "causal": lambda: causal_mask(-1),
    "local": lambda: local_mask(1, 0),
    "padding": lambda: padding_mask(jnp.array(3), jnp.array(2)),
    "segment": lambda: segment_mask(jnp.array([0, 1, 5]), jnp.array([1, 0, 0, 1, 7])),
    "dense": lambda: jnp.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]], bool),
    "combined": lambda: (causal_mask() | padding_mask(jnp.array(2))) & ~local_mask(0, 0),
}


def case_of(score_name, mask_name="causal"):
    """A function of (query, key, value, params, bias) in float64, and a point."""
    case = SCORE_CASES[score_name]
    rng = np.random.default_rng(3)
    params = case.score.init(jax.random.key(1), case.query_dim, 11)
    shapes = (T, case.query_dim), (S, 11), (S, DV)
    point = [jnp.asarray(rng.normal(size=shape)) for shape in shapes]
    point.append(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params))
    point.append(jnp.asarray(rng.normal(size=(T, S))))

    def attend(query, key, value, params, bias):
        output, statistics = attention(
            query, key, value, params=params, bias=bias, score=case.score,
            mask=MASKS[mask_name](), implementation="reference",
            return_statistics=True,
        )  # fmt: skip
        finite = jnp.where(jnp.isfinite(statistics.logsumexp), statistics.logsumexp, 0)
        return output, finite, statistics.entropy

    return attend, point


@pytest.mark.parametrize(
    ("score", "mask"),
    [
        *(("general", mask) for mask in ("segment", "combined")),
        *((score, "causal") for score in ("scaled", "dot", "distance")),
        *(
            pytest.param(score, "causal", marks=pytest.mark.slow)
            for score in ALL_SCORES
            if score not in ("scaled", "dot", "distance")
        ),
        *(
            pytest.param("general", mask, marks=pytest.mark.slow)
            for mask in ("none", "local", "padding", "dense")
        ),
    ],
)
def test_two_orders_in_both_modes(score, mask):
    with jax.enable_x64(True):
        attend, point = case_of(score, mask)
        check_derivatives(attend, *point)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["general"])
def test_hessian_against_differences_of_the_gradient(score):
    with jax.enable_x64(True):
        attend, (query, *rest) = case_of(score)

        def loss(query):
            return sum((leaf**2).sum() for leaf in attend(query, *rest))

        gradient = jax.jit(jax.grad(loss))
        step = 1e-5
        directions = np.eye(query.size).reshape(-1, *query.shape)
        expected = [
            (gradient(query + step * d) - gradient(query - step * d)) / (2 * step)
            for d in directions
        ]
        expected = np.stack(expected).reshape(query.shape * 2)
        assert np.abs(expected).max() > 0.1
        for hessian in (
            jax.hessian(loss),
            jax.jacrev(jax.grad(loss)),
            jax.jacfwd(jax.jacfwd(loss)),
        ):
            np.testing.assert_allclose(jax.jit(hessian)(query), expected, atol=1e-8)
        tangent = jnp.asarray(np.random.default_rng(0).normal(size=query.shape))
        _, product = jax.jvp(gradient, (query,), (tangent,))
        np.testing.assert_allclose(product, np.tensordot(expected, tangent, axes=2), atol=1e-7)


@pytest.mark.parametrize("score", ["own", pytest.param("additive", marks=pytest.mark.slow)])
def test_second_derivatives_see_no_nan_of_masked_places(score):
    case = SCORE_CASES[score]
    rng = np.random.default_rng(3)
    params = case.score.init(jax.random.key(1), case.query_dim, 11)
    shapes = (T, case.query_dim), (S, 11), (S, DV)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    query[2], key[3], value[4] = np.nan, np.inf, np.nan
    mask = padding_mask(jnp.array(3), jnp.array(2))

    def loss(arguments):
        query, key, value, params = arguments
        output, statistics = attention(
            query, key, value, params=params, score=case.score, mask=mask, return_statistics=True,
            implementation="reference",
        )  # fmt: skip
        return (output**2).sum() + (statistics.entropy**2).sum()

    def gradient_norm(arguments):
        leaves = jax.tree.leaves(jax.grad(loss)(arguments))
        return sum((leaf**2).sum() for leaf in leaves)

    dquery, dkey, dvalue, dparams = jax.jit(jax.grad(gradient_norm))((query, key, value, params))
    for leaf in jax.tree.leaves((dquery, dkey, dvalue, dparams)):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)
    assert not dquery[2:].any()
    assert not dkey[3:].any()
    assert not dvalue[3:].any()
