"""Real processes: two train as one does, and what happens to one of them happens to both."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_files import without_speed
from toy_task import Toy

from attention_jax.runs import processes
from attention_jax.training.run import load_run
from attention_jax.training.task import Feed, TrainConfig, Validation

ROOT = Path(__file__).parents[2]
STEPS = {"seeds": 2, "steps": 10, "log_every": 2, "checkpoint_every": 4, "batch_size": 8}


@dataclasses.dataclass(frozen=True)
class Drawn(Toy):
    """Each device draws its own part of a batch."""

    train: TrainConfig = TrainConfig(**STEPS)


class Fed(Drawn):
    """Batches made on the host, validation, and the trouble that the environment names."""

    @property
    def validation(self):
        return Validation("size", larger_is_better=False)

    def validate(self, params, folder):
        return {"size": np.sum(params["w"], axis=1).tolist()}

    def feed(self, folder, *, multiple_of=1):
        process, step_of_trouble, trouble = os.environ.get("TROUBLE", "9 9 -").split()
        is_here = jax.process_index() == int(process)
        if is_here and trouble == "nodata":
            raise ValueError("text must be a file")
        if is_here and trouble == "early":
            raise KeyboardInterrupt  # before the run watches for signals

        read = set()  # scripts/train.py reads batches before the first step, too

        def batch(seed, step):
            in_training = (seed, step) in read
            read.add((seed, step))
            if in_training and is_here and (seed, step) == (0, int(step_of_trouble)):
                if trouble == "bug":
                    raise ZeroDivisionError(trouble)
                if trouble == "full":  # the next line cannot be written
                    (folder / "metrics.jsonl").rename(folder / "metrics")
                    (folder / "metrics.jsonl").mkdir()
                else:
                    os.kill(os.getpid(), signal.Signals[trouble])
            x = np.random.default_rng([seed, step]).normal(size=(8, 3)).astype(np.float32)
            return {"x": x, "y": x.sum(axis=1)}

        return Feed(batch)


CLUSTERS = {  # variables of the environment by which JAX finds a cluster
    "slurm": {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"},
    "pod": {
        "JAX_FORCE_TPU_INIT": "1",
        "TPU_WORKER_HOSTNAMES": "localhost,localhost",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost",
        "MEGASCALE_NUM_SLICES": "1",
        "MEGASCALE_SLICE_ID": "0",
    },
}


def start(folder, *words, task="Fed", count=2, of_second=(), trouble="9 9 -", cluster=None):
    """Starts the two processes of a run, or one process with two devices."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, ROOT / "scripts/train.py", "--task", f"test_processes:{task}"]
    command += ["--workdir", folder, *words]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "TROUBLE": trouble, "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_NUM_CPU_DEVICES": str(2 // count)}
    started = []
    for index in range(count):
        options = [*command, *(of_second if index else ())]
        variables = environment
        if cluster is not None:
            ranks = ("SLURM_PROCID", "SLURM_LOCALID", "TPU_WORKER_ID")
            variables = environment | CLUSTERS[cluster] | dict.fromkeys(ranks, str(index))
            variables["JAX_COORDINATOR_PORT"] = str(port)
            options += ["--distributed"]
        elif count == 2:
            options += ["--distributed", f"localhost:{port}"]
            options += ["--processes", "2", "--process", str(index)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(options, env=variables, **pipes))
    return started


def ended(started):
    """The exit statuses, the outputs, and the lines of errors, once all have ended."""
    try:
        texts = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    errors = [[line for line in err.splitlines() if "error: " in line] for _, err in texts]
    print(*(text for pair in texts for text in pair))
    return [process.returncode for process in started], [out for out, _ in texts], errors


def run(folder, *words, **options):
    return ended(start(folder, *words, **options))


def assert_same(folder, other):
    """Asserts that two runs wrote the same lines and have the same parameters."""
    lines, expected = (
        {path.name: without_speed(path) for path in each.glob("[mgv]*.jsonl")}
        for each in (folder, other)
    )
    assert lines == expected
    params, expected = load_run(folder).params["w"], load_run(other).params["w"]
    assert np.asarray(params).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize(
    ("task", "words", "cluster"),
    [
        ("Drawn", (), None),
        pytest.param("Fed", ("--mesh", "seed=2", "--log-gradients"), None, marks=pytest.mark.slow),
        pytest.param("Fed", (), "slurm", marks=pytest.mark.slow),
        pytest.param("Fed", (), "pod", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(tmp_path, task, words, cluster):
    together, alone = tmp_path / "together", tmp_path / "alone"
    mesh = words or ("--mesh", "data=2")
    hidden = ("--workdir", tmp_path / "hidden")  # the other process does not see the folder
    both = (
        start(together, *words, task=task, cluster=cluster, of_second=hidden),
        start(alone, *mesh, task=task, count=1),
    )
    (statuses, outputs, _), (status, _, _) = map(ended, both)
    assert (statuses, status) == ([0, 0], [0])
    assert_same(together, alone)
    assert "step 10 of 10" in outputs[0]
    assert "step" not in outputs[1]
    assert not (tmp_path / "hidden").exists()


@pytest.mark.parametrize("name", ["first", "last", "theirs"])
def test_what_differs_between_processes_is_named(monkeypatch, name):
    mine = {"first": 1, "same": [2], "last": 3, "numbers": 0.1}
    theirs = json.dumps({**mine, "numbers": 0.2, name: 4})
    monkeypatch.setattr(processes, "exchanged", lambda text: [text, text, theirs])
    with pytest.raises(ValueError, match=f"^{name} must be equal in all .* 4 in process 2"):
        processes.check_equal(mine)


def test_one_process_exchanges_nothing(monkeypatch):
    monkeypatch.setattr(processes, "multihost_utils", None)
    monkeypatch.setattr(jax, "process_count", None)  # which starts the devices
    tree, done = {"w": np.ones(3)}, []
    assert processes.whole(tree) is processes.from_first(tree, tree) is tree
    processes.first_does(lambda: done.append(processes.exchanged("text")))
    assert done == [["text"]]
    with pytest.raises(ValueError, match=r"^wrong$"), processes.together():
        raise ValueError("wrong")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    assert run(folder, "--mesh", "data=2", count=1)[0] == [0]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "statuses", "before", "after"),  # before and after: how many processes
    [
        ("1 5 SIGTERM", {143}, 2, 2),
        ("0 5 SIGTERM", {143}, 2, 1),
        ("1 7 SIGKILL", {1, -signal.SIGKILL}, 2, 1),
        ("0 7 SIGKILL", {1, -signal.SIGABRT, -signal.SIGKILL}, 2, 2),
        ("0 7 full", {2}, 2, 2),
        ("1 7 bug", {1}, 2, 2),
        ("1 0 early", {1, 130}, 2, 2),
        ("0 5 SIGINT", {130}, 1, 1),
        ("0 5 SIGTERM", {143}, 1, 1),
        ("0 5 SIGHUP", {129}, 1, 1),
        ("0 7 SIGKILL", {-signal.SIGKILL}, 1, 1),
        ("0 7 full", {2}, 1, 1),
    ],
)
def test_all_end_and_go_on(tmp_path, undisturbed, trouble, statuses, before, after):
    mesh = ("--mesh", "data=2")
    found, _, _ = run(tmp_path, *(mesh if before == 1 else ()), trouble=trouble, count=before)
    assert set(found) <= statuses
    if trouble.startswith(("0 5", "1 5")):
        assert load_run(tmp_path).step == 6  # the steps in progress were done
    if trouble.endswith("full"):
        (tmp_path / "metrics.jsonl").rmdir()
        (tmp_path / "metrics").rename(tmp_path / "metrics.jsonl")
    assert {*run(tmp_path, "--resume", *mesh, count=after)[0]} == {0}
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_damaged_for_all(tmp_path, undisturbed):
    assert run(tmp_path)[0] == [0, 0]
    newest = next(iter((tmp_path / "checkpoints" / "10").rglob("d/*")))
    newest.write_bytes(newest.read_bytes()[:-1])
    statuses, _, _ = run(tmp_path, "--resume")
    assert statuses == [0, 0]
    assert (tmp_path / "damaged_checkpoints" / "10.0").is_dir()
    assert_same(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"of_second": ("--seeds", "4")}, "seeds"),
        ({"of_second": ("--seeds", "x")}, "seeds"),
        ({"of_second": ("--log-gradients",)}, "log_gradients"),
        ({"of_second": ("--mesh", "all")}, "mesh"),
        ({"trouble": "1 0 nodata"}, "text"),
        ({"words": ("--mesh", "seed=1")}, "mesh"),
        ({"words": ("--batch-size", "7"), "task": "Drawn"}, "mesh data"),
    ],
)
def test_an_error_at_the_start_ends_all_in_one_line(tmp_path, options, named):
    statuses, _, errors = run(tmp_path / "run", *options.pop("words", ()), **options)
    assert statuses == [2, 2]
    assert [len(lines) for lines in errors] == [1, 1]
    assert all(named in lines[0] and "process" in lines[0] for lines in errors)
    assert not (tmp_path / "run").exists()
