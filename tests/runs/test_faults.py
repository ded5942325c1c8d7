"""scripts/train.py is killed, stopped or out of room: nothing is lost, in one line each.

After each fault the run goes on, and must end with the bits of a run that nothing disturbed.
"""

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from saved_files import without_speed

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 150, 5  # most of the time goes into saving
TINY = (
    *("--dim", "8", "--hidden-dim", "8", "--batch-size", "8", "--max-length", "3", "--seeds", "1"),
    *("--steps", str(STEPS), "--log-every", str(EVERY), "--checkpoint-every", str(EVERY)),
)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts scripts/train.py in a folder with the settings of TINY; later words win."""
    compiled, started = tmp_path_factory.mktemp("compiled"), []

    def start(folder, *words):
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "train.py", "--workdir", folder, *TINY, *words],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(compiled),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """The result of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert end(start(folder)) == (0, "")
    return result(folder)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def end(process):
    """The exit status, and what the command said on standard error."""
    _, err = process.communicate(timeout=600)
    return process.returncode, err


def stop(process, number):
    process.send_signal(number)
    return end(process)


def result(folder, step=STEPS):
    """The bytes of the last state, and metrics.jsonl."""
    state = ocp.Checkpointer(ocp.StandardCheckpointHandler()).restore(
        folder / "checkpoints" / str(step) / "state"
    )
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]
    return leaves, without_speed(folder / "metrics.jsonl")


def steps(folder):
    """The steps with a checkpoint."""
    names = os.listdir(folder / "checkpoints") if (folder / "checkpoints").is_dir() else []
    return {int(name) for name in names if name.isdecimal()}


def wait_for(process, condition):
    while process.poll() is None and not condition():
        time.sleep(0.01)


def wait_until_begun(process, folder):
    lock = folder / "lock"
    wait_for(process, lambda: lock.exists() and f"process {process.pid} " in lock.read_text())


def wait_until_saved(process, folder):
    known = steps(folder)
    wait_for(process, lambda: steps(folder) - known)


def steps_lost(folder):
    """The steps in metrics.jsonl after the newest checkpoint."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    written = [json.loads(line)["step"] for line in lines if line.endswith("\n")]
    return max(written[-1] - max(steps(folder), default=0), 0) if written else 0


# --- processes ---


def test_kill_9_again_and_again(start, folder, undisturbed):
    rng = random.Random(1)
    for wait in (wait_until_begun, wait_until_saved, wait_until_saved, wait_until_saved):
        process = start(folder, "--resume")
        wait(process, folder)
        time.sleep(rng.uniform(0, 0.5))
        _, err = stop(process, signal.SIGKILL)
        assert err == ""
        if (folder / "metrics.jsonl").exists():
            assert steps_lost(folder) <= EVERY
    assert end(start(folder, "--resume")) == (0, "")
    assert result(folder) == undisturbed
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"145", "150"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves(start, folder, undisturbed, number):
    process = start(folder)
    wait_until_saved(process, folder)
    line = "stopped by a signal; --resume goes on from here\n"
    assert stop(process, number) == (128 + number, line)
    assert steps_lost(folder) == 0
    assert end(start(folder, "--resume")) == (0, "")
    assert result(folder) == undisturbed


def test_nobody_reads_what_it_prints(start, folder, undisturbed):
    process = start(folder)
    process.stdout.close()
    assert process.wait(timeout=600) == 141
    assert process.stderr.read() == ""
    assert result(folder) == undisturbed


# --- the disk ---


def test_no_room_on_the_disk(start, folder, undisturbed):
    process = start(folder)
    wait_until_saved(process, folder)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    status, err = end(process)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert steps_lost(folder) <= EVERY
    assert end(start(folder, "--resume")) == (0, "")
    assert result(folder) == undisturbed
