"""train.py, evaluate.py, translate.py and answers.py, where the task is translation."""

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from command_lines import call, check_error, load, users_settings
from saved_files import assert_bits_equal, snapshot
from stand_in_training import without_training
from translation_cases import VOCABULARY_SIZE, lines_of, say_always, write_text

from attention_jax.tasks.pages import cross_attention
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.translate import (
    Search,
    longest_answer,
    score_translations,
    translate,
    translator_of,
)
from attention_jax.training.identity import config_of
from attention_jax.training.run import load_run

ROOT = Path(__file__).parents[2]
TASK = ["--task", "translation"]
FILES = ["--source", "train.de", "--target", "train.en"]
SIZE = ["--vocabulary-size", str(VOCABULARY_SIZE)]
VALIDATION = ["--validation-source", "validation.de", "--validation-target", "validation.en"]
TINY = [
    "--score=additive", "--num-heads=1", "--dim=8", "--hidden-dim=13", "--encoder-layers=0",
    "--decoder-layers=1", "--no-decoder-self-attention", "--dropout-rate=0", "--buckets=1",
    "--batch-tokens=300", "--warmup-steps=3", "--seeds=2", "--steps=4", "--log-every=2",
    "--checkpoint-every=2",
]  # fmt: skip
VALIDATED = ["--source", "validation.de", "--reference", "validation.en"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with files, good and bad, and a run of two seeds."""
    folder = write_text(tmp_path_factory.mktemp("here"))
    (folder / "short.en").write_text("".join(f"{line}\n" for line in lines_of("train", "en")[1:]))
    (folder / "latin.de").write_bytes(b"Ja .\n" + "Der B\xe4r .\n".encode("latin-1") * 28)
    (folder / "zipped.de.gz").write_bytes(gzip.compress((folder / "train.de").read_bytes()))
    (folder / "reversal").mkdir()
    (folder / "reversal" / "config.json").write_text(json.dumps(config_of(Reversal())))
    arguments = [*TASK, "--workdir", "run", *FILES, *SIZE, *VALIDATION, *TINY]
    bleu = iter([[2 / 3, 9.0], [4 / 3, 9.0]])  # at the two checkpoints
    with pytest.MonkeyPatch.context() as patch, users_settings(), contextlib.ExitStack() as stack:
        patch.chdir(folder)
        patch.setattr(Translation, "validate", lambda *_: {"loss": [2.0, 3.0], "bleu": next(bleu)})
        stack.enter_context(without_training())
        assert call(load("scripts/train.py"), *arguments, monkeypatch=patch) == 0
    return folder


@pytest.fixture(autouse=True)
def _in_its_folder(trained, monkeypatch):
    monkeypatch.chdir(trained)


# What translate.py begins and ends with on stderr.
MODEL = r"translation additive: step (\d) of 4, seed (\d)\n"
SPEED = MODEL + r"(\d+) sentences in [\d.]+ s, [\d.]+ sentences/s, compilation included\n"


@pytest.fixture(scope="module")
def talkative(trained, tmp_path_factory):
    """The folder of a run whose step 6 says ä, as often as it may."""
    folder = shutil.copytree(trained / "run", tmp_path_factory.mktemp("talkative") / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(trained)  # where its text is
        say_always(folder, "ä")
    return folder


def check_sentences(status, out, err):
    assert status == 0
    assert re.fullmatch(SPEED, err)[3] == "3"
    first, second, third = out.removesuffix("\n").split("\n")
    assert first.replace(" ", "") == "ä" * longest_answer(8)
    assert second == ""
    assert set(third) == set(first)


SENTENCES = "Ja\n\n  Já  ☃\r\n".encode()


def test_translation_of_standard_input(talkative, command):
    words = ["--workdir", talkative, "--beams", 1]
    check_sentences(*command("translate", *words, stdin=SENTENCES))


@pytest.mark.slow
def test_translation_in_a_locale_without_utf_8(talkative):
    words = [sys.executable, ROOT / "scripts" / "translate.py", "--workdir", talkative]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [*words, "--beams", "1"], env={**os.environ, "PYTHONPATH": str(ROOT), **ascii_only},
        input=SENTENCES, capture_output=True, timeout=600,
    )  # fmt: skip
    check_sentences(done.returncode, done.stdout.decode(), done.stderr.decode())


def test_the_results_are_those_of_the_parameters(command, tmp_path, monkeypatch):
    """validation.jsonl has those of other steps."""
    seen, out = [], tmp_path / "results.json"
    line = {"loss": [1.5, 1.25], "negative_log_likelihood": [1.0, 1.0], "bleu": [3.0, 4.0]}
    monkeypatch.setattr(Translation, "validate", lambda *given: seen.append(given) or line)
    words = ["--workdir", "run", "--step", 0, "--out", out]
    assert command("evaluate", *words)[::2] == (0, "")
    results = {"validation loss": line["loss"], "validation BLEU": line["bleu"]}
    assert json.loads(out.read_text()) == {"workdir": "run", "step": 0, "results": results}
    ((_, params, folder),) = seen
    assert folder == Path("run")
    assert_bits_equal(params, load_run("run", 0).params)


def test_scores_of_a_text(command):
    arguments = ["--workdir", "run", *VALIDATED]
    status, out, err = command("translate", *arguments)
    assert (status, out.count("\n")) == (0, 4)
    found = score_translations(out.splitlines(), lines_of("validation", "en"))
    assert f"BLEU {found.bleu:.2f} (nrefs:1|case:mixed" in err
    assert f"chrF {found.chrf:.2f} (nrefs:1|" in err


@pytest.mark.slow
def test_files_to_files(command):
    status, out, err = command(
        "translate", "--workdir", "run", "--source", "zipped.de.gz", "--out", "found.en",
        "--step", "2", "--seed-index", "1", "--beams", "2", "--length-penalty", "0.5",
    )  # fmt: skip
    assert (status, out) == (0, "")
    assert re.fullmatch(SPEED, err).groups()[:2] == ("2", "1")
    found = Path("found.en").read_bytes().decode().split("\n")
    Path("found.en").unlink()
    translator = translator_of(load_run(Path("run"), 2), 1)
    search = Search(beams=2, length_penalty=0.5)
    assert found == [*translate(translator, lines_of("train", "de"), search), ""]


def test_answers_are_translations_and_their_titles_do_not_touch(command, talkative, monkeypatch):
    figures, sentences = [], ("Ja .", "Nein .")

    def narrow_panels_with_long_titles(*arguments):
        return {
            12 * title: (weights[:2, :3], rows[:2], columns[:3])
            for title, (weights, rows, columns) in cross_attention(*arguments).items()
        }

    answers = load("scripts/answers.py")
    monkeypatch.setattr(answers, "cross_attention", narrow_panels_with_long_titles)
    monkeypatch.setattr("attention_jax.reports.plotting.save", lambda *each: figures.append(each))
    status, out, err = command("answers", "--workdir", talkative, "--inputs", *sentences)
    assert status == 0
    assert re.fullmatch(MODEL, err)
    for line, sentence in zip(out.splitlines(), sentences, strict=False):
        assert re.match(rf"{sentence} -> ä[ ä]+", line)
    ((figure, _),) = figures
    figure.canvas.draw()
    *axes, color_bar = figure.axes
    first, second = (each.title.get_window_extent() for each in axes)
    assert 0 < first.x0 < first.x1 < second.x0 < second.x1 < color_bar.get_window_extent().x0


def test_nothing_in_nothing_out(command):
    status, out, err = command("translate", "--workdir", "run")
    assert (status, out) == (0, "")
    assert re.fullmatch(MODEL, err)


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped after 0 of 2 sentences"),
        (BrokenPipeError(), 141, ""),  # as `| head` does
        (OSError(28, "No space left on device"), 2, "error: standard output"),
    ],
)
def test_what_stops_it_on_the_way(command, monkeypatch, event, status, message):
    stopped = mock.Mock(side_effect=event)
    monkeypatch.setattr(load("scripts/translate.py"), "translate", stopped)
    found = command("translate", "--workdir", "run", stdin=b"Ja\nNein\n")
    assert found[:2] == (status, "")
    assert message in found[2]


def test_help_is_that_of_the_task(command):
    for words, expected, absent in (
        ([], "(default: 2500)", "--source PATH"),
        (TASK, "--dtype", "--min-length"),
        (["--task", "user_tasks:Rotate"], "--by", "--letters"),
    ):
        status, out, err = command("train", *words, "--help")
        assert (status, err) == (0, "")
        assert expected in out
        assert absent not in out


TRAIN = ["train", *TASK, "--workdir", "new"]
TRANSLATE = ["translate", "--workdir", "run", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*TRAIN, "--source", "train.de", "--target", "short.en"], "short.en"),
        ([*TRAIN, *FILES], "vocabulary_size"),
        ([*TRAIN, *FILES, "--validation-source", "train.de"], "validation_target"),
        ([*TRAIN, "--source", "train.de"], "--target"),
        (["translate", "--workdir", "reversal"], "workdir reversal"),
        ([*TRANSLATE, "--source", "latin.de"], "latin.de"),
        ([*TRANSLATE, "--source", "train.de", "--reference", "short.en"], "short.en"),
        (TRANSLATE, "standard input"),
        ([*TRANSLATE, "--step", "3"], "step"),
        ([*TRANSLATE, "--seed-index", "2"], "seed_index"),
        (["translate", "--workdir", "run", "--out", "no/new"], "out"),
        (["answers", "--workdir", "run", "--inputs", " "], "sentence"),
        (["evaluate", "--workdir", "run", "--lengths", "3"], "lengths"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(command, arguments, named):
    before = snapshot(Path())
    check_error(command(*arguments, stdin=b"Ja\n\xff\n"), named)
    assert snapshot(Path()) == before
