"""Position ids: their errors, those of a model, and random ones against all that can be drawn.

test_model.py compares encodings, rotations and anchored positions with float64 NumPy.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx

from attention_jax.nn import ModelConfig, PositionEncoding


def make(**settings):
    return PositionEncoding(ModelConfig(dim=12, **settings), rngs=nnx.Rngs(0))


def test_ids_that_are_not_random_begin_at_0():
    encoding = make(position_limit=7)
    for rng in (None, jax.random.key(0)):
        np.testing.assert_array_equal(encoding.ids(5, rng), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("draw", ["subset", "window"])
def test_ids_are_random_in_training_alone(draw):
    encoding = make(position_draw=draw, position_limit=43)
    # 43 // 8 is 5, and evaluation may go beyond the limit: sines have none.
    np.testing.assert_array_equal(encoding.ids(3), [5, 6, 7])
    np.testing.assert_array_equal(encoding.ids(47), range(5, 52))
    with pytest.raises(ValueError, match=r"hold 44 tokens, .*; 43 holds 43"):
        encoding.ids(44, jax.random.key(0))


@pytest.mark.parametrize(("draw", "most"), [("none", 17), ("subset", 15), ("window", 15)])
def test_a_learned_table_ends(draw, most):
    encoding = make(positions="learned", position_draw=draw, position_limit=17)
    ids = np.asarray(encoding.ids(most))
    np.testing.assert_array_equal(ids, range(17 - most, 17))
    assert np.all(np.isfinite(encoding((jnp.asarray(ids),))))
    with pytest.raises(ValueError, match=f"hold {most + 1} tokens, .*; 17 holds {most}"):
        encoding.ids(most + 1)


# --- random ids ---


def assert_drawn_with(probabilities, draw, keys):
    """Ids of 7 are a key of `probabilities`, as often as they say."""
    encoding, count = make(position_draw=draw, position_limit=7), len(next(iter(probabilities)))
    draws = jax.vmap(lambda rng: encoding.ids(count, rng))
    drawn = numpy_model.run_jit(draws, jax.random.split(jax.random.key(11), keys))
    found = dict.fromkeys(probabilities, 0)
    for row in drawn.tolist():
        found[tuple(row)] += 1
    observed = np.array(list(found.values()))
    expected = len(drawn) * np.array(list(probabilities.values()))
    assert expected.sum() == pytest.approx(len(drawn))
    chi_square, freedom = ((observed - expected) ** 2 / expected).sum(), len(found) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)  # mean and standard deviation


def test_all_subsets_are_equally_likely():
    subsets = list(itertools.combinations(range(7), 3))
    assert_drawn_with(dict.fromkeys(subsets, 1 / len(subsets)), "subset", 10_007)


def window_probabilities(limit):
    """Of every two ids, by counting: widths, starts and gaps."""
    found = dict.fromkeys(itertools.combinations(range(limit), 2), 0.0)
    for width in range(2, limit + 1):
        of_width = math.log((width + 1) / width) / math.log((limit + 1) / 2)
        gaps = list(itertools.product(range(width - 1), repeat=2))
        for first in range(limit - width + 1):
            for pair in gaps:
                left, right = sorted(pair)
                share = of_width / (limit - width + 1)
                found[first + left, first + right + 1] += share / len(gaps)
    return found


def test_windows_have_log_uniform_widths_and_uniform_starts():
    assert_drawn_with(window_probabilities(7), "window", 20_011)
