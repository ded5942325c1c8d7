"""Scores and normalisers that a text names, and what config.json stores of them."""

import dataclasses
import json
import re
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conformance import SCORE_CASES, OwnCosine
from normalizer_cases import NORMALIZER_CASES

import attention_jax as aj
from attention_jax.normalizers import NORMALIZERS
from attention_jax.parts import check_description, describe, known_score
from attention_jax.scores import FunctionScore, score_folder


@dataclasses.dataclass(frozen=True)
class Temperature(aj.Score):
    temperature: float
    name: object = None
    score: aj.Score = aj.ScaledDot()

    def __post_init__(self):
        if self.temperature == 0:
            raise ZeroDivisionError("temperature of zero")

    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T / self.temperature


def product(q, k):
    return q @ k.T


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """Modules of a user: "mine", and "folder.mine" with the same names."""
    module = types.ModuleType("mine")
    module.Temperature, module.WARM, module.product = Temperature, Temperature(4.0), product
    for name in ("mine", "folder.mine"):
        monkeypatch.setitem(sys.modules, name, module)


# --- a text is the object that Python would make ---


SCORES = {
    "additive(hidden_dim=32)": aj.Additive(32),
    "additive()": aj.Additive(),
    " softcap ( cap = 2 ) ": aj.SoftCap(cap=2),
    "scaled(scale=-1.5e-1)": aj.ScaledDot(-0.15),
    "softcap(score=additive)": aj.SoftCap(aj.Additive()),
    "softcap(score=additive (hidden_dim=3),\n cap=20.0)": aj.SoftCap(aj.Additive(3), 20.0),
    "softcap(score=softcap(score=dot))": aj.SoftCap(aj.SoftCap(aj.Dot())),
    "conformance:OwnCosine": OwnCosine(),
    "mine:WARM": Temperature(4.0),
    "mine:Temperature(temperature=4.0)": Temperature(4.0),
    "folder.mine:Temperature(temperature=4)": Temperature(4),
    "mine:WARM(name='a:b (c) = @, ☃')": Temperature(4.0, "a:b (c) = @, ☃"),
    "mine:WARM(name=(1, None, True))": Temperature(4.0, (1, None, True)),
    "mine:WARM(temperature=2.0)": Temperature(2.0),
    "mine:WARM()": Temperature(4.0),
    "mine:Temperature(temperature=1, score=mine:WARM(score=dot))": Temperature(
        1, score=Temperature(4.0, score=aj.Dot())
    ),
    "softcap(score=mine:product)": aj.SoftCap(FunctionScore(product)),
}
NORMALIZERS_OF = {
    "entmax(alpha=1.25)": aj.Entmax(1.25),
    "sparsemax": aj.Entmax(2.0),
    "log_scaled(normalizer=entmax(alpha=1.25), start=7)": aj.LogScaled(aj.Entmax(1.25), start=7),
    "normalizer_cases:OwnSoftplus": NORMALIZER_CASES["own_softplus"].normalizer,
    aj.Softmax: aj.Softmax(),
}


@pytest.mark.parametrize("text", SCORES)
def test_a_text_is_a_score(text):
    assert aj.get_score(text) == SCORES[text]


@pytest.mark.parametrize("text", NORMALIZERS_OF)
def test_a_text_is_a_normalizer(text):
    assert aj.get_normalizer(text) == NORMALIZERS_OF[text]


def test_the_named_scores_and_what_is_returned_unchanged():
    assert set(aj.SCORES) <= set(SCORE_CASES)  # the conformance suite runs them all
    for name, score in aj.SCORES.items():
        assert type(SCORE_CASES[name].score) is type(score)
        assert aj.get_score(name) is score
        assert aj.get_score(score) is score
    for name, normalizer in NORMALIZERS.items():
        assert aj.get_normalizer(name) is normalizer
    assert aj.get_score(aj.General) == aj.General()


# --- mistakes: those of a text are in test_wrong_calls.py ---


@pytest.mark.parametrize(
    ("text", "hint"),
    [("addtive", "additive"), ("adit", "additive"), ("nope", None), ("majority", None),
     ("mine.py:WARM", "mine:WARM"), ("mine:WRAM", "WARM"), ("nowhere:WARM", None)],
)  # fmt: skip
def test_a_hint_for_what_is_near_alone(text, hint):
    with pytest.raises(ValueError, match=r"^score ") as error:
        aj.get_score(text)
    end = str(error.value).partition(text)[2]
    assert f"{hint!r}" in end if hint else "did you mean" not in end and "drop" not in end


def test_a_base_class_stands_for_nothing():
    for get, base in ((aj.get_score, aj.Score), (aj.get_normalizer, aj.Normalizer)):
        with pytest.raises(ValueError, match=f"must be a name or a {base.__name__}"):
            get(base)


