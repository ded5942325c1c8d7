"""Settings of positions, their words on a command line, and codes and rotations in NumPy."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy_model
import pytest
from flax import nnx

from attention_jax.nn.placement import ANY_LENGTH, Placement, PositionConfig, rotated

KINDS = ["sinusoidal", "learned", "rotary", "none"]
ANCHORS = ["start", "end", "both"]


def make(dim=12, **settings):
    return Placement(PositionConfig(**settings), dim, rngs=nnx.Rngs(0))


# --- settings ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cosine"}, "kind must be one of sinusoidal, learned, rotary, none; got 'cosine'"),
        ({"anchor": "middle"}, "anchor must be one of start, end, both; got 'middle'"),
        ({"draw": "all"}, "draw must be one of none, subset, window; got 'all'"),
        ({"limit": 0}, "limit must be an integer of at least 1; got 0"),
        ({"max_wavelength": 0.0}, "max_wavelength must be a finite number above 0; got 0.0"),
        ({"max_wavelength": math.inf}, "max_wavelength must be a finite number above 0; got inf"),
        ({"max_wavelength": "30"}, "max_wavelength must be a finite number above 0; got '30'"),
        ({"scale": -1}, "scale must be a finite number above 0; got -1"),
        ({"scale": math.nan}, "scale must be a finite number above 0; got nan"),
        ({"scale": True}, "scale must be a finite number above 0; got True"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        PositionConfig(**settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("anchor", ANCHORS)
def test_sizes_that_can_be_placed(kind, anchor):
    """A sine and a cosine, or two features to turn, for each number; halves of a table for two."""
    config = PositionConfig(kind, anchor, limit=7)
    for dim in (2, 3, 6, 8, 10):
        if kind == "none" or dim % (4 if anchor == "both" else 2) == 0:
            Placement(config, dim, rngs=nnx.Rngs(0))
            continue
        with pytest.raises(ValueError, match=f"{kind} positions anchored at {anchor}; got {dim}"):
            Placement(config, dim, rngs=nnx.Rngs(0))


# --- words ---


def test_words_by_hand():
    assert PositionConfig().to_words() == ["sinusoidal"]
    assert PositionConfig("none").to_words() == ["none"]
    assert ANY_LENGTH.to_words() == ["any-length"]
    assert PositionConfig.from_words(["any-length"]) == ANY_LENGTH
    config = PositionConfig("learned", "both", limit=67, scale=0.5)
    assert config.to_words() == ["learned", "anchor=both", "limit=67", "scale=0.5"]
    # In any order; and what is named may be changed.
    words = ["learned", "scale=0.5", "anchor=both", "limit=67"]
    assert PositionConfig.from_words(words) == config
    changed = PositionConfig.from_words(["any-length", "limit=67"])
    assert changed.limit == 67 != ANY_LENGTH.limit
    assert vars(changed) == {**vars(ANY_LENGTH), "limit": 67}


def test_every_setting_that_is_read_comes_back_from_its_words():
    grid = itertools.product(
        KINDS,
        ANCHORS,
        ["none", "subset", "window"],
        [512, 67],
        [1e4, 7 / 3],
        [1.0, 1e-7],
        [1.0, 6.0],
    )
    seen = set()
    for values in grid:
        config = PositionConfig(*values)
        words = config.to_words()
        again = PositionConfig.from_words(words)
        assert again.to_words() == words
        if config.kind == "sinusoidal":  # which reads them all
            assert again == config
        assert all(isinstance(word, str) for word in words)
        seen.add(tuple(words))
    placed = 3 * 3 * 2  # anchors, draws, limits
    assert len(seen) == placed * 8 + placed * 2 + placed * 2 + 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["polar"],
            "positions must begin with sinusoidal, learned, rotary, none, any-length; got 'polar'",
        ),
        ([""], "positions must begin with sinusoidal, .*; got ''"),
        (["limit=3"], "positions must begin with sinusoidal, .*; got 'limit=3'"),
        (["learned", "size=3"], "learned may be followed by anchor=..., draw=..., .*'size=3'"),
        (["learned", "kind=none"], "learned may be followed by anchor=.*; got 'kind=none'"),
        (["learned", "rotary"], "learned may be followed by anchor=.*; got 'rotary'"),
        (["learned", "max_wavelength=3"], "learned may be followed by .*limit=..., scale=...; got"),
        (["none", "draw=window"], "none may be followed by nothing; got 'draw=window'"),
        (["learned", "limit=4", "limit=5"], "must have limit once; got 'learned limit=4 limit=5'"),
        (["any-length", "max_wavelength=0.1"], "max_wavelength must be at least min_wavelength"),
        (["learned", "limit=many"], "positions 'limit=many': "),
        (["learned", "limit=2.5"], "positions 'limit=2.5': "),
        (["learned", "limit"], "positions 'limit': "),
        (["learned", "scale=big"], "positions 'scale=big': "),
        (["learned", "anchor=top"], "anchor must be one of start, end, both; got 'top'"),
        (["learned", "limit=0"], "limit must be an integer of at least 1; got 0"),
        (["any-length", "scale=nan"], "scale must be a finite number above 0; got nan"),
    ],
    ids=str,
)
def test_bad_words(words, message):
    with pytest.raises(ValueError, match=message):
        PositionConfig.from_words(words)


# --- which positions there are ---


@pytest.mark.parametrize("kind", KINDS)
def test_positions_that_are_not_drawn_begin_at_0(kind):
    place = make(kind=kind, limit=7)
    for rng in (None, jax.random.key(0)):
        np.testing.assert_array_equal(place.places(5, rng), [0, 1, 2, 3, 4])


@pytest.mark.parametrize("draw", ["subset", "window"])
def test_positions_are_drawn_in_training_alone(draw):
    place = make(draw=draw, limit=43)
    # 43 // 8 is 5, and evaluation may go beyond the limit: sines have none.
    np.testing.assert_array_equal(place.places(3), [5, 6, 7])
    np.testing.assert_array_equal(place.places(47), range(5, 52))
    drawn = [place.places(3, jax.random.key(seed)).tolist() for seed in range(11)]
    assert len({tuple(places) for places in drawn}) > 5
    for seed, places in enumerate(drawn):
        assert 0 <= places[0] < places[1] < places[2] < 43
        assert place.places(3, jax.random.key(seed)).tolist() == places
    with pytest.raises(ValueError, match=r"holds 44 tokens, .*; limit 43 holds 43"):
        place.places(44, jax.random.key(0))


def test_the_draw_is_the_one_that_was_asked_for():
    """Two of 997 are neighbours in 1 of 500 subsets, and in every third window or so."""
    neighbours = {}
    for draw in ("subset", "window"):
        place = make(draw=draw, limit=997)
        rngs = jax.random.split(jax.random.key(0), 211)
        drawn = np.asarray(jax.vmap(lambda rng, place=place: place.places(2, rng))(rngs))
        neighbours[draw] = np.mean(np.diff(drawn, axis=1) == 1)
    assert neighbours["subset"] < 0.05 < 0.1 < neighbours["window"]


@pytest.mark.parametrize(("draw", "most"), [("none", 17), ("subset", 15), ("window", 15)])
def test_a_learned_table_ends(draw, most):
    place = make(kind="learned", draw=draw, limit=17)
    places = np.asarray(place.places(most))
    np.testing.assert_array_equal(places, range(17 - most, 17))
    assert np.all(np.isfinite(place.codes((jnp.asarray(places),))))
    with pytest.raises(ValueError, match=f"holds {most + 1} tokens, .*; limit 17 holds {most}"):
        place.places(most + 1)


# --- codes ---

PLACES = np.array([0, 1, 5, 6, 11, 13, 14], np.int32)
LENGTHS = np.array([3, 7, 1], np.int32)


def positions_by_hand(anchor, length):
    """Of a source of 5 or fewer real tokens of 7: [3, 7], one or two."""
    places = {"start": np.zeros((3, length), int), "end": np.zeros((3, length), int)}
    for row, real in enumerate(LENGTHS):
        for j in range(length):
            places["start"][row, j] = PLACES[j]
            places["end"][row, j] = PLACES[max(real - 1 - j, 0)]
    return [places[end] for end in (("start", "end") if anchor == "both" else (anchor,))]


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_the_formula(kind, anchor):
    place = make(kind=kind, anchor=anchor, limit=17, max_wavelength=50.0, scale=3.0)
    of_source = place.source_positions(jnp.asarray(PLACES), 7, jnp.asarray(LENGTHS))
    of_target = place.target_positions(jnp.asarray(PLACES), 3, 2)
    by_hand = positions_by_hand(anchor, 7)
    assert len(of_source) == len(of_target) == len(by_hand)
    for got, expected in zip(of_source, by_hand, strict=True):
        np.testing.assert_array_equal(got, expected)
    for got in of_target:  # the target is counted from its start, whatever the anchor
        np.testing.assert_array_equal(got, [5, 6, 11])
    if kind in ("rotary", "none"):
        assert place.codes(of_source) is None
        assert jax.tree.leaves(nnx.to_pure_dict(nnx.state(place))) == []
        return
    size = 6 if anchor == "both" else 12
    if kind == "learned":
        rows = np.asarray(place.table[...], np.float64)
        assert rows.shape == (17, size)
    else:
        angles = np.arange(17)[:, None] / 50.0 ** (2 * np.arange(size // 2) / size)
        rows = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    expected = 3 * np.concatenate([rows[part] for part in by_hand], axis=-1)
    codes = place.codes(of_source)
    assert codes.dtype == jnp.float32
    np.testing.assert_allclose(codes, expected, atol=1e-5)
    expected = 3 * np.concatenate([rows[[5, 6, 11]]] * len(by_hand), axis=-1)
    np.testing.assert_allclose(place.codes(of_target), expected, atol=1e-5)


def test_a_new_table_has_the_variance_of_sines():
    rows = np.asarray(make(dim=62, kind="learned", limit=211).table[...])
    assert np.var(rows) == pytest.approx(0.5, rel=0.05)
    assert np.mean(rows) == pytest.approx(0, abs=0.03)


def test_rotations_by_both_ends_turn_a_half_each():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 7, 12)).astype(np.float32)  # heads between the batch and tokens
    left, right = positions_by_hand("both", 7)
    found = rotated(x, (jnp.asarray(left), jnp.asarray(right)), max_wavelength=50.0)
    assert found.dtype == jnp.float32
    for row, head in np.ndindex(3, 2):
        halves = np.split(np.float64(x[row, head]), 2, axis=-1)
        expected = [
            numpy_model.rotated(half, at[row], 50.0)
            for half, at in zip(halves, (left, right), strict=True)
        ]
        np.testing.assert_allclose(found[row, head], np.concatenate(expected, -1), atol=1e-5)
