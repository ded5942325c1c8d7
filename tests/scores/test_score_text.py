"""Scores that are named by text with arguments: "additive(hidden_dim=32)"."""

import dataclasses
import re
import sys
import types

import pytest

from attention_jax.nn import Seq2SeqConfig
from attention_jax.scores import (
    Additive,
    Cosine,
    FunctionScore,
    ScaledDot,
    Score,
    SoftCap,
    get_score,
    score_folder,
)


@dataclasses.dataclass(frozen=True)
class Temperature(Score):
    temperature: float
    name: object = None
    score: Score = ScaledDot()

    def __post_init__(self):
        if self.temperature == 0:
            raise ZeroDivisionError("temperature of zero")

    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T / self.temperature


def product(q, k):
    return q @ k.T


@pytest.fixture(autouse=True)
def my_scores(monkeypatch):
    """Modules of a user: "my_scores", and "folder.my_scores" with the same names."""
    module = types.ModuleType("my_scores")
    module.Temperature, module.WARM, module.product = Temperature, Temperature(4.0), product
    for name in ("my_scores", "folder.my_scores"):
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("additive(hidden_dim=32)", Additive(32)),
        ("additive()", Additive()),
        (" softcap ( cap = 2 ) ", SoftCap(cap=2)),
        ("scaled(scale=-1.5e-1)", ScaledDot(-0.15)),
        ("softcap(score=additive)", SoftCap(Additive())),
        ("softcap(score=additive(hidden_dim=3), cap=20.0)", SoftCap(Additive(3), 20.0)),
        ("softcap(score=softcap(score=cosine(scale=2.0)))", SoftCap(SoftCap(Cosine(2.0)))),
        ("my_scores:Temperature(temperature=4.0)", Temperature(4.0)),
        ("folder.my_scores:Temperature(temperature=4)", Temperature(4)),
        ("my_scores:WARM(name='a: (b) = @, ☃')", Temperature(4.0, "a: (b) = @, ☃")),
        ("my_scores:WARM(name=(1, None, True))", Temperature(4.0, (1, None, True))),
        ("my_scores:WARM(temperature=2.0)", Temperature(2.0)),
        ("my_scores:WARM()", Temperature(4.0)),
        (
            "my_scores:Temperature(temperature=1, score=my_scores:WARM(score=dot))",
            Temperature(1, score=Temperature(4.0, score=get_score("dot"))),
        ),
        ("softcap(score=my_scores:product)", SoftCap(FunctionScore(product))),
    ],
)
def test_text_is_the_score_that_python_would_make(text, score):
    assert get_score(text) == score


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("additive(hiden_dim=3)", "Additive has no field 'hiden_dim'; its fields are hidden_dim;"
         " did you mean 'hidden_dim'?"),
        ("dot(scale=3)", "Dot has no field 'scale'; it has no fields"),
        ("additive(hidden_dim=0)", "hidden_dim must be at least 1; got 0"),
        ("additive(32)", "has an argument without a name"),
        ("additive(**{'hidden_dim': 3})", "has an argument without a name"),
        ("additive(hidden_dim=3, hidden_dim=4)", "hidden_dim is given twice"),
        ("additive(hidden_dim=", "Python literals or scores; got 'additive(hidden_dim='"),
        ("additive(hidden_dim=3", "it is no Python call"),
        ("additive(hidden_dim=3) + dot", "it is no call of a name"),
        ("additive(hidden_dim=3)(hidden_dim=4)", "it is no call of a name"),
        ("my_scores@WARM(temperature=3)", "it is no Python call"),
        ("a:b:c(d=3)", "it is no call of a name"),
        ("(additive)", "it is no call of a name"),
        ("additive(hidden_dim=4*8)", "hidden_dim must be a Python literal or a score; got 4 * 8"),
        ("additive(hidden_dim=__import__('os').getpid())", "hidden_dim must be a Python"),
        ("softcap(cap=inf)", "cap must be a Python literal or a score; got inf"),
        ("softcap(score=aditive)", "got aditive; did you mean 'additive'?"),
        ("softcap(score=aditive(hidden_dim=3))", "did you mean 'additive'?"),
        ("softcap(cap=additive)", "cap must be a finite float above 0; got Additive("),
        ("softcap(score=3)", "score must be a Score; got 3"),
        ("my_scores:Temperature", "Temperature needs temperature; write"
         " my_scores:Temperature(temperature=...)"),
        ("my_scores:Temperature(name=1)", "Temperature needs temperature; write"),
        ("my_scores:WARM(nothing=1)", "Temperature has no field 'nothing'"),
        ("my_scores:WARM(name=[1])", "name must be hashable, such as a tuple; got [1]"),
        ("my_scores:WARM(temperature=0)", "its constructor raised ZeroDivisionError: temperature of"
         " zero ("),
        ("my_scores:product(a=1)", "my_scores:product takes no arguments in parentheses"),
        ("my_scores:Nothing(a=1)", "module 'my_scores' has no 'Nothing'"),
        ("my_scores:Temprature", "module 'my_scores' has no 'Temprature'; did you mean"
         " 'Temperature'?"),
        ("nowhere:Nothing(a=1)", "cannot import module 'nowhere'"),
        ("confest:Mine", "cannot import module 'confest' (No module named 'confest');"
         " did you mean 'conftest'?"),
        ("adit(a=1)", "got 'adit(a=1)'; did you mean 'additive'?"),
        ("softcap(" * 200, "it is no"),
        ("softcap(score=" * 2000 + "dot" + ")" * 2000, "score"),
        ("additive(hidden_dim=3\0)", "it is no Python call"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(text, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        get_score(text)
    assert "\n" not in str(raised.value)


def test_a_module_that_cannot_be_imported_names_the_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, source, message in (
        ("lacks", "\nimport nothing_there\n", "ModuleNotFoundError: No module named 'nothing_there'"
         "; lacks.py, line 2"),
        ("broken", "x = 1\n\nx.y\n", "AttributeError: 'int' object has no attribute 'y'; broken.py,"
         " line 3"),
        ("unfinished", "def f(:\n", "SyntaxError: "),
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(source)
        expected = re.escape(f"score '{name}:Mine': cannot import module '{name}' ({message}")
        with pytest.raises(ValueError, match=expected) as raised:
            get_score(f"{name}:Mine")
        assert f"{name}.py, line " in str(raised.value)
        assert str(raised.value).count(f"{name}.py") == 1


def test_a_model_takes_the_text():
    config = Seq2SeqConfig(score="additive(hidden_dim=3)", self_attention_score="scaled(scale=1.0)")
    assert config.label == "additive(hidden_dim=3)"
    with pytest.raises(ValueError, match="Additive has no field 'hidden'"):
        Seq2SeqConfig(score="additive(hidden=3)")


def test_folders_are_safe_and_differ():
    for name in ("scaled", "my_scores:Distance", "folder.my_scores:MINE"):
        assert score_folder(name) == name.replace(":", "-")
    texts = [
        "softcap(cap=1)", "softcap(cap=-1)", "softcap(cap=1.0)", "softcap(cap= 1)", "softcap()",
        "my_scores:WARM(name='../..')", "my_scores:WARM(name='/')", "my_scores:WARM(name='☃\\0')",
        f"softcap(score={'softcap(score=' * 50}dot{')' * 50})",
        f"softcap(score={'softcap(score=' * 51}dot{')' * 51})",
    ]  # fmt: skip
    folders = [score_folder(text) for text in texts]
    assert len(set(folders)) == len(texts)
    for folder in folders:
        assert re.fullmatch(r"[\w.=-]+", folder)
        assert len(folder) < 100
        assert folder.strip(".") == folder
