"""Settings of positions, and their words on a command line."""

import itertools
import math

import pytest
from flax import nnx

from attention_jax.nn.position_config import ANY_LENGTH, PositionConfig
from attention_jax.nn.position_encoding import PositionEncoding

KINDS = ["sinusoidal", "learned", "rotary", "none"]
ANCHORS = ["start", "end", "both"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "cosine"}, "kind must be one of sinusoidal, learned, rotary, none; got 'cosine'"),
        ({"anchor": "middle"}, "anchor must be one of start, end, both; got 'middle'"),
        ({"draw": "all"}, "draw must be one of none, subset, window; got 'all'"),
        ({"limit": 0}, "limit must be at least 1; got 0"),
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
def test_sizes_that_can_be_encoded(kind, anchor):
    """Each id needs pairs of features: a sine and a cosine, or two features to rotate."""
    config = PositionConfig(kind, anchor, limit=7)
    for dim in (2, 3, 6, 8, 10):
        if kind == "none" or dim % (4 if anchor == "both" else 2) == 0:
            nnx.eval_shape(lambda dim=dim: PositionEncoding(config, dim, rngs=nnx.Rngs(0)))
            continue
        with pytest.raises(ValueError, match=f"{kind} positions anchored at {anchor}; got {dim}"):
            PositionEncoding(config, dim, rngs=nnx.Rngs(0))


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
    shared = 3 * 3 * 2  # anchors, draws, limits
    assert len(seen) == shared * 8 + shared * 2 + shared * 2 + 1


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
        (["learned", "limit=0"], "limit must be at least 1; got 0"),
        (["any-length", "scale=nan"], "scale must be a finite number above 0; got nan"),
    ],
    ids=str,
)
def test_bad_words(words, message):
    with pytest.raises(ValueError, match=message):
        PositionConfig.from_words(words)
