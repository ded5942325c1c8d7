"""The reference implementation: any derivative, in any mode, of any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from derivative_cases import numbers_of, point_of
from finite_differences import check_derivatives
from score_cases import CORE_SCORES, SCORE_CASES, each_score

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
    for leaf in jax.tree.leaves(gradient):
        assert np.isfinite(leaf).all()
        assert np.any(leaf)
    assert not gradient["query"][2:].any()
    assert not gradient["key"][3:].any()
    assert not gradient["value"][3:].any()
