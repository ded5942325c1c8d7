"""Descriptions of scores as JSON: what a run compares with the score of its name."""

import dataclasses
import enum
import functools
import json
import math

import jax.numpy as jnp
import pytest

from attention_jax.scores import (
    SCORES,
    Additive,
    FunctionScore,
    ScaledDot,
    Score,
    SoftCap,
    describe,
    description_in_words,
    fits_description,
    get_score,
)


class Kind(enum.Enum):
    SMOOTH = 1


def product(q, k):
    return q @ k.T


@dataclasses.dataclass(frozen=True)
class Anything(Score):
    value: object


@dataclasses.dataclass(frozen=True)
class Fixed(Score):
    size: int = 3


@dataclasses.dataclass(frozen=True)
class Grown(Score):
    """`Fixed` in a later version of its module."""

    size: int = 3
    slope: float = 0.5
    sizes: tuple = dataclasses.field(default_factory=tuple)


def stored(score):
    """The description as config.json holds it."""
    return json.loads(json.dumps(describe(score), allow_nan=False))


VALUES = [
    None, True, 3, -2.5, 4.5, math.inf, -math.inf, math.nan, "a", "b", (1, 2), (1, (2.5, None)),
    frozenset({3, 1}), Kind.SMOOTH, product, functools.partial(product, k=3),
    functools.partial(product, 3), jnp.tanh, jnp.float32, jnp.dtype("float32"), ScaledDot,
    ScaledDot(), ScaledDot(2.0), SoftCap(Additive(3)), SoftCap(Additive(4)), object(),
]  # fmt: skip


def test_equal_scores_fit_and_others_do_not():
    descriptions = [stored(Anything(value)) for value in VALUES]
    for index, value in enumerate(VALUES):
        fits = [fits_description(Anything(value), each) for each in descriptions]
        assert [place for place, same in enumerate(fits) if same] == [index]
    assert fits_description(Anything(object()), descriptions[-1])  # wherever the object lies


@pytest.mark.parametrize("name", SCORES)
def test_every_named_score_fits_its_own_description(name):
    assert fits_description(get_score(name), stored(get_score(name)))
    others = [other for other in SCORES if fits_description(SCORES[other], stored(SCORES[name]))]
    assert others == [name]


def test_the_description_names_the_class_and_nests():
    assert stored(SoftCap(Additive(3), 2.0)) == {
        "class": "attention_jax.scores.SoftCap",
        "fields": {
            "score": {"class": "attention_jax.scores.Additive", "fields": {"hidden_dim": 3}},
            "cap": 2.0,
        },
    }
    assert stored(FunctionScore(product))["fields"] == {"function": f"{__name__}.product"}
    words = description_in_words(stored(SoftCap(Additive(3), 2.0)))
    assert words == repr(SoftCap(Additive(3), 2.0))
    words = description_in_words(stored(Fixed()), modules=True)
    assert words == f"{__name__}.Fixed(size=3)"


def test_a_field_that_is_newer_must_have_its_default():
    old = {**stored(Fixed()), "class": stored(Grown())["class"]}
    assert fits_description(Grown(), old)
    assert not fits_description(Grown(slope=0.25), old)
    assert not fits_description(Grown(sizes=(1,)), old)
    assert not fits_description(Grown(size=4), old)
    newer = {**stored(Grown()), "class": stored(Fixed())["class"]}
    assert not fits_description(Fixed(), newer)  # a field that is gone
