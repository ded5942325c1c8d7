"""Loggers get every line of a run, change no number of it, and cannot stop it."""

import gzip
import json
import os
import signal
import struct
import sys
import types

import pytest
import wandb
from command_lines import check_error
from saved_files import assert_bits_equal, without_speed
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy_task import Toy, toy, train_toy
from wandb.proto.wandb_internal_pb2 import Record

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.loggers import get_logger
from attention_jax.runs.metrics_file import read_lines
from attention_jax.training.task import Validation

FILES = {"metrics": "", "validation": "validation/", "gradients": "gradients/"}
LENGTH = {"steps": 6, "log_every": 2, "checkpoint_every": 2}


class Validated(Toy):
    """Has lines in all three files."""

    validation = Validation("size", False)

    def validate(self, params, folder):
        return {"size": params["w"].sum(axis=1).tolist()}


def lines_of(folder):
    """The lines of a run's files as a logger gets them: {(step, name): a number per seed}."""
    return {
        (line["step"], prefix + name): numbers
        for file, prefix in FILES.items()
        for line in read_lines(folder / f"{file}.jsonl")
        for name, numbers in line.items()
        if name != "step"
    }


@pytest.fixture
def mine(monkeypatch):
    """A module of a user with loggers; `seen` are the calls that they got."""
    module = types.ModuleType("mine_to_log")
    module.seen = []

    class Noted:
        def __init__(self, folder, config):
            module.seen.append((folder.name, config["train"]["steps"]))

        def __call__(self, step, metrics):
            module.seen.append((step, {name: [*numbers] for name, numbers in metrics.items()}))
            for numbers in metrics.values():
                numbers[:] = [0.0] * len(numbers)

        def close(self):
            module.seen.append("closed")

    class NeverOpen:
        def __init__(self, folder, config):
            raise OSError("no network\nat all")

    def failing(step, metrics):
        del metrics["loss"]

    def exiting(step, metrics):
        sys.exit("no room")

    for each in (Noted, NeverOpen, failing, exiting):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_loggers_get_every_line_and_change_no_number(tmp_path, mine, capsys):
    task, options = toy(Validated, **LENGTH), {"log_gradients": 2}
    plain = train_toy(task, tmp_path / "plain", **options)
    words = ("Noted", "failing", "exiting", "NeverOpen", "Noted")
    loggers = [get_logger(f"mine_to_log:{word}") for word in words]
    logged = train_toy(task, tmp_path / "logged", **options, on_metrics=loggers)
    assert_bits_equal(plain.state, logged.state)
    for path in (tmp_path / "plain").glob("[!tel]*.json*"):
        assert without_speed(path) == without_speed(tmp_path / "logged" / path.name)
    assert mine.seen[:2] == 2 * [("logged", 6)]
    assert mine.seen[-2:] == 2 * ["closed"]
    calls = mine.seen[2:-2]
    assert calls[::2] == calls[1::2]
    assert [step for step, _ in calls] == sorted(step for step, _ in calls)
    got = {(step, name): numbers for step, line in calls for name, numbers in line.items()}
    assert got == lines_of(tmp_path / "logged")
    # One warning when a logger fails first, and one at the end.
    warnings = capsys.readouterr().err.splitlines()
    times = 3 * (6 // 2) + 1
    for name, count in (("failing", times - 3), ("exiting", times), ("NeverOpen", 1)):
        of_logger = [line for line in warnings if name in line]
        assert f"failures: {count};" in of_logger[1]
    assert len(warnings) == 6


def stop_at(last_step):
    """A logger that sends one signal, when a step is done; a second would end the process."""

    def stop(step, metrics):
        if (step, "loss" in metrics) == (last_step, True):
            os.kill(os.getpid(), signal.SIGTERM)

    return stop


def test_a_stopped_run_closes_its_loggers(tmp_path, mine):
    run = train_toy(toy(**LENGTH), tmp_path, on_metrics=(mine.Noted, stop_at(2)))
    assert (run.step, run.interrupted, mine.seen[-1]) == (2, 143, "closed")


def read_by_tensorboard(folder):
    """What TensorBoard's own reader gives: {tag: [(step, number), ...]}, and the last config."""
    reader = EventAccumulator(str(folder / "tensorboard")).Reload()
    series = {
        tag: [(event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }
    config = reader.Tensors("config.json")[-1].tensor_proto.string_val[0]
    return series, json.loads(config)


@pytest.mark.parametrize("seeds", [1, 2])
def test_tensorboard_reads_each_step_once_after_a_crash(tmp_path, seeds, monkeypatch):
    task = toy(Validated, first_seed=3, seeds=seeds, **LENGTH)
    options = {"log_gradients": 2, "on_metrics": get_logger("tensorboard")}
    save = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", fails_at(6))
    with pytest.raises(MemoryError):
        train_toy(task, tmp_path, **options)  # events of step 6, and no checkpoint
    monkeypatch.setattr(Checkpoints, "save", save)
    train_toy(task, tmp_path, **options)
    series, config = read_by_tensorboard(tmp_path)
    expected = {}
    for (step, name), numbers in lines_of(tmp_path).items():
        tags = {name: sum(numbers) / seeds}
        if seeds > 1 and not name.endswith("per_second"):  # which all seeds share
            tags |= {f"{name}/seed {3 + index}": number for index, number in enumerate(numbers)}
        for tag, number in tags.items():
            expected.setdefault(tag, []).append((step, pytest.approx(number, rel=1e-6)))
    assert series == expected
    assert [step for step, _ in series["loss"]] == [2, 4, 6]
    assert config == json.loads((tmp_path / "config.json").read_text())


def fails_at(step):
    save = Checkpoints.save

    def saved(self, now, *arguments, **options):
        if now == step:
            raise MemoryError
        save(self, now, *arguments, **options)

    return saved


def test_weights_and_biases_offline_is_one_run_with_the_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    task = toy(**LENGTH)
    stopping = [get_logger("wandb"), stop_at(2)]
    assert train_toy(task, tmp_path / "mine", on_metrics=stopping).step == 2
    train_toy(task, tmp_path / "mine", on_metrics=get_logger("wandb"))
    first, second = sorted((tmp_path / "mine" / "wandb").glob("offline-run-*"))
    # A folder of the same second ends in "-1".
    assert first.name.split("-")[3] == second.name.split("-")[3]
    records = [record for folder in (first, second) for record in records_of(folder)]
    settings = {
        each.key: json.loads(each.value_json) for r in records for each in r.run.config.update
    }
    assert settings["train"]["steps"] == 6
    assert {r.run.display_name for r in records if r.HasField("run")} == {"mine"}
    losses = {}
    for history in (r.history for r in records if r.HasField("history")):
        row = {
            (each.key or each.nested_key[0]): json.loads(each.value_json) for each in history.item
        }
        losses[row["_step"]] = [row["loss/seed 0"], row["loss/seed 1"]]
    assert losses == {
        step: numbers
        for (step, name), numbers in lines_of(tmp_path / "mine").items()
        if name == "loss"
    }


def test_weights_and_biases_waits_as_long_as_the_environment_says(tmp_path, monkeypatch):
    """Without a network, it would wait for 90 seconds at the start, and for ever at the end."""
    given, fields = [], wandb.Settings.model_fields
    stub = types.SimpleNamespace(init=lambda **words: given.append(words["settings"]))
    stub.Settings = types.SimpleNamespace(model_fields=fields)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    for name in ("INIT_TIMEOUT", "FINISH_TIMEOUT"):
        get_logger("wandb")(tmp_path, {"train": {"first_seed": 0}})
        monkeypatch.setenv(f"WANDB_{name}", "5")
    stub.Settings.model_fields = {"init_timeout"}  # of an earlier version
    for name in ("INIT_TIMEOUT", "FINISH_TIMEOUT"):
        monkeypatch.delenv(f"WANDB_{name}")
    get_logger("wandb")(tmp_path, {"train": {"first_seed": 0}})
    both = {"init_timeout": 30, "finish_timeout": 60}
    assert given == [both, {"finish_timeout": 60}, {"init_timeout": 30}]
    assert both.keys() <= fields.keys()


def records_of(folder):
    """The records that Weights & Biases has written: a log in LevelDB's format, after 7 bytes."""
    (path,) = folder.glob("*.wandb")
    data, at, parts = path.read_bytes(), 7, b""
    while at < len(data):
        if (left := -at % 2**15) < 7:  # to the end of the block
            at += left
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.parametrize(("steps", "last_step", "end"), [(3, 6, 6), (1, 6, 4), (99, 4, 4)])
def test_a_profile_names_the_program_of_the_steps(tmp_path, capsys, steps, last_step, end):
    stop = stop_at(last_step)
    train_toy(toy(**LENGTH), tmp_path, profile=steps, log_gradients=2, on_metrics=stop)
    (path,) = (tmp_path / "profile").rglob("*.trace.json.gz")
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert f"profile of steps 2 to {end}: open {path}" in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert "PjitFunction(train_steps)" in names
    assert not any("backend_compile" in name for name in names)


def test_the_options_of_train_py(tmp_path, command, monkeypatch, mine):
    words = ["--task", "toy_task:Toy", "--workdir", tmp_path / "a", "--seeds", 2]
    words += [word for name, value in LENGTH.items() for word in (f"--{name}", value)]
    words += ["--batch-size", 7, "--log-to", "tensorboard", "mine_to_log:Noted", "--profile", 2]
    status, out, err = command("train", *words)
    assert (status, err) == (0, "")
    assert {"tensorboard", "profile"} <= {path.name for path in (tmp_path / "a").iterdir()}
    assert mine.seen[0] == ("a", 6)
    assert "0 of 6" in out
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    check_error(command("train", "--workdir", tmp_path / "b", "--log-to", "wandb"), "[log]")
    assert not (tmp_path / "b").exists()
