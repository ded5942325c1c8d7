"""scripts/sweep.py: its runs are those of train.py, its numbers those of evaluate.py."""

import contextlib
import csv
import dataclasses
import functools
import json
import os
import shutil
import signal
import statistics
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from command_lines import call, load, users_settings
from matplotlib.image import imread
from stand_in_training import scaled, without_training
from user_tasks import Rotate

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.evaluation import Accuracies
from attention_jax.tasks.reversal import Reversal
from attention_jax.training import run as training
from attention_jax.training.identity import config_of, task_in
from attention_jax.training.records import Records
from attention_jax.training.run import load_run
from attention_jax.training.step import TrainState

sweep = load("scripts/sweep.py")
TINY = ["--hidden-dim", 7, "--batch-size", 5, "--max-length", 3, "--seeds", 2]
TINY += ["--encoder-layers", 0, "--no-decoder-self-attention"]
SHORT = [*TINY, "--steps", 4, "--log-every", 2, "--checkpoint-every", 2]
COMBINATIONS = ["--scores", "dot", "scaled", "--set", "model.dim=4"]
NAMES = ["dot,dim=4", "scaled,dim=4"]


@pytest.fixture
def run(command):
    return functools.partial(command, "sweep")


@contextlib.contextmanager
def stand_in(steps, signals):
    """Training that learns nothing: the loss is the step.

    It adds the first and the last step of each run to a list, and sends each signal in one call.
    """

    def advance(compiled, state, step, *arguments):
        if signals:
            os.kill(os.getpid(), signals.pop())
        return scaled(compiled, state, step, *arguments)

    def end(records, *ends):
        steps.append(ends)
        return ended(records, *ends)

    ended = Records.end
    with without_training(advance), mock.patch.object(Records, "end", end):
        yield


def numbers(task, seed, _params):
    """Stands for a model: one number for each seed, which depends on the score."""
    params = {"size": jnp.float32(seed + len(task.model.score))}
    return TrainState(0 * seed, seed, params, ())


def shares(_task, params, lengths):
    """Stands for answering with it."""
    return {n: Accuracies(*[params["size"] / (params["size"] + n)] * 3) for n in lengths}


