"""Runs of many processes, connected over the loopback, as a user starts them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import two_processes

from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.processes import Distribution

ROOT = Path(__file__).parents[2]
TINY = ["--dim", "8", "--hidden-dim", "7", "--max-length", "3", "--seeds", "2"]
TINY += ["--encoder-layers", "0", "--no-decoder-self-attention"]


def free_port():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        return listening.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Starts `count` processes of a script; those that a failed test left are ended."""
    started = []

    def start(count, script, *arguments):
        port, together = free_port(), []
        for index in range(count):
            distributed = ["--distributed", "--coordinator", f"localhost:{port}"]
            distributed += ["--process-count", str(count), "--process-index", str(index)]
            process = subprocess.Popen(
                [sys.executable, script, *arguments, *(distributed if count > 1 else [])],
                cwd=tmp_path,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "JAX_PLATFORMS": "cpu",
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            together.append(process)
        started.extend(together)
        return together

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def train(start):
    def train(count, folder, *arguments, steps=12, checkpoint_every=4):
        options = ["--workdir", folder, "--steps", steps, "--log-every", 2, "--batch-size", 12]
        options += ["--checkpoint-every", checkpoint_every, *TINY, *arguments]
        return start(count, ROOT / "scripts" / "train.py", *map(str, options))

    return train


def ended(together, timeout=300):
    """[(exit status, output, errors)] of processes that end by themselves."""
    results = []
    for process in together:
        out, err = process.communicate(timeout=timeout)
        # JAX's transport prints lines that no setting silences.
        ours = [line for line in out.splitlines(keepends=True) if not line.startswith("[Gloo]")]
        results.append((process.returncode, "".join(ours), err))
    return results


def finished(together):
    results = ended(together)
    for status, _, err in results:
        assert (status, err) == (0, ""), results
    return results


def losses(folder, until=12):
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(2, until + 2, 2))  # none twice
    return np.array([line["loss"] for line in lines])


def wait_for(condition, together, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in together), ended(together)
        time.sleep(0.02)


def reached(folder):
    """The last step in metrics.jsonl."""
    lines = read_lines(folder / "metrics.jsonl")
    return lines[-1]["step"] if lines else 0


# --- one run ---


def test_two_train_as_one_does_and_one_of_them_writes(tmp_path, start):
    """And each process draws its own part of the batch."""
    one, two = tmp_path / "one", tmp_path / "two"
    (_, first, _), (_, second, _) = finished(start(2, two_processes.__file__, "two"))
    *first, rows = first.splitlines()
    assert "toy: step 12/12" in "\n".join(first)
    assert (rows, second) == ("0 6", "6 12\n")
    two_processes.train(one)
    # As training/test_sharding.py says.
    np.testing.assert_allclose(losses(two), losses(one), rtol=3e-6)
    assert len(read_lines(two / "timing.jsonl")) == 1
    assert json.loads((two / "env.json").read_text())["devices"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_number_goes_on_from_a_damaged_state(tmp_path, train, count):
    finished(train(2, "run"))
    before = losses(tmp_path / "run")
    (manifest,) = (tmp_path / "run" / "checkpoints").glob("12/manifest.json")
    manifest.write_text("{}")
    results = ended(train(count, "run", "--resume"))
    assert [status for status, _, _ in results] == [0] * count, results
    assert results[0][2].endswith("damaged_checkpoints; that of step 8 is used\n")
    assert all(not out + err for _, out, err in results[1:])
    np.testing.assert_allclose(losses(tmp_path / "run"), before, rtol=3e-6)


def stopped(train, folder, count, arguments=()):
    """Training that a SIGTERM to the last process has stopped; its step."""
    together = train(count, folder.name, *arguments, steps=6000, checkpoint_every=3000)
    before = reached(folder)
    wait_for(lambda: reached(folder) > before, together)
    together[-1].send_signal(signal.SIGTERM)
    results = ended(together)
    assert [status for status, _, _ in results] == [143] * count, results
    assert results[0][2] == "stopped by a signal; --resume goes on from here\n"
    assert all(err == "" for _, _, err in results[1:]), results
    step = Checkpoints(folder / "checkpoints", read_only=True).steps()[-1]
    assert before < step == reached(folder) < 6000
    assert f"{folder.name}: step {step} of 6000, 2 seeds" in results[0][1]
    losses(folder, until=step)
    return step


@pytest.mark.slow
def test_a_signal_to_one_stops_all_and_any_number_goes_on(tmp_path, train):
    stopped(train, tmp_path / "run", 2)
    stopped(train, tmp_path / "run", 4, ["--resume"])
    stopped(train, tmp_path / "run", 1, ["--resume"])


# --- what goes wrong ---


@pytest.mark.slow
def test_a_mistake_ends_both(tmp_path, train):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("")
    first, second = ended(train(2, "run"))
    assert (first[0], second[0]) == (2, 2), (first, second)
    assert first[2].startswith("error: workdir must be new, empty, or the folder of a run; run")
    assert second[2] == "error: another process of this run failed: see its error\n"
    assert first[2].count("\n") == 1
    assert (first[1], second[1]) == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_is_killed_and_the_run_goes_on_later(tmp_path, train, killed):
    steps = {"steps": 400, "checkpoint_every": 10}
    finished(train(2, "alone", **steps))
    together = train(2, "run", **steps)
    wait_for(lambda: reached(tmp_path / "run") > 20, together)
    together[killed].kill()
    began = time.monotonic()
    other = together[1 - killed]
    other.communicate(timeout=120)
    assert other.returncode not in (0, None)
    assert time.monotonic() - began < 60
    finished(train(2, "run", "--resume", **steps))
    with_accident, without = (
        read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "alone")
    )
    assert with_accident == without


# --- mistakes, in this process ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("localhost:1234", 2, None), "must be given together, or left out"),
        ((None, 2, 0), "must be given together, or left out"),
        (("localhost", 2, 0), "coordinator must be host:port; got 'localhost'"),
        ((":1234", 2, 0), "coordinator must be host:port; got ':1234'"),
        (("localhost:port", 2, 0), "coordinator must be host:port; got 'localhost:port'"),
        (("localhost:1234", 2, 2), "from 0 to process_count - 1 = 1; got 2"),
        (("localhost:1234", 2, -1), "from 0 to process_count - 1 = 1; got -1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=r"coordinator|process_index") as raised:
        Distribution(*settings)
    assert message in str(raised.value)


def test_one_process_waits_for_no_other():
    assert processes.is_first()
    assert processes.largest(7) == 7
    with processes.together():
        pass
    with pytest.raises(OSError, match="mine"), processes.together():
        raise OSError("mine")


def test_a_process_fails_when_another_one_does(monkeypatch):
    monkeypatch.setattr(processes, "largest", lambda number: 1)
    with pytest.raises(ValueError, match="another process of"), processes.together():
        pass
