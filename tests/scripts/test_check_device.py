"""scripts/check_device.py: what it writes, what it skips, and what it calls wrong."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from command_lines import check_error, load
from device_checks import right, speed, training
from device_checks.report import judged_rows

from attention_jax.kernels import IMPLEMENTATIONS
from attention_jax.tasks.recall import Recall
from attention_jax.training.task import TrainConfig
from attention_jax.whole import reference
from benchmarks import measure
from benchmarks.measure import Contestant, Race, compiled
from benchmarks.targets import TARGETS
from experiments.bench import training as bench_training

REPOSITORY = Path(__file__).parents[2]

load("scripts/check_device.py")  # it puts experiments/ on the path


@pytest.fixture(autouse=True)
def users_settings_in_all_threads(monkeypatch):
    """A context manager of JAX sets what one thread sees, and programs compile in several."""
    strict = {"jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}
    for name, value in zip(strict, ("standard", "allow"), strict=True):
        jax.config.update(name, value)
    monkeypatch.setenv("ATTENTION_JAX_CACHE", "off")  # the command sets it
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    yield
    for name, value in strict.items():
        jax.config.update(name, value)


@pytest.fixture
def one_score(monkeypatch):
    """One score, mask and dtype."""
    monkeypatch.setattr(right, "SCORES", {"scaled": "scaled"})
    monkeypatch.setattr(right, "BOUNDS", {"bfloat16": right.BOUNDS["bfloat16"]})
    monkeypatch.setattr(right, "MASKS", ("padding",))


def rows_in(folder):
    content = json.loads((folder / "device.json").read_text())
    return {(row["part"], row["work"], row["contestant"]): row for row in content["rows"]}


WORK = "right", "scaled, padding, bfloat16"
PARTS = "--parts", "machine", "right"


def test_rows_are_written_and_a_second_call_measures_only_what_is_missing(
    command, tmp_path, monkeypatch, one_score
):
    out = tmp_path / "check"
    status, printed, progress = command("check_device", "--out", out, "--minutes", 1e-6, *PARTS)
    assert status == 0
    assert all("not measured" in row for row in rows_in(out).values())
    status, printed, progress = command("check_device", "--out", out, *PARTS)
    assert status == 0
    rows = rows_in(out)
    for name in ("reference", "tiled"):
        shares = rows[*WORK, name]["shares"]
        assert {*shares} == {"output", "statistics", "gradients", "must be 0"}
        assert 0 < rows[*WORK, name]["worst"] < 1
        assert shares["must be 0"] == 0
    assert "not on cpu" in rows[*WORK, "mosaic_tpu"]["not served"]
    assert rows["machine", "matrix product", "bfloat16"]["tflops"] > 0
    assert "wrong: 0 of 7 rows" in printed
    assert "s left] right: scaled, padding, bfloat16, tiled: " in progress
    monkeypatch.setattr(right, "_program", None)  # is not called again
    monkeypatch.setattr(measure, "compiled", pytest.fail)
    assert command("check_device", "--out", out, *PARTS)[0] == 0
    assert rows_in(out) == rows


def test_a_wrong_number_is_named_and_the_status_is_1(command, tmp_path, monkeypatch, one_score):
    program = right._program

    def wrong(score, mask, name, *arguments):
        factor = 1.1 if name == "tiled" else 1.0
        prepared = program(score, mask, name, *arguments)
        return prepared._replace(run=lambda: jax.tree.map(lambda x: factor * x, prepared.run()))

    monkeypatch.setattr(right, "_program", wrong)
    status, printed, _ = command("check_device", "--out", tmp_path, "--parts", "right")
    assert status == 1
    assert "  right: scaled, padding, bfloat16, tiled: ['output', 'statistics', " in printed
    assert "wrong: 1 of 5 rows" in printed


def test_gradients_without_statistics_are_compared_with_their_own(
    command, tmp_path, monkeypatch, one_score
):
    def without_statistics(options, inputs):
        if options.return_statistics:
            raise NotImplementedError("returns no statistics")
        return reference.attend(options, inputs)

    monkeypatch.setitem(IMPLEMENTATIONS, "mosaic_gpu", without_statistics)
    status, _, _ = command("check_device", "--out", tmp_path, "--parts", "right")
    assert status == 0
    row = rows_in(tmp_path)[*WORK, "mosaic_gpu"]
    assert {*row["shares"]} == {"output", "gradients", "must be 0"}
    assert 0 < row["worst"] < 1


def test_what_fails_when_it_runs_is_a_row_and_the_others_go_on(
    command, tmp_path, monkeypatch, one_score
):
    program, running = right._program, []

    def fails(score, mask, name, *arguments):
        def run():
            assert not running, "two programs run at once"
            running.append(name)
            time.sleep(0.05)
            running.clear()
            if name == "tiled":
                raise RuntimeError("the capture failed")
            return prepared.run()

        prepared = program(score, mask, name, *arguments)
        return prepared._replace(run=run)

    monkeypatch.setattr(right, "_program", fails)
    monkeypatch.setattr(right, "SCORES", {"scaled": "scaled", "general": "general"})
    status, printed, _ = command("check_device", "--out", tmp_path, "--parts", "right")
    assert status == 1
    rows = rows_in(tmp_path)
    assert rows[*WORK, "tiled"]["error"] == "RuntimeError: the capture failed"
    assert rows[*WORK, "reference"]["worst"] < 1
    assert "error: 2 of 10 rows" in printed


COMPILES_FOR_MINUTES = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path[:0] = {paths}
import check_device
from attention_jax.commands.command_line import run_command
from device_checks import right
program = right._program
def slow(score, mask, name, *arguments):
    if (score, name) == ("scaled", "tiled"):
        print("compiles", flush=True)
        time.sleep(300)
    return program(score, mask, name, *arguments)
right._program = slow
right.SCORES = {{"scaled": "scaled"}}
right.BOUNDS = {{"bfloat16": right.BOUNDS["bfloat16"]}}
run_command(check_device.Arguments, check_device.main)
"""