@pytest.fixture(scope="module", autouse=True)
def _without_models():
    with (
        mock.patch("attention_jax.training.step._first_state", numbers),
        mock.patch("attention_jax.training.step.Compiled.trace", return_value=None),
        mock.patch("attention_jax.tasks.sequences.accuracies", shares),
    ):
        yield


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The folder of a finished sweep of two scores."""
    folder = tmp_path_factory.mktemp("finished") / "sweep"
    with pytest.MonkeyPatch.context() as patch, users_settings(), stand_in([], []):
        assert call(sweep, *COMBINATIONS, "--workdir", folder, *SHORT, monkeypatch=patch) == 0
    return folder


def records(folder):
    return json.loads((folder / "table.json").read_text())["results"]


def table(folder):
    with (folder / "table.csv").open() as file:
        return list(csv.DictReader(file))


# --- the numbers ---


def test_runs_are_those_of_train_and_numbers_those_of_evaluate(
    workdir, tmp_path, command, monkeypatch
):
    folder, out = workdir / NAMES[0], tmp_path / "accuracy.json"
    of_train = mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(training, "prepare", of_train)
    command("train", "--workdir", "alone", "--score", "dot", "--dim", 4, *SHORT)
    assert of_train.call_args.args[0] == task_in(folder)
    assert command("evaluate", "--workdir", folder, "--lengths", 3, "--out", out)[0] == 0
    expected = {
        "exact match (%)": json.loads(out.read_text())["results"]["exact match, length 3 (%)"],
        "training loss": read_lines(folder / "metrics.jsonl")[-1]["loss"],
    }
    measured = {
        record["metric"]: pytest.approx(record["by_seed"])
        for record in records(workdir)
        if record["settings"] == {"score": "dot"}
    }
    assert expected == measured


def test_csv_json_and_figure_agree(workdir):
    rows, of_json = table(workdir), records(workdir)
    assert [row["run"] for row in rows] == [str(workdir / name) for name in NAMES]
    assert len(of_json) == 2 * len(rows)
    for record in of_json:
        (row,) = (row for row in rows if row["run"] == record["run"])
        assert record["settings"] == {"score": row["score"]}
        name, values = record["metric"], record["by_seed"]
        worst = (min if name == "exact match (%)" else max)(values)
        expected = statistics.mean(values), statistics.stdev(values), worst
        for part, number in zip(("mean", "deviation", "worst"), expected, strict=True):
            assert float(row[f"{name} {part}"]) == record[part] == pytest.approx(number)
        for end in ("low", "high"):
            assert float(row[f"{name} {end}"]) == record[end]
        assert 0 <= record["low"] <= record["mean"] <= record["high"]
        assert int(row["step"]) == int(row["steps"]) == record["step"] == 4
        assert float(row["seconds"]) == record["seconds"] > 0
    environments = json.loads((workdir / "table.json").read_text())["environments"]
    assert environments.keys() == {row["run"] for row in rows}
    assert imread(workdir / "sweep.png").std() > 0


def test_the_same_command_trains_nothing_and_adds_lengths(workdir, run, monkeypatch):
    def accuracies(task, params, lengths):
        return {length: Accuracies(*np.full((3, 2), length / 8)) for length in lengths}

    monkeypatch.setattr("attention_jax.tasks.sequences.accuracies", accuracies)
    monkeypatch.setattr(training, "run", None)
    arguments = ["--set", "dim=4", "--workdir", workdir, *SHORT]
    status, out, _ = run("--scores", "scaled", *arguments, "--lengths", 5)
    assert status == 0
    assert "combination 1 of 1: scaled, dim 4: finished" in out
    assert "exact match, length 5 (%)" in out
    rows = table(workdir)
    assert [row["run"] for row in rows] == [str(workdir / name) for name in reversed(NAMES)]
    assert [row["exact match, length 5 (%) mean"] for row in rows] == ["62.5", "62.5"]


# --- what is trained ---


@pytest.fixture
def trained(monkeypatch):
    """Trains and evaluates by stand-ins; returns the lists of steps and of signals."""
    steps, signals = [], []
    monkeypatch.setattr(Reversal, "evaluate", lambda *_, **__: {})
    with stand_in(steps, signals):
        yield steps, signals


CONSTANT = ["--log-every", 2, "--checkpoint-every", 2, "--schedule", "constant"]


def test_more_steps_are_trained_where_the_schedule_allows_it(tmp_path, run, trained):
    options = ["--workdir", tmp_path, *TINY, *CONSTANT]

    def steps_and_losses(steps, *scores):
        """Of each run in the table of a sweep of so many steps."""
        run("--scores", *scores, "--steps", steps, *options)
        losses = {record["run"]: record["by_seed"] for record in records(tmp_path)}
        return [(row["steps"], *losses[row["run"]]) for row in table(tmp_path)]

    at_4, at_8 = ("4", 4.0, 4.0), ("8", 8.0, 8.0)
    assert steps_and_losses(4, "dot") == [at_4]
    assert steps_and_losses(8, "scaled") == [at_8, at_4]
    assert {record["settings"]["steps"] for record in records(tmp_path)} == {4, 8}
    assert steps_and_losses(8, "dot", "scaled") == [at_8, at_8]
    assert trained[0] == [(0, 4), (0, 8), (4, 8)]  # nothing twice
    trained[1].append(signal.SIGTERM)
    run("--scores", "dot", "--steps", 12, *options)
    status, out, _ = run("--table", tmp_path / "dot", tmp_path / "scaled")
    assert (status, "10 of 12" in out, "8 of 8" in out) == (0, True, True)
    assert [(row["step"], row["steps"]) for row in table(tmp_path)] == [("10", "12"), ("8", "8")]


def test_settings_that_change_no_bit_may_change_in_a_finished_sweep(tmp_path, run, trained):
    arguments = ["--scores", "dot", "--set", "dim=4", "--workdir", tmp_path, *SHORT]
    assert run(*arguments)[0] == 0
    status, out, _ = run(*arguments, "--keep", 5)
    assert (status, "finished" in out) == (0, False)  # its config.json says so
    assert task_in(tmp_path / NAMES[0]).train.keep == 5
    assert run(*arguments, "--keep", 5)[1].count(": finished\n") == 1
    assert trained[0] == [(0, 4), (4, 4)]  # nothing twice


def test_an_interrupted_sweep_goes_on(tmp_path, run, trained, monkeypatch):
    arguments = [*COMBINATIONS, "--workdir", tmp_path, *SHORT]
    steps, signals = trained

    def load_and_signal(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)  # between two runs
        return load_run(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training, "load_run", load_and_signal)
        status, _, err = run(*arguments)
    assert (status, "the same command goes on from here" in err) == (143, True)
    assert steps == []
    signals.append(signal.SIGINT)
    status, out, err = run(*arguments)
    assert (status, "the same command goes on from here" in err) == (130, True)
    assert "combination 1 of 2: dot, dim 4\n" in out
    assert not (tmp_path / "table.csv").exists()
    assert run(*arguments)[0] == 0
    assert steps == [(0, 2), (2, 4), (0, 4)]
    assert run(*arguments)[1].count(": finished\n") == 2


def test_the_last_part_makes_the_table_of_all(tmp_path, run, trained):
    arguments = [*COMBINATIONS, "--workdir", tmp_path, *SHORT]
    (tmp_path / NAMES[0]).mkdir()  # another process has begun it
    for part, names in (("2/2", NAMES[1:]), ("1/2", NAMES)):
        status, out, _ = run(*arguments, "--part", part)
        missing = 2 - len(names)
        expected = f"part {part}: {missing} of 2 combinations are missing"
        assert (status, expected in out) == (0, True)
        table = (tmp_path / "table.csv").read_text()
        assert [line["run"] for line in csv.DictReader(table.splitlines())] == [
            str(tmp_path / name) for name in names
        ]
    steps, _ = trained
    assert steps == [(0, 4), (0, 4)]
    assert run(*arguments)[0] == 0
    assert (tmp_path / "table.csv").read_text() == table


# --- combinations ---


@pytest.fixture
def settings(tmp_path):
    """The settings of each combination for the values of --set and other options."""

    def of(*values, common=(), task="reversal"):
        arguments = sweep.Arguments(("dot",), values, tmp_path, task)
        made = arguments.with_other_options([*common]).combinations
        return [of_train.task for of_train in made.values()]

    return of


def test_settings_are_parsed_like_options(settings):
    values = ["model.dim=16,8", "decoder-self-attention=true,False", "train.steps=3"]
    tasks = settings(*values, common=["--seeds", "3", "--norm", "post"])
    models = [task.model for task in tasks]
    of_two = [(model.dim, model.decoder_self_attention) for model in models]
    assert of_two == [(16, True), (16, False), (8, True), (8, False)]
    assert {(task.train.steps, task.train.seeds) for task in tasks} == {(3, 3)}
    assert {model.norm for model in models} == {"post"}
    tasks = settings(
        "num_key_heads=None,1", "normalizer=softmax,log_scaled(normalizer=entmax,start=8)"
    )
    assert [task.model.num_key_heads for task in tasks] == [None, None, 1, 1]
    assert tasks[1].model.normalizer == "log_scaled(normalizer=entmax,start=8)"
    tasks = settings("by=1,2", common=["--dim", "8"], task="user_tasks:Rotate")
    assert [(type(task), task.by) for task in tasks] == [(Rotate, 1), (Rotate, 2)]


def test_folders_are_safe_distinct_and_independent_of_the_order(tmp_path):
    values = {"dim": 8, "positions": "learned"}
    texts = ["additive", "additive(a=1)", "additive(a=2)", "additive[a=1]", "a:b", "../b"]
    texts.append("." * 300)
    names = [sweep.folder_name(text, values) for text in texts]
    assert len(set(names)) == len(texts)
    for name in names:
        assert len(name) <= 100
        assert not set(name) & set(" /:()[]*$'\"")
        assert not name.startswith((".", "-"))

    def folders(*settings):
        made = sweep.Arguments(("dot",), settings, tmp_path).with_other_options([]).combinations
        return {of_train.workdir.name for of_train in made.values()}

    assert folders("dim=8", "learning_rate=1e-3") == folders("learning_rate=0.001", "dim=8")
    assert folders("dim=8") == {"dot,dim=8"}


# --- mistakes ---


def test_a_combination_of_another_configuration_stops_all(workdir, run):
    arguments = ["--scores", "cosine", "scaled", "--set", "dim=4", "--workdir", workdir]
    status, _, err = run(*arguments, *SHORT, "--learning-rate", 0.01)
    assert status == 2
    assert "learning_rate was 0.003, now 0.01" in err
    assert not (workdir / "cosine,dim=4").exists()
    status, _, err = run("--scores", "dot", "--workdir", workdir / NAMES[0], *SHORT)
    assert (status, "is the folder of one run" in err) == (2, True)


# --- the table of runs that exist ---


def test_table_of_mixed_runs(workdir, tmp_path, run):
    task, other, unfinished = task_in(workdir / NAMES[0]), tmp_path / "by_hand", tmp_path / "longer"
    for copy, changes in ((other, {"batch_size": 3}), (unfinished, {"steps": 6})):
        shutil.copytree(workdir / NAMES[0], copy)
        changed = dataclasses.replace(task, train=dataclasses.replace(task.train, **changes))
        (copy / "config.json").write_text(json.dumps(config_of(changed)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    runs = [other, tmp_path / "empty", tmp_path / "file", unfinished, workdir / NAMES[1]]
    status, out, err = run("--table", *runs)
    assert status == 0
    warnings = err.splitlines()
    for path, warning in zip(runs[1:3], warnings, strict=True):
        assert warning.startswith("warning: left out of the table: ")
        assert str(path) in warning
    rows = table(tmp_path)
    assert [row["run"] for row in rows] == [*map(str, (other, unfinished, workdir / NAMES[1]))]
    varying = [(row["score"], row["batch_size"], row["step"], row["steps"]) for row in rows]
    assert varying == [("dot", "3", "4", "4"), ("dot", "5", "4", "6"), ("scaled", "5", "4", "4")]
    assert "learning_rate" not in rows[0]
    assert str(tmp_path / "sweep.png") in out
    # A seed that diverged has no number.
    (other / "metrics.jsonl").write_text('{"step": 4, "loss": [7.0, null]}\n')
    assert run("--table", other)[0] == 0
    assert records(tmp_path)[1]["by_seed"] == [7.0, None]
    assert records(tmp_path)[1]["mean"] is None


def test_runs_of_the_same_settings_are_told_apart_by_their_folders(workdir, tmp_path, run):
    copy = tmp_path / "copy"
    copy.symlink_to(workdir / NAMES[0])
    status, out, _ = run("--table", copy, workdir / NAMES[0], "--workdir", tmp_path / "table")
    assert status == 0
    assert str(copy) in out
    assert len({json.dumps(r["settings"]) for r in records(tmp_path / "table")}) == 2


def test_other_seeds_are_reported_than_those_that_choose(workdir, tmp_path, run):
    figure = tmp_path / "new" / "figure.svg"
    words = ["--table", *(workdir / name for name in NAMES), "--workdir", tmp_path]
    status, out, _ = run(*words, "--choose-on", 1, "--figure", figure)
    assert (status, "dot *" in out, figure.read_bytes()[:5]) == (0, True, b"<?xml")
    assert all(record["mean"] == record["by_seed"][1] for record in records(tmp_path))
    for name in ("table.md", "table.tex"):
        assert str(tmp_path / name) in out
        assert "n = 1 seed" in (tmp_path / name).read_text()
