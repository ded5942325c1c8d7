"""Descriptions of scores as JSON: what a run compares with the score of its name."""

import dataclasses
import json

import pytest

from attention_jax.scores import (
    SCORES,
    Additive,
    ScaledDot,
    Score,
    SoftCap,
    check_description,
    describe,
    get_score,
    known_score,
)


@dataclasses.dataclass(frozen=True)
class Power(Score):
    power: int
    name: str = "a"

    def pair(self, params, q_features, k_features):
        return (q_features @ k_features.T) ** self.power


def known(score):
    return known_score(get_score(score), None, 3, 3)


def stored(score):
    """The description as config.json holds it."""
    return json.loads(json.dumps(describe(known(score)), allow_nan=False))


@pytest.mark.parametrize("name", SCORES)
def test_every_named_score_fits_its_own_description(name):
    check_description("score", known(name), stored(name))
    for other in SCORES.keys() - {name}:
        with pytest.raises(ValueError, match="when this run was trained, and is"):
            check_description("score", known(other), stored(name))


def test_what_a_description_says():
    assert stored(SoftCap(Additive(3), 2.0)) == {
        "class": "attention_jax.scores.SoftCap",
        "fields": "SoftCap(score=Additive(hidden_dim=3), cap=2.0)",
    }
    assert stored(Power(2)).keys() == {"class", "fields", "program", "jax"}
    assert " at 0x" not in stored(lambda q, k: q @ k.T)["fields"]


def test_a_score_of_a_user_is_its_program():
    # Another field that changes no number, and a program that is written in another way.
    check_description("score", known(Power(2, name="b")), stored(Power(2)))
    with pytest.raises(ValueError, match=r"'my' was Power\(power=2.* is Power\(power=3"):
        check_description("score 'my'", known(Power(3)), stored(Power(2)))
    before = stored(Power(2)) | {"program": "0" * 64}
    message = r"another formula .* program is 000000000000 in config.json, and "
    with pytest.raises(ValueError, match=message):
        check_description("score", known(Power(2)), before)
    with pytest.warns(UserWarning, match=r"this may be because jax was 0\.0\.1 then"):
        check_description("score", known(Power(2)), before | {"jax": "0.0.1"})
    with pytest.raises(ValueError, match=r"was Power.*, and is ScaledDot\(scale=None\) now"):
        check_description("score", ScaledDot(), stored(Power(2)))
