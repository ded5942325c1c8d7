"""Numbers at initialisation that predict a map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention_jax.scores import get_score
from experiments.bench import prediction


def test_equal_numbers_share_their_mean_rank():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3.5, 3.5, by hand: products 3.75, squares 4.5.
    measured = prediction.rank_correlation([10, 20, 20, 30], [1, 5, 7, 7])
    assert measured == pytest.approx(3.75 / 4.5)
    assert prediction.rank_correlation([1, 2, 4], [0.3, 0.2, -9]) == pytest.approx(-1)
    assert np.isnan(prediction.rank_correlation([1, 1], [1, 2]))


def test_noise_leaves_the_diagonal_out():
    change = np.random.default_rng(0).normal(size=(4, 4))
    rows = [np.delete(change[a], a) for a in range(4)]
    by_hand = np.sqrt(np.mean([np.var(row) for row in rows]))
    np.testing.assert_allclose(prediction.noise(jnp.array(change)), by_hand, rtol=1e-5)


@pytest.mark.parametrize("name", ["general", "additive"])
def test_gain_is_the_growth_of_the_margin_in_a_small_sign_step(name):
    score = get_score(name)
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, *kernels = (jnp.array(rng.normal(size=shape)) for shape in ((3, 2), (2, 2), (2, 2)))
        own = jax.tree.map(lambda p: p.astype(float), score.init(jax.random.key(0), 2, 2))
        leaves, structure = jax.tree.flatten((*kernels, own))
        measured = prediction.numbers_of(score, x, (*kernels, own))

        def margin(leaves):
            query_kernel, key_kernel, own = jax.tree.unflatten(structure, leaves)
            logits = np.asarray(score(own, x @ query_kernel, x @ key_kernel))
            logits = logits * prediction.DEVIATION / float(measured["own"])
            return np.mean([row[a] - row.mean() for a, row in enumerate(logits)])

        differences = 0.0
        for number, leaf in enumerate(leaves):
            for index in np.ndindex(leaf.shape):
                moved = [
                    margin([*leaves[:number], leaf.at[index].add(size), *leaves[number + 1 :]])
                    for size in (1e-5, -1e-5)
                ]
                differences += abs(moved[0] - moved[1]) / 2e-5
        np.testing.assert_allclose(measured["gain"], differences, rtol=1e-6)


@pytest.mark.parametrize(("score", "multiple"), [("scaled", "dot"), ("additive", "concat")])
def test_a_constant_factor_of_the_score_changes_nothing_but_its_own_deviation(score, multiple):
    row, other = (prediction.at_initialisation(name, seeds=1) for name in (score, multiple))
    ratio = other.pop("own") / row.pop("own")
    assert ratio == pytest.approx(8 if multiple == "dot" else 1, rel=1e-3)
    assert row == pytest.approx(other, rel=1e-2)
    assert row["gain"] > 0
    assert row["signal"] > 0


def test_the_steps_end_where_equal_tokens_are_found():
    found = prediction.at_initialisation("scaled", seeds=2)["steps"]
    assert 1 < found < prediction.MOST_STEPS


def test_no_seeds_are_refused():
    with pytest.raises(ValueError, match="seeds must be at least 1; got 0"):
        prediction.at_initialisation("scaled", seeds=0)
