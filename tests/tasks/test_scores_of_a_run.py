"""A run knows its score and its normaliser: another one under the same name is refused."""

import dataclasses
import json
import re
import sys
import types
from pathlib import Path

import pytest
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.task import ReversalConfig
from attention_jax.tasks.translation.definition import TRANSLATION
from command_lines import call, load

from attention_jax import Entmax, LogScaled, Score
from attention_jax.nn import ModelConfig
from attention_jax.runs.run_folder import RunFolder
from attention_jax.scores import Additive, SoftCap
from attention_jax.tasks.translation.task import MODEL, TranslationConfig
from attention_jax.training.run import load_run, load_states, train_run
from attention_jax.training.run_results import finished_run

SCRIPTS = {
    name: load(f"scripts/{name}.py")
    for name in ("train", "evaluate", "reverse", "translate", "analyze_gradients")
}
TEXTS = Path(__file__).parents[1] / "parallel_text"
TRANSLATED = TranslationConfig(source=TEXTS / "train.de", target=TEXTS / "train.en")
OLD, NEW = "Temperature(temperature=4.0)", "Temperature(temperature=2.0)"
CHANGE = re.escape(f"'my_scores:MINE' was {OLD}") + ".* and is " + re.escape(NEW) + ".*; restore"


@dataclasses.dataclass(frozen=True)
class Temperature(Score):
    temperature: float

    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T / self.temperature


@pytest.fixture
def mine(monkeypatch):
    """A function that changes what "my_scores:MINE" names."""
    module = types.ModuleType("my_scores")
    monkeypatch.setitem(sys.modules, "my_scores", module)

    def change(score):
        module.MINE = score

    change(Temperature(4.0))
    return change


def begun(folder, definition, **scores):
    """A run folder as `train_run` begins it."""
    model = dataclasses.replace(MODEL if definition is TRANSLATION else ModelConfig(), **scores)
    start = TRANSLATED if definition is TRANSLATION else ReversalConfig()
    config = dataclasses.replace(start, model=model)
    RunFolder(folder).create(config.to_json(), resume=False)
    return config


@pytest.mark.parametrize("definition", [REVERSAL, TRANSLATION])
@pytest.mark.parametrize("setting", ["score", "self_attention_score"])
def test_other_values_under_the_name_are_refused(definition, setting, mine, tmp_path):
    config = begun(tmp_path, definition, **{setting: "my_scores:MINE"})
    content = json.loads((tmp_path / "config.json").read_text())
    description = content["scores"][setting]
    assert description["class"] == f"{__name__}.Temperature"
    assert description["fields"] == "Temperature(temperature=4.0)"
    assert definition.config_from(tmp_path) == config
    mine(Temperature(2.0))
    with pytest.raises(ValueError, match=f"^workdir {tmp_path}: {setting} {CHANGE}"):
        definition.config_from(tmp_path)
    for read in (load_run, load_states):
        with pytest.raises(ValueError, match="is Temperature"):
            read(definition, tmp_path)


def test_a_run_is_not_resumed_with_another_score(mine, tmp_path):
    config = begun(tmp_path, REVERSAL, score="softcap(score=my_scores:MINE)")
    before = (tmp_path / "config.json").read_text()
    mine(Temperature(2.0))
    with pytest.raises(ValueError, match=r"SoftCap\(score=Temperature\(temperature=4.0\), cap="):
        train_run(REVERSAL, config, tmp_path, resume=True)
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("definition", [REVERSAL, TRANSLATION])
@pytest.mark.parametrize("setting", ["normalizer", "self_attention_normalizer"])
def test_another_normalizer_under_the_name_is_refused(definition, setting, mine, tmp_path):
    mine(LogScaled(Entmax(1.25), start=7))
    config = begun(tmp_path, definition, **{setting: "my_scores:MINE"})
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["normalizers"][setting]["class"] == "attention_jax.normalizers.LogScaled"
    assert "Entmax(alpha=1.25)" in content["normalizers"][setting]["fields"]
    assert definition.config_from(tmp_path) == config
    mine(LogScaled(Entmax(1.5), start=7))
    for read in (definition.config_from, lambda folder: load_run(definition, folder)):
        with pytest.raises(ValueError, match=f"{setting} 'my_scores:MINE' was LogScaled") as raised:
            read(tmp_path)
        assert "was LogScaled(normalizer=Entmax(alpha=1.25)" in str(raised.value)
        assert "is LogScaled(normalizer=Entmax(alpha=1.5)" in str(raised.value)
        assert "restore what the run was trained with" in str(raised.value)
    if definition is REVERSAL:  # translation learns its subwords first
        with pytest.raises(ValueError, match="restore what the run"):
            train_run(definition, config, tmp_path, resume=True)
    del content["normalizers"]  # as earlier versions wrote it
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert definition.config_from(tmp_path) == config