def test_a_text_that_is_too_deep():
    with pytest.raises(ValueError, match=r"^score must be name\(field=value"):
        aj.get_score("softcap(score=" * 2000 + "dot" + ")" * 2000)


def test_a_bug_of_the_users_class_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        aj.get_score("mine:WARM(temperature=0)")


# --- folders of runs ---


def test_folders_are_safe_and_differ():
    for name in ("scaled", "mine:Distance", "folder.mine:WARM"):
        assert score_folder(name) == name.replace(":", "-")
    texts = [
        "softcap(cap=1)", "softcap(cap=-1)", "softcap(cap=1.0)", "softcap(cap= 1)", "softcap()",
        "mine:WARM(name='../..')", "mine:WARM(name='/')", "mine:WARM(name='☃\\0')",
        f"softcap(score={'softcap(score=' * 50}dot{')' * 50})",
        f"softcap(score={'softcap(score=' * 51}dot{')' * 51})",
    ]  # fmt: skip
    folders = [score_folder(text) for text in texts]
    assert len(set(folders)) == len(texts)
    for folder in folders:
        assert re.fullmatch(r"[\w.=-]+", folder)
        assert len(folder) < 100
        assert folder.strip(".") == folder


# --- what config.json stores ---


def known(score):
    return known_score(aj.get_score(score), None, 3, 3)


def stored(score):
    """The description as config.json holds it."""
    return json.loads(json.dumps(describe(known(score)), allow_nan=False))


@pytest.mark.parametrize("name", aj.SCORES)
def test_every_named_score_fits_its_own_description(name):
    check_description("score", known(name), stored(name))
    for other in aj.SCORES.keys() - {name}:
        with pytest.raises(ValueError, match="when this run was trained, and is"):
            check_description("score", known(other), stored(name))


def test_a_score_of_a_user_is_its_program():
    assert stored(aj.SoftCap(aj.Additive(3), 2.0)) == {
        "class": "attention_jax.scores.SoftCap",
        "fields": "SoftCap(score=Additive(hidden_dim=3), cap=2.0)",
    }
    before, changed = stored(Temperature(2)), "when this run was trained, and is"
    assert before.keys() == {"class", "fields", "program", "init", "jax", "numbers"}
    assert " at 0x" not in stored(lambda q, k: q @ k.T)["fields"]
    # Another field that changes no number.
    check_description("score", known(Temperature(2, name="b")), before)
    for other in (known(Temperature(3)), aj.ScaledDot()):
        with pytest.raises(ValueError, match=rf"score 'mine' was Temp.*{changed}"):
            check_description("score 'mine'", other, before)


@dataclasses.dataclass(frozen=True)
class Softened(aj.Score):
    """A bilinear score with a map of its logits, which `rule` differentiates."""

    soften: Any = jax.nn.softplus
    start: float = 0.0

    def init(self, rng, query_dim, key_dim):
        shift = jnp.full((), self.start)
        return {"kernel": jax.random.normal(rng, (query_dim, key_dim)), "shift": shift}

    def pair(self, params, q, k):
        return self.soften(q @ params["kernel"] @ k.T) + 0 * params["shift"]


@jax.custom_jvp
def flat(x):
    return jax.nn.softplus(x)


flat.defjvp(lambda primals, tangents: (flat(*primals), 0.5 * tangents[0]))


@pytest.mark.parametrize(
    ("rewritten", "same"),
    [
        (Softened(lambda x: jnp.log(1 + jnp.exp(x))), True),
        (dataclasses.make_dataclass("Renamed", (), bases=(Softened,), frozen=True)(), True),
        (Softened(lambda x: 1.001 * jax.nn.softplus(x)), False),
        (Softened(flat), False),  # another derivative
        (Softened(start=1e-3), False),  # another init
    ],
)
def test_a_rewritten_score_is_the_same_if_its_numbers_are(rewritten, same):
    before = stored(Softened()) | {"program": "0" * 64}
    digest = known(rewritten).digest[:12]
    message = rf"program 000000000000\) .* program {digest}\) now, which gives"
    for jax_version in (jax.__version__, "0.0.1"):  # numbers decide between versions, too
        then = before | {"jax": jax_version}
        if same:
            with pytest.warns(UserWarning, match=f"{message} the same"):
                check_description("score", known(rewritten), then)
        else:
            with pytest.raises(ValueError, match=f"{message} other numbers"):
                check_description("score", known(rewritten), then)
    for name in ("numbers", "init"):  # which earlier versions did not store
        del before[name]
    check_description("score", known(Softened()), before | {"program": known(Softened()).digest})
    with pytest.raises(ValueError, match="when this run was trained"):
        check_description("score", known(rewritten), before)
    with pytest.warns(UserWarning, match=r"this may be because jax was 0\.0\.1 then"):
        check_description("score", known(Softened()), before | {"jax": "0.0.1"})
