"""The ids of tokens, and the table that encodes them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx

from attention_jax.nn import ModelConfig, PositionEncoding


def make(dim=12, **settings):
    return PositionEncoding(ModelConfig(dim=dim, **settings), rngs=nnx.Rngs(0))


# --- ids ---


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
    draw_ids = jax.vmap(lambda seed: encoding.ids(3, jax.random.key(seed)))
    drawn = numpy_model.run_jit(draw_ids, np.arange(11)).tolist()
    assert len({tuple(ids) for ids in drawn}) > 5
    assert all(0 <= ids[0] < ids[1] < ids[2] < 43 for ids in drawn)
    with pytest.raises(ValueError, match=r"hold 44 tokens, .*; 43 holds 43"):
        encoding.ids(44, jax.random.key(0))


def test_the_draw_is_that_of_the_config():
    """Two of 997 are neighbours in 1 of 500 subsets, and in every third window or so."""
    neighbours = {}
    for draw in ("subset", "window"):
        encoding = make(position_draw=draw, position_limit=997)
        rngs = jax.random.split(jax.random.key(0), 211)
        drawn = numpy_model.run_jit(
            jax.vmap(lambda rng, encoding=encoding: encoding.ids(2, rng)), rngs
        )
        neighbours[draw] = np.mean(np.diff(drawn, axis=1) == 1)
    assert neighbours["subset"] < 0.05 < 0.1 < neighbours["window"]


@pytest.mark.parametrize(("draw", "most"), [("none", 17), ("subset", 15), ("window", 15)])
def test_a_learned_table_ends(draw, most):
    encoding = make(positions="learned", position_draw=draw, position_limit=17)
    ids = np.asarray(encoding.ids(most))
    np.testing.assert_array_equal(ids, range(17 - most, 17))
    assert np.all(np.isfinite(encoding((jnp.asarray(ids),))))
    with pytest.raises(ValueError, match=f"hold {most + 1} tokens, .*; 17 holds {most}"):
        encoding.ids(most + 1)


def test_a_new_table_has_the_variance_of_sines():
    rows = np.asarray(make(dim=62, positions="learned", position_limit=211).table[...])
    assert np.var(rows) == pytest.approx(0.5, rel=0.05)
    assert np.mean(rows) == pytest.approx(0, abs=0.03)