def test_another_formula_under_the_name_is_refused(mine, tmp_path):
    def formula(factor):
        def score(q, k):
            return factor * (q @ k.T)

        return score

    mine(formula(1.0))
    config = begun(tmp_path, REVERSAL, score="my_scores:MINE")
    mine(formula(1.0))
    assert REVERSAL.config_from(tmp_path) == config
    assert config.model.known() == config.model.known()
    before = config.model.known()
    mine(formula(2.0))
    assert config.model.known() != before
    message = f"workdir {tmp_path}: score 'my_scores:MINE' was .*program .* and is .*program .* now"
    for read in (
        REVERSAL.config_from,
        lambda folder: load_run(REVERSAL, folder),
        lambda folder: finished_run(REVERSAL, folder),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)
    with pytest.raises(ValueError, match=message):
        train_run(REVERSAL, config, tmp_path, resume=True)


def test_another_class_of_the_same_name_is_refused(mine, tmp_path):
    begun(tmp_path, REVERSAL, score="my_scores:MINE")

    def pair(self, params, q_features, k_features):
        return q_features @ k_features.T * self.temperature

    mine(type("Temperature", (Temperature,), {"__module__": "elsewhere", "pair": pair})(4.0))
    with pytest.raises(ValueError, match=r"was .*_run.Temperature.* is .*elsewhere.Temperature"):
        REVERSAL.config_from(tmp_path)
    mine(SoftCap(Additive(3)))
    with pytest.raises(ValueError, match=r"and is SoftCap\(score=Additive\(hidden_dim=3\)"):
        REVERSAL.config_from(tmp_path)


@pytest.mark.parametrize("definition", [REVERSAL, TRANSLATION])
def test_runs_of_earlier_versions_still_load(definition, mine, tmp_path):
    config = begun(tmp_path, definition, score="my_scores:MINE")
    content = json.loads((tmp_path / "config.json").read_text())
    del content["scores"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    mine(Temperature(2.0))
    assert definition.config_from(tmp_path) == config


def test_another_name_is_one_difference(mine, tmp_path):
    config = begun(tmp_path, REVERSAL, score="my_scores:MINE")
    other = dataclasses.replace(config, model=ModelConfig(score="dot"))
    with pytest.raises(ValueError, match="another configuration") as raised:
        train_run(REVERSAL, other, tmp_path, resume=True)
    assert (
        f"{tmp_path} holds a run of another configuration: model.score was 'my_scores:MINE',"
        in (str(raised.value))
    )
    assert "scores." not in str(raised.value)


def test_every_command_line_refuses_it_in_one_line(mine, tmp_path, monkeypatch, capsys):
    runs = {REVERSAL: tmp_path / "reversal", TRANSLATION: tmp_path / "translation"}
    for definition, folder in runs.items():
        begun(folder, definition, score="my_scores:MINE")
    mine(Temperature(2.0))
    texts = ["--source", TRANSLATED.source, "--reference", TRANSLATED.target]
    for name, definition, options in (
        ("train", REVERSAL, ["--resume", "--score", "my_scores:MINE"]),
        ("evaluate", REVERSAL, []),
        ("evaluate", TRANSLATION, texts),
        ("reverse", REVERSAL, ["word"]),
        ("translate", TRANSLATION, ["--source", TRANSLATED.source]),
        ("analyze_gradients", REVERSAL, []),
    ):
        words = ["--workdir", runs[definition], *options]
        assert call(SCRIPTS[name], *words, monkeypatch=monkeypatch) == 2
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert re.search(f"score {CHANGE}", printed)
