"""train.py, evaluate.py, translate.py and answers.py, where the task is translation."""

import gzip
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from translation_cases import VOCABULARY_SIZE, lines_of, say_always, write_text

from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.translate import (
    Search,
    longest_answer,
    score_translations,
    translate,
    translator_of,
)
from attention_jax.training.run import load_run
from attention_jax.training.settings import settings_of

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
NOT_UTF8 = ["--validation-source", "latin.de", "--validation-target", "train.en"]


def run(folder, script, *arguments, stdin=b"", **env):
    """A script in a process of its own: (exit status, output, errors)."""
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        input=stdin,
        capture_output=True,
        timeout=600,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with files, good and bad, and runs; and what training printed."""
    folder = write_text(tmp_path_factory.mktemp("here"))
    german = (folder / "train.de").read_text(encoding="utf-8")
    (folder / "short.en").write_text("".join(f"{line}\n" for line in lines_of("train", "en")[1:]))
    (folder / "latin.de").write_bytes(b"Ja .\n" + "Der B\xe4r .\n".encode("latin-1") * 28)
    (folder / "empty.de").write_bytes(b"")
    (folder / "blank.de").write_bytes(b"\n" * 29)
    (folder / "plain.de.gz").write_text(german)
    (folder / "zipped.de.gz").write_bytes(gzip.compress(german.encode()))
    (folder / "reversal").mkdir()
    (folder / "reversal" / "config.json").write_text(json.dumps(settings_of(Reversal())))
    arguments = [*TASK, "--workdir", "run", *FILES, *SIZE, *VALIDATION, *TINY]
    return folder, run(folder, "train", *arguments)


def test_training(trained):
    folder, (status, out, err) = trained
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert re.match(r"additive: 29 pairs of sentences; \d+ batches per epoch", lines[0])
    for step in (2, 4):
        found = [line for line in lines if f"step {step}, validation: loss " in line]
        assert len(found) == 1
        assert re.search(r"negative_log_likelihood [\d.]+, bleu [\d.e-]+$", found[0])
    assert re.match(r"run: step 4 of 4, 2 seeds, \d+ s", lines[-1])
    content = json.loads((folder / "run" / "config.json").read_text())
    assert content["task"] == "attention_jax.tasks:Translation"
    assert content["model"]["score"] == "additive"
    assert content["validation_source"] == "validation.de"


@pytest.fixture(scope="module")
def talkative(trained, tmp_path_factory):
    """A folder with a run of which step 6 says ä, as often as it may."""
    folder = tmp_path_factory.mktemp("talkative")
    shutil.copytree(trained[0] / "run", folder / "run")
    say_always(folder / "run", "ä")
    return folder


SENTENCES = "Ja\n\n  Já  ☃\r\n".encode()
# What translate.py ends with on stderr.
SPEED = r"\d+ sentences in [\d.]+ s, [\d.]+ sentences/s, compilation included\n"
ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_translation_of_standard_input_whatever_the_locale(talkative):
    arguments = ["--workdir", "run", "--beams", "1"]
    status, out, err = run(talkative, "translate", *arguments, stdin=SENTENCES, **ASCII_ONLY)
    assert status == 0
    assert re.fullmatch(SPEED, err)
    assert err.startswith("3 sentences in ")
    first, second, third = out.removesuffix("\n").split("\n")
    assert first.replace(" ", "") == "ä" * longest_answer(8)
    assert second == ""
    assert set(third) == set(first)


# --- in this process ---


@pytest.fixture
def script(monkeypatch, capfd):
    """Runs a script: (exit status, output, errors)."""
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("COLUMNS", "200")

    def called(folder, name, *arguments, stdin=b""):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exited:
            runpy.run_path(str(ROOT / "scripts" / f"{name}.py"), run_name="__main__")
        return exited.value.code or 0, *capfd.readouterr()

    return called


def test_evaluation_and_scores_of_a_text(trained, script):
    folder, _ = trained
    status, out, err = script(folder, "evaluate", "--workdir", "run")
    assert (status, err) == (0, "")
    assert "best validation BLEU" in out
    arguments = ["--workdir", "run", *VALIDATED, "--average", "2"]
    status, out, err = script(folder, "translate", *arguments)
    assert (status, out.count("\n")) == (0, 4)
    source, target = (lines_of("validation", side) for side in ("de", "en"))
    translator = translator_of(load_run(folder / "run", average=2))
    found = score_translations(translate(translator, source, Search(beams=4)), target)
    assert f"BLEU {found.bleu:.2f} (nrefs:1|case:mixed" in err
    assert f"chrF {found.chrf:.2f} (nrefs:1|" in err


@pytest.mark.slow
def test_files_to_files(trained, script):
    folder, _ = trained
    status, out, err = script(
        folder, "translate", "--workdir", "run", "--source", "zipped.de.gz", "--out", "found.en",
        "--step", "2", "--seed-index", "1", "--beams", "2", "--length-penalty", "0.5",
    )  # fmt: skip
    assert (status, out) == (0, "")
    assert re.fullmatch(SPEED, err)
    found = (folder / "found.en").read_bytes().decode().split("\n")
    (folder / "found.en").unlink()
    translator = translator_of(load_run(folder / "run", 2), 1)
    search = Search(beams=2, length_penalty=0.5)
    assert found == [*translate(translator, lines_of("train", "de"), search), ""]


def test_answers_are_translations(trained, script, tmp_path):
    folder, _ = trained
    files = ["--figure", str(tmp_path / "a.png"), "--html", str(tmp_path / "a.html")]
    arguments = ["--workdir", "run", "--inputs", "Ja .", "Nein .", *files]
    status, out, err = script(folder, "answers", *arguments)
    assert (status, err) == (0, "")
    translator = translator_of(load_run(folder / "run"))
    for line, sentence in zip(out.splitlines(), ("Ja .", "Nein ."), strict=False):
        assert line.startswith(f"{sentence} -> ")
    assert translate(translator, ["Ja ."])[0] in out
    assert {path.name for path in tmp_path.iterdir()} >= {"a.png", "a.html"}


def test_nothing_in_nothing_out(trained, script):
    assert script(trained[0], "translate", "--workdir", "run") == (0, "", "")


@pytest.mark.parametrize(
    ("event", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "stopped after 0 of 2 sentences"),
        (BrokenPipeError(), 141, ""),  # as `| head` does
        (OSError(28, "No space left on device"), 2, "error: standard output"),
    ],
)
def test_what_stops_it_on_the_way(trained, script, monkeypatch, event, status, message):
    stopped = mock.Mock(side_effect=event)
    monkeypatch.setattr("attention_jax.tasks.translation.translate.translate", stopped)
    found = script(trained[0], "translate", "--workdir", "run", stdin=b"Ja\nNein\n")
    assert found[:2] == (status, "")
    assert found[2].startswith(message)


def test_help_is_that_of_the_task(trained, script):
    for words, expected, absent in (
        ([], "--batch-size", "--source PATH"),
        (TASK, "--patience", "--min-length"),
        (["--task", "user_tasks:Rotate"], "--by", "--letters"),
    ):
        status, out, err = script(trained[0], "train", *words, "--help")
        assert (status, err) == (0, "")
        assert expected in out
        assert absent not in out


TRAIN = ["train", *TASK, "--workdir", "new"]
AGAIN = ["train", *TASK, "--workdir", "run", "--resume", *FILES, *SIZE, *VALIDATION, *TINY]
TRANSLATE = ["translate", "--workdir", "run", "--out", "new"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([*TRAIN, "--source", "train.de", "--target", "short.en"], "short.en"),
        ([*TRAIN, "--source", "no.de", "--target", "train.en"], "no.de"),
        ([*TRAIN, "--source", "empty.de", "--target", "train.en"], "empty.de"),
        ([*TRAIN, "--source", "blank.de", "--target", "train.en"], "blank.de"),
        ([*TRAIN, "--source", "plain.de.gz", "--target", "train.en"], "plain.de.gz"),
        ([*TRAIN, *FILES, *NOT_UTF8], "latin.de"),
        ([*TRAIN, *FILES], "vocabulary_size"),
        ([*TRAIN, *FILES, *SIZE, "--max-tokens", "2"], "max_tokens"),
        ([*TRAIN, *FILES, "--validation-source", "train.de"], "validation_target"),
        ([*TRAIN, *FILES, "--patience", "3"], "patience"),
        ([*TRAIN, "--source", "train.de"], "--target"),
        ([*TRAIN, *FILES, "--min-length", "3"], "--min-length"),
        (["train", "--workdir", "new", *FILES], "--source"),
        (["train", *TASK, "--workdir", "run", *FILES, *SIZE], "--resume"),
        ([*AGAIN, "--steps", "3"], "steps"),
        ([*AGAIN, "--clip-norm", "2"], "clip_norm"),
        (["translate", "--workdir", "no"], "workdir"),
        (["translate", "--workdir", "reversal"], "workdir reversal"),
        ([*TRANSLATE, "--source", "latin.de"], "latin.de"),
        ([*TRANSLATE, "--source", "train.de", "--reference", "short.en"], "short.en"),
        (TRANSLATE, "standard input"),
        ([*TRANSLATE, "--step", "3"], "step"),
        ([*TRANSLATE, "--average", "3"], "average"),
        ([*TRANSLATE, "--seed-index", "2"], "seed_index"),
        ([*TRANSLATE, "--beams", "0"], "beams"),
        ([*TRANSLATE, "--length-penalty", "-1"], "length_penalty"),
        (["translate", "--workdir", "run", "--out", "no/new"], "out"),
        (["answers", "--workdir", "run", "--inputs", " "], "sentence"),
        (["evaluate", "--workdir", "run", "--lengths", "3"], "lengths"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(trained, script, arguments, named):
    folder, _ = trained

    def kept():
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    before = kept()
    status, out, err = script(folder, *arguments, stdin=b"Ja\n\xff\n")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert named in err
    assert kept() == before


def test_a_mistake_in_a_process_of_its_own(trained):
    """What libraries in C++ print goes past Python."""
    status, out, err = run(trained[0], *TRAIN, *FILES, "--vocabulary-size", "9999")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: vocabulary_size")
    assert not (trained[0] / "new").exists()