@pytest.mark.parametrize(("minutes", "status"), [(8.0, 130), (0.2, 0)])
def test_a_program_that_compiles_for_minutes_does_not_hold_the_end(tmp_path, minutes, status):
    paths = [str(REPOSITORY / "scripts"), str(REPOSITORY)]
    code = COMPILES_FOR_MINUTES.format(paths=paths)
    options = ["--out", str(tmp_path), "--minutes", str(minutes), "--parts", "machine", "right"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "compiles\n"
    if status == 130:
        process.send_signal(signal.SIGINT)
    try:
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()  # nothing is left for the tests that follow
    assert process.returncode == status
    assert "not finished: right;" in printed
    assert printed.endswith("device.json\n")
    assert ("machine", "copy", "float32") in rows_in(tmp_path)


def test_a_program_that_fails_is_a_row_and_the_others_go_on(command, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory\nfor this")

    ours = functools.partial(compiled, jnp.add, 1.0, 2.0)
    contestants = {"ours": ours, "failing": fail, "breaking": lambda: Contestant(fail, {})}
    race = Race({"work": "a sum"}, contestants)
    monkeypatch.setitem(speed.RACES, "scaled", lambda shrink: [race])
    status, printed, _ = command("check_device", "--out", tmp_path, "--parts", "scaled")
    assert status == 0
    assert "  scaled: a sum, failing: RuntimeError: no memory\n" in printed
    assert "  scaled: a sum, breaking: RuntimeError: no memory\n" in printed
    assert rows_in(tmp_path)["scaled", "a sum", "ours"]["milliseconds"] > 0


def test_tasks_of_the_leaderboard_train_together(command, tmp_path, monkeypatch):
    small = dataclasses.replace(
        Recall.model, decoder_layers=1, dim=8, hidden_dim=8, num_heads=1, position_limit=8
    )
    few = TrainConfig(steps=1000, batch_size=4, schedule="constant")  # a tenth in a rehearsal
    monkeypatch.setattr(training.maps, "TASKS", {"recall": Recall(small, few, 8, 4, pairs=1)})
    monkeypatch.setattr(bench_training, "SOLVED", 0.3)
    status, printed, _ = command("check_device", "--out", tmp_path, "--parts", "tasks")
    assert status == 0
    ((_, row),) = rows_in(tmp_path).items()
    quick = training.maps.QUICK
    assert (row["runs"], row["rate"]) == (len(quick.deviations) * quick.seeds, quick.rates[0])
    assert row["solved_percent"] == 100
    assert row["deviation"] in quick.deviations
    assert row["steps_per_second"] > 0
    assert "| recall | " in printed


def test_every_target_reads_a_row_that_is_measured(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    rows = [
        {"work": race.about["work"], "contestant": name}
        for part in ("scaled", "additive")
        for race in speed.RACES[part](1)
        for name in race.contestants
    ]
    contestants = {}
    for row in judged_rows(rows):
        contestants.setdefault(row["work"], set()).add(row["contestant"])
    for case, numbers in [*TARGETS["H100"].items()][:-4]:
        for number in numbers:
            assert {*number.removeprefix("milliseconds by ").split(" / ")} <= contestants[case]


def test_rows_of_another_device_are_not_mixed(command, tmp_path, monkeypatch):
    (tmp_path / "device.json").write_text('{"environment": {"device": "gpu: H100"}, "rows": []}')
    check_error(command("check_device", "--out", tmp_path), "device", "name another folder")
    (tmp_path / "device.json").write_text("[]")
    check_error(command("check_device", "--out", tmp_path), "device.json cannot be read")
