"""A translation run in its folder: begun, stopped, gone on with, loaded."""

import hashlib
import json
import shutil

import pytest
from saved_files import assert_bits_equal
from translation_cases import (
    VOCABULARY_SIZE,
    lines_of,
    run_task,
    write_text,
)

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.translation.text import Subwords
from attention_jax.tasks.translation.translate import score_translations, translate, translator_of
from attention_jax.training.run import load_run, load_states, train_run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def straight(text, tmp_path_factory):
    """A run that nobody disturbed, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    return train_run(run_task(text), folder), folder


# --- what a run leaves ---


def test_what_a_run_keeps(text, straight):
    reached, folder = straight
    assert (reached.step, reached.interrupted, reached.exhausted) == (12, 0, False)
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "env.json", "lock", "metrics.jsonl", "validation.jsonl", "timing.jsonl",
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


def test_validation_is_what_the_checkpoint_says(text, straight):
    _, folder = straight
    source, target = (lines_of("validation", side) for side in ("de", "en"))
    last = read_lines(folder / "validation.jsonl")[-1]
    run = load_run(folder)
    assert run.step == 12
    for seed in range(2):
        translator = translator_of(run, seed)
        found = score_translations(translate(translator, source), target)
        assert found.bleu == last["bleu"][seed]


# --- going on ---


def test_extended_is_bit_identical(text, straight, tmp_path):
    """From 8 batches to 12: the third update is half gathered at 8, and an epoch half done."""
    train_run(run_task(text, train={"steps": 8}), tmp_path)
    train_run(run_task(text), tmp_path, resume=True)
    assert_bits_equal(*(load_states(folder)[1][12] for folder in (tmp_path, straight[1])))
    for name in ("metrics.jsonl", "validation.jsonl", "subwords.model", "config.json"):
        assert (tmp_path / name).read_bytes() == (straight[1] / name).read_bytes(), name
    first, second = read_lines(tmp_path / "timing.jsonl")
    assert (first["to_step"], second["from_step"], second["to_step"]) == (8, 8, 12)


@pytest.fixture
def copied(straight, tmp_path):
    """A finished run that a test may spoil."""
    return shutil.copytree(straight[1], tmp_path / "run")


def test_resuming_a_finished_run_keeps_it(text, straight, copied):
    before = contents(copied)
    again = train_run(run_task(text), copied, resume=True)
    assert again.steps_per_second is None
    assert_bits_equal(again.params, straight[0].params)
    changed = {path.name for path, old in before.items() if path.read_bytes() != old}
    assert changed <= {"lock"}


def test_subwords_that_were_lost_are_learned_again(text, straight, copied):
    (copied / "subwords.model").unlink()
    run = load_run(copied)
    with pytest.raises(ValueError, match=r"subwords.model cannot be read: No such file"):
        translator_of(run)
    train_run(run_task(text), copied, resume=True)
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


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (changed_word, {}, r"holds a run of another configuration: text_sha256.training was '"),
        (changed_validation, {}, r"another configuration: text_sha256.validation was '"),
        (None, {"train": {"learning_rate": 0.5}}, r"train.learning_rate was 0.02, now 0.5. Resume"),
        (None, {"vocabulary_size": 390}, r"vocabulary_size was 400, now 390"),
        (None, {"patience": 2}, r"patience was None, now 2"),
        (damaged_subwords, {}, r"subwords.model is damaged: model must be a sentencepiece model"),
        (other_subwords, {}, r"other data: subwords_sha256 has changed since"),
    ],
)
def test_a_run_does_not_go_on_as_another(copied, tmp_path, text, change, settings, message):
    # Under its own name: the files' names are settings, too.
    saved = contents(text)
    try:
        if change is not None:
            change(text, copied)
        before = contents(copied)
        with pytest.raises(ValueError, match=message) as raised:
            train_run(run_task(text, **settings), copied, resume=True)
        assert "\n" not in str(raised.value)
        assert contents(copied) == before
    finally:
        for path, content in saved.items():
            path.write_bytes(content)


# --- loading ---


def test_folders_that_hold_no_translator(copied, tmp_path):
    with pytest.raises(ValueError, match=r"nowhere has no config.json"):
        load_run(tmp_path / "nowhere")
    run = load_run(copied)
    other_subwords(None, copied)
    with pytest.raises(ValueError, match=r"run learned from other data: subwords_sha256"):
        translator_of(run)
    for use in (
        lambda: run.task.examples(copied),
        lambda: run.task.answers(run.params_of(0), ["Ja ."], folder=copied),
        lambda: run.task.validate(run.params, copied),
    ):
        with pytest.raises(ValueError, match=r"run learned from other data: subwords_sha256"):
            use()
    damaged_subwords(None, copied)
    with pytest.raises(ValueError, match=r"subwords.model is damaged: model must be a"):
        translator_of(run)
    content = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**content, "model": 3}))
    with pytest.raises(ValueError, match=r"run: config.json is damaged"):
        load_run(copied)
    (copied / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json cannot be read"):
        load_run(copied)


def test_what_cannot_be_averaged_or_loaded(copied):
    for path in (copied / "checkpoints" / "12").rglob("_METADATA"):
        path.write_text("")
    before = contents(copied)
    assert load_run(copied).step == 8
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be used: step 12: "):
        load_run(copied, average=2)
    for options, message in (
        ({"average": 9}, "average must be at most 3, the checkpoints; got 9"),
        ({"average": 2, "step": 8}, "average must be 1 with step 8; got 2"),
        ({"step": 7}, "step must be newest, best or one of 4, 8, 12; got 7"),
    ):
        with pytest.raises(ValueError, match=message):
            load_run(copied, **options)
    assert contents(copied) == before
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match=r"run has no checkpoint yet; train it first"):
        load_run(copied)
