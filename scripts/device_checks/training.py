"""Training: string reversal with four scores, a stop and a resumption, and small tasks."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import load_states, train_run
from attention_jax.training.run_results import seconds_of
from attention_jax.training.task import TrainConfig
from benchmarks.measure import JSON, attempt, significant
from device_checks.record import NOT_MEASURED, Record
from experiments.bench import maps
from experiments.bench.training import LOOK, Start, deviation_of, steps_until_solved
from experiments.lab import FOUR_SCORES, exit_if_interrupted

_LEARNED, LEAST_PERCENT = 2000, 99  # every score has that many strings right after these steps


def check(record: Record) -> None:
    """String reversal with four scores, then one of the runs once more with a stop."""
    train = dataclasses.replace(Reversal.train, seeds=5, steps=max(75, _LEARNED // record.shrink))
    for score in FOUR_SCORES:
        task = Reversal(dataclasses.replace(Reversal.model, score=score), train)
        _add(record, "training", f"reversal, {score}", _trained, record, task)
    rows = [row for row in record.rows("training") if row["work"].startswith("reversal, ")]
    if all("seconds" in row for row in rows):
        seconds = sum(row["seconds"] for row in rows)
        record.add("training", f"four scores, {train.seeds} seeds", seconds=seconds)
        _add(record, "training", "stopped and resumed", _stopped_and_resumed, record, train)


def tasks(record: Record) -> None:
    """The tasks of the leaderboard with scaled dot: all deviations and seeds of a rate at once."""
    config = maps.Config() if record.shrink == 1 else maps.QUICK
    for name in maps.TASKS:
        _add(record, "tasks", name, _solved, record, config, name)


def _add(record: Record, part: str, work: str, function: Any, *arguments: Any) -> None:
    """Adds the row that a function returns, unless it is there."""
    if not record.has(part, work):
        late = record.left() <= 0
        row, refusal = (None, NOT_MEASURED) if late else attempt(function, *arguments)
        record.add(part, work, **(row or refusal))


def _trained(record: Record, task: Reversal) -> JSON:
    """Trains and tests a score; a run that a call has stopped goes on."""
    folder, strings = record.folder / "runs" / task.model.score, max(10, 200 // record.shrink)
    start = time.monotonic() - seconds_of(folder)
    run = train_run(task, folder, resume=True)
    exit_if_interrupted(run.interrupted)
    tests = (range(task.min_length, task.max_length + 1), strings), ([500 // record.shrink], 20)
    trained, longer = (
        100 * float(np.mean([shares.free_running_exact for shares in found.values()]))
        for found in (accuracies(task, run.params, n, strings=count) for n, count in tests)
    )
    speed = read_lines(folder / "timing.jsonl")[-1].get("steps_per_second")
    memory = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # CPU: not known
    found: JSON = {
        "steps_per_second": significant(speed or 0),
        "exact_percent": trained,
        "longer_percent": longer,
        "seconds": significant(time.monotonic() - start),
    }
    if memory:
        found["process_peak_mib"] = significant(memory / 2**20)
    if task.train.steps >= _LEARNED and trained < LEAST_PERCENT:
        found["wrong"] = [f"at least {LEAST_PERCENT} % of strings must be right"]
    return found


def _stopped_and_resumed(record: Record, train: TrainConfig) -> JSON:
    """Trains once more by scripts/train.py; which arrays and lines differ from the run before."""
    score = FOUR_SCORES[0]
    whole, folder = record.folder / "runs" / score, record.folder / "runs" / "stopped"
    shutil.rmtree(folder, ignore_errors=True)
    script = Path(__file__).parents[1] / "train.py"
    options = ["--score", score, "--seeds", str(train.seeds), "--steps", str(train.steps)]
    command = [sys.executable, str(script), *options, "--workdir", str(folder)]
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        while process.poll() is None and not (folder / "metrics.jsonl").exists():
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
    if process.returncode != 130:
        raise RuntimeError(f"the run ended with status {process.returncode} before it was stopped")
    subprocess.run([*command, "--resume"], stdout=sys.stderr, check=True)
    runs = folder, whole
    states = (load_states(run)[1][train.steps] for run in runs)
    arrays = zip(*map(jax.tree.leaves_with_path, states), strict=True)
    of_runs = (map(_trained_line, read_lines(run / "metrics.jsonl")) for run in (folder, whole))
    lines = itertools.zip_longest(*of_runs)
    differing = [jax.tree_util.keystr(p) for (p, a), (_, b) in arrays if a.tobytes() != b.tobytes()]
    differing += [f"line {number}" for number, (a, b) in enumerate(lines, 1) if a != b]
    return {"differences": len(differing), **({"wrong": differing} if differing else {})}


def _trained_line(line: JSON) -> JSON:
    """A line of metrics.jsonl without the speed, which is another at each start."""
    return {name: value for name, value in line.items() if not name.endswith("per_second")}


def _solved(record: Record, config: maps.Config, name: str) -> JSON:
    """The row of a map at the first rate: steps per second, and the seeds that solve the task."""
    cells = maps.Cells("map", name, "scaled", rate := config.rates[0])
    task, steps = config.task(cells), config.steps(cells)
    own = deviation_of(task)
    starts = [
        Start(deviation / own, rate, seed)
        for deviation in config.deviations
        for seed in range(config.seeds)
    ]
    steps_until_solved(task, starts, LOOK)  # compiles
    if record.left() <= 0:
        return NOT_MEASURED
    start = time.monotonic()
    solved, _ = steps_until_solved(task, starts, steps)
    seconds = time.monotonic() - start
    trained = np.minimum(solved, steps).sum()
    share = np.isfinite(solved).reshape(-1, config.seeds).mean(1)
    return {
        "steps_per_second": significant(trained / seconds),
        "solved_percent": significant(100 * share.max()),
        "deviation": config.deviations[int(share.argmax())],
        "rate": rate,
        "runs": len(starts),
    }
