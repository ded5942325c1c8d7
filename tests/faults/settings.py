"""Runs that meet other settings, other devices, or each other."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import math
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import jax

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import RunFolder
from attention_jax.training.loop import initial_state
from attention_jax.training.run import load_states
from attention_jax.training.settings import task_in
from attention_jax.training.sharding import Layout, MeshShape

from .findings import WRONG, Findings, hashes
from .processes import (
    Place,
    end,
    every_byte,
    result,
    saved_steps,
    stop,
    wait_until_begun,
    wait_until_saving,
)

# --- another configuration ---

CHANGES = [  # option, its new value, and the setting's name, old and new value in the message
    ("--score", "dot", "model.score was 'scaled', now 'dot'"),
    ("--dim", "16", "model.dim was 8, now 16"),
    ("--hidden-dim", "11", "model.hidden_dim was 8, now 11"),
    ("--seeds", "2", "train.seeds was 1, now 2"),
    ("--first-seed", "5", "train.first_seed was 0, now 5"),
    ("--steps", "300", "train.steps was 150, now 300"),
    ("--batch-size", "7", "train.batch_size was 8, now 7"),
    ("--learning-rate", "0.01", "train.learning_rate was 0.003, now 0.01"),
]
SHAPES = [  # those of them that leaves have in their shapes
    ("--dim", "16", ("model", "dim"), 16),
    ("--seeds", "2", ("train", "seeds"), 2),
    ("--encoder-layers", "2", ("model", "encoder_layers"), 2),
]


def other_settings(place: Place, rng: random.Random, found: Findings) -> None:
    """--resume with an option changed; every other time config.json was edited to agree with it."""
    workdir = place.fresh()
    shutil.copytree(place.undisturbed(), workdir)
    if rng.random() < 0.5:
        option, value, told = rng.choice(CHANGES)
        line = rf"error: workdir .+ another configuration: {re.escape(told)}\. Resume with .+"
    else:
        option, value, (*parts, name), number = rng.choice(SHAPES)
        path = workdir / "config.json"
        config = json.loads(path.read_text())
        functools.reduce(dict.__getitem__, parts, config)[name] = number
        path.write_text(json.dumps(config, indent=2) + "\n")
        line = r"error: checkpoint .+ another configuration: .+ was .+, now .+\. Use the .+"
    found.case += f", {option} {value}"
    before = every_byte(workdir)
    found.said(place.run(workdir, "--resume", option, value), status=2, line=line)
    found.expect(every_byte(workdir) == before, "something changed on disk")
    told_by = "the checkpoint" if line.startswith("error: c") else "config.json"
    found.ended(f"refused by {told_by}, both sides named")
    shutil.rmtree(workdir)


# --- other devices ---

SPREAD = ("--seeds", "2", "--steps", "60")
MESHES = [(8, ["seed=2", "data=4"]), (2, ["data=2"])]
ROUNDING = 1e-3  # relative, of a loss after 60 steps of Adam


def other_devices(place: Place, rng: random.Random, found: Findings) -> None:
    """1 device, stopped; 8 on a mesh, stopped; 2 to the end. What is restored has all its bits."""
    workdir, reference = place.fresh(), place.undisturbed(*SPREAD)
    process = place.start(workdir, *SPREAD)
    for devices, mesh in MESHES:
        wait_until_saving(process, workdir)
        time.sleep(rng.uniform(0, 0.5))
        stop(process, signal.SIGTERM)
        step = max(map(int, saved_steps(workdir)))
        here = hashes(load_states(workdir)[1][step]())
        words = ["-m", "tests.faults.settings", str(workdir), str(step), *mesh]
        there = end(place.start_python(words, devices=devices))
        if there.status or json.loads(there.out) != here:
            found.defect(WRONG, f"on {devices} devices: {there.err[-300:]}")
        found.ended(f"state of 1 seen on {devices}" if devices == 8 else "state of 8 seen on 2")
        process = place.start(workdir, "--resume", *SPREAD, "--mesh", *mesh, devices=devices)
    found.said(end(process), status=0)
    lines, wanted = (read_lines(path / "metrics.jsonl") for path in (workdir, reference))
    found.expect([x["step"] for x in lines] == [x["step"] for x in wanted], "other lines")
    off = max(
        abs(a - b) / abs(b)
        for line, other in zip(lines, wanted, strict=True)
        for a, b in zip(line["loss"], other["loss"], strict=True)
    )
    if not off < ROUNDING:
        found.defect(WRONG, f"losses off by {off:.1e}")
    found.ended(f"losses off by less than 1e{math.ceil(math.log10(off)) if off else '-∞'}", times=0)


def print_hashes(workdir: Path, step: int, words: list[str]) -> None:
    """Of a state that is restored on a mesh, as the process sees it whose devices these are."""
    start = jax.eval_shape(functools.partial(initial_state, task_in(workdir)))
    layout = Layout(MeshShape.from_words(words))
    with Checkpoints(RunFolder(workdir).checkpoints, read_only=True) as checkpoints:
        restored = checkpoints.restore(layout.placed(start), step=step)
    assert restored is not None
    assert all(
        leaf.sharding.device_set == set(layout.mesh.devices.flat)
        for leaf in jax.tree.leaves(restored.state)
    )
    print(json.dumps(hashes(restored.state)))


# --- two in one folder ---


def second_process(place: Place, rng: random.Random, found: Findings) -> None:
    """Another process is started in the folder while one trains there."""
    workdir, wanted = place.fresh(), result(place.undisturbed())
    first = place.start(workdir)
    (wait_until_begun if rng.random() < 0.5 else wait_until_saving)(first, workdir)
    ended = place.run(workdir, "--resume")
    alone = first.poll() is not None  # the first was quicker
    line = rf"error: workdir .+ is in use: process {first.pid} on .+ is training in it; wait .+"
    found.said(ended, status=0 if alone else 2, line="" if alone else line)
    found.said(end(first), status=0)
    found.same(result(workdir), wanted)
    found.ended("came after the first had ended" if alone else "second refused, first undisturbed")


def at_once(place: Place, rng: random.Random, found: Findings) -> None:
    """Two processes with different settings begin in a new folder at the same time."""
    workdir = place.fresh()
    words = [(), ("--learning-rate", "0.01")]
    wanted = [result(place.undisturbed(*each)) for each in words]
    racing = [place.start(workdir, *each) for each in words]
    ended = [end(process) for process in racing]
    won = 0 if ended[0].status == 0 else 1
    found.said(ended[won], status=0)
    found.said(ended[1 - won], status=2, line=r"error: workdir .+ (is in use|already holds) .+")
    found.same(result(workdir), wanted[won])
    found.ended("one began, the other was refused")


def at_the_same_instant(place: Place, rng: random.Random, found: Findings) -> None:
    """The same without the seconds in which Python starts: two threads at one barrier."""
    folder, ready = RunFolder(place.fresh()), threading.Barrier(2)
    tried = threading.Barrier(2)

    def begin(name: str) -> str:
        ready.wait()
        try:
            with folder.begun({"name": name}, resume=False):
                tried.wait()
                return name
        except ValueError as error:
            tried.wait()
            found.expect(
                bool(re.match(r"workdir .+ (is in use|already holds)", str(error))), str(error)
            )
            return ""

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        names = [name for name in threads.map(begin, ["left", "right"]) if name]
    found.expect(len(names) == 1, f"{len(names)} began")
    if [folder.read_config()["name"]] != names:
        found.defect(WRONG, "config.json is that of the one refused")
    found.ended("one began, the other was refused")


if __name__ == "__main__":
    print_hashes(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
