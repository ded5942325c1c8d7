"""A translation run in its folder: what it keeps, and when it is refused."""

import dataclasses
import hashlib
import json
import shutil
from unittest import mock

import numpy as np
import pytest
from mistakes import refused
from stand_in_training import without_training
from translation_cases import VOCABULARY_SIZE, lines_of, run_task, write_text

from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import Subwords
from attention_jax.tasks.translation.translate import score_translations, translate, translator_of
from attention_jax.training.run import load_run, train_run

ENDED = {"steps": 6, "log_every": 2, "checkpoint_every": 2, "keep": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run that ended with step 6, and its folder; test_contract trains and resumes one."""
    folder = tmp_path_factory.mktemp("run")
    validate = mock.patch.object(Translation, "validate", return_value={"loss": [2.0, 3.0]})
    with without_training(), validate:
        return train_run(run_task(text, train=ENDED), folder), folder


# --- what a run leaves ---


def test_what_a_run_keeps(straight):
    reached, folder = straight
    assert (reached.step, reached.interrupted) == (6, 0)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "env.json", "lock", "timing.jsonl", "metrics.jsonl", "validation.jsonl",
        "subwords.model", "checkpoints",
    }  # fmt: skip
    stored = json.loads((folder / "config.json").read_text())
    assert stored["task"] == "attention_jax.tasks:Translation"
    assert stored["model"]["dim"] == 8
    sides = [lines_of("train", side) for side in ("de", "en")]
    written = b"".join("".join(f"{line}\n" for line in side).encode() + b"\0" for side in sides)
    assert stored["text_sha256"]["training"] == hashlib.sha256(written).hexdigest()
    assert set(stored["text_sha256"]) == {"training", "validation"}
    model = (folder / "subwords.model").read_bytes()
    assert stored["subwords_sha256"] == hashlib.sha256(model).hexdigest()
    assert model == Subwords.learned([*sides[0], *sides[1]], VOCABULARY_SIZE).model


def test_validation_scores_the_translations_of_each_seed(straight):
    run = load_run(straight[1])
    source, target = (lines_of("validation", side) for side in ("de", "en"))
    line = run.task.validate(run.params, straight[1])
    assert np.all(np.isfinite(line["loss"]))
    for seed in range(2):
        translations = translate(translator_of(run, seed), source)
        assert line["bleu"][seed] == score_translations(translations, target).bleu


# --- resuming ---


@pytest.fixture
def copied(straight, tmp_path):
    """A finished run that a test may spoil."""
    return shutil.copytree(straight[1], tmp_path / "run")


def test_subwords_that_were_lost_are_learned_again(text, straight, copied):
    (copied / "subwords.model").unlink()
    run = load_run(copied)
    with pytest.raises(ValueError, match=r"subwords.model cannot be read: No such file"):
        translator_of(run)
    train_run(run_task(text, train=ENDED), copied, resume=True)
    kept = [(folder / "subwords.model").read_bytes() for folder in (copied, straight[1])]
    assert kept[0] == kept[1]


def changed_word(text, _):
    path = text / "train.en"
    path.write_text(path.read_text(encoding="utf-8").replace("a", "e", 1), encoding="utf-8")


def changed_validation(text, _):
    path = text / "validation.de"
    path.write_text("Ja .\n" + path.read_text(encoding="utf-8").partition("\n")[2])


def damaged_subwords(_, folder):
    path = folder / "subwords.model"
    path.write_bytes(path.read_bytes()[:1001])


def other_subwords(text, folder):
    sentences = lines_of("train", "de")
    (folder / "subwords.model").write_bytes(Subwords.learned(sentences, VOCABULARY_SIZE).model)


SUBWORDS = "resume examples validate answers translator"


@pytest.mark.parametrize(
    ("change", "message", "uses"),
    [
        (changed_word, "another configuration: text_sha256.training was '", "resume"),
        (changed_validation, "text_sha256.validation (was|has)", "resume examples validate"),
        (damaged_subwords, "learned from other data: subwords_sha256 has changed since", SUBWORDS),
        (other_subwords, "learned from other data: subwords_sha256 has changed since", SUBWORDS),
    ],
)
def test_other_data_is_refused(copied, text, change, message, uses):
    run, saved = load_run(copied), contents(text)
    functions = {
        "resume": lambda: train_run(run.task, copied, resume=True),
        "examples": lambda: run.task.examples(copied),
        "validate": lambda: run.task.validate(run.params, copied),
        "answers": lambda: run.task.answers(run.params_of(0), ["Ja ."], folder=copied),
        "translator": lambda: translator_of(run),
    }
    try:  # in the files that config.json names
        change(text, copied)
        before = contents(copied)
        for use in uses.split():
            refused(message, functions[use])
        assert contents(copied) == before
    finally:
        for path, content in saved.items():
            path.write_bytes(content)


def test_learned_positions_must_hold_the_translations_of_validation(text, tmp_path):
    model = {"positions": "learned", "position_limit": 40}
    task = run_task(text, model=model, max_tokens=20)
    with pytest.raises(ValueError, match="position_limit must hold"):
        task.feed(tmp_path)
    dataclasses.replace(task, validation_source=None, validation_target=None).feed(tmp_path)
