"""Ids of tokens, encodings and rotations of both ends, in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx

from attention_jax.nn import ModelConfig, PositionEncoding
from attention_jax.nn.position_encoding import Rotation

KINDS = ["sinusoidal", "learned", "rotary", "none"]
ANCHORS = ["start", "end", "both"]


def make(dim=12, **settings):
    return PositionEncoding(ModelConfig(dim=dim, **settings), rngs=nnx.Rngs(0))


# --- ids ---


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_not_random_begin_at_0(kind):
    encoding = make(positions=kind, position_limit=7)
    for rng in (None, jax.random.key(0)):
        np.testing.assert_array_equal(encoding.ids(5, rng), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("draw", ["subset", "window"])
def test_ids_are_random_in_training_alone(draw):
    encoding = make(position_draw=draw, position_limit=43)
    # 43 // 8 is 5, and evaluation may go beyond the limit: sines have none.
    np.testing.assert_array_equal(encoding.ids(3), [5, 6, 7])
    np.testing.assert_array_equal(encoding.ids(47), range(5, 52))
    draw_ids = jax.jit(lambda seed: encoding.ids(3, jax.random.key(seed)))
    drawn = [draw_ids(seed).tolist() for seed in range(11)]
    assert len({tuple(ids) for ids in drawn}) > 5
    for seed, ids in enumerate(drawn):
        assert 0 <= ids[0] < ids[1] < ids[2] < 43
        assert draw_ids(seed).tolist() == ids
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


# --- encodings ---

IDS = np.array([0, 1, 5, 6, 11, 13, 14], np.int32)
LENGTHS = np.array([3, 7, 1], np.int32)


def ids_by_hand(anchor, length):
    """Of a source of 5 or fewer real tokens of 7: [3, 7], one or two."""
    ids = {"start": np.zeros((3, length), int), "end": np.zeros((3, length), int)}
    for row, real in enumerate(LENGTHS):
        for j in range(length):
            ids["start"][row, j] = IDS[j]
            ids["end"][row, j] = IDS[max(real - 1 - j, 0)]
    return [ids[end] for end in (("start", "end") if anchor == "both" else (anchor,))]


def test_a_new_table_has_the_variance_of_sines():
    rows = np.asarray(make(dim=62, positions="learned", position_limit=211).table[...])
    assert np.var(rows) == pytest.approx(0.5, rel=0.05)
    assert np.mean(rows) == pytest.approx(0, abs=0.03)


def test_rotations_by_both_ends_turn_a_half_each():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 7, 12)).astype(np.float32)  # heads between the batch and tokens
    left, right = ids_by_hand("both", 7)
    rotation = Rotation(50.0, num_position_ids=2)
    found = numpy_model.run_jit(rotation, x, (left, right))
    assert found.dtype == jnp.float32
    for row, head in np.ndindex(3, 2):
        halves = np.split(np.float64(x[row, head]), 2, axis=-1)
        expected = [
            numpy_model.rotated(half, at[row], 50.0)
            for half, at in zip(halves, (left, right), strict=True)
        ]
        np.testing.assert_allclose(found[row, head], np.concatenate(expected, -1), atol=1e-5)


def test_the_default_ids_are_consecutive():
    rotation = Rotation(50.0, num_position_ids=2)
    by_default, expected = numpy_model.run_jit(
        lambda x: (rotation(x, None), rotation(x, (jnp.arange(5),) * 2)), numpy_model.normal(5, 8)
    )
    np.testing.assert_array_equal(by_default, expected)


@pytest.mark.parametrize("ids", [jnp.arange(5), [jnp.arange(5)] * 2, (jnp.arange(5),)], ids=str)
def test_each_token_needs_its_number_of_ids(ids):
    with pytest.raises(ValueError, match="position_ids must be a tuple of 2 arrays of integers"):
        Rotation(50.0, num_position_ids=2)(jnp.ones((5, 8)), ids)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.0,), "rotary_wavelength must be a finite number above 0; got 0.0"),
        ((50.0, 0), "num_position_ids must be at least 1; got 0"),
        ((50.0, 3), "num_position_ids must be 1 or 2; got 3"),
    ],
)
def test_bad_rotations(settings, message):
    with pytest.raises(ValueError, match=message):
        Rotation(*settings)
