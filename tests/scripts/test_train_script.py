"""scripts/train.py as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.metrics_file import read_lines
from attention_jax.tasks.reversal import Reversal
from attention_jax.training import run
from attention_jax.training.settings import settings_of

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train.py"
FIRST_OF_TWO = ["--process-count", "2", "--process-index", "0"]
TINY = ["--dim", "8", "--hidden-dim", "7", "--batch-size", "5", "--max-length", "3", "--seeds", "1"]

OWN_SCORE = """
import dataclasses
from attention_jax import Score

@dataclasses.dataclass(frozen=True)
class Mine(Score):
    def pair(self, params, q_features, k_features):
        return 2 * q_features @ k_features.T
"""


def start(folder, *arguments):
    """The script in a process of its own, with a user's score lying beside it."""
    (folder / "my_scores.py").write_text(OWN_SCORE)
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_stopped_by_sigterm_and_resumed(tmp_path):
    folder = tmp_path / "run"
    arguments = ["--workdir", "run", "--score", "my_scores:Mine", "--steps", "1000"]
    arguments += ["--log-every", "10", "--checkpoint-every", "500", *TINY]
    process = start(tmp_path, *arguments)
    while process.poll() is None and not read_lines(folder / "metrics.jsonl"):
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert "--resume goes on from here" in err
    assert "Traceback" not in out + err
    step = Checkpoints(folder / "checkpoints").steps()[-1]
    assert 0 < step < 1000
    assert read_lines(folder / "metrics.jsonl")[-1]["step"] == step
    assert re.search(rf"^run: step {step} of 1000, 1 seeds, ", out, re.MULTILINE)
    assert json.loads((folder / "config.json").read_text())["model"]["score"] == "my_scores:Mine"

    process = start(tmp_path, *arguments, "--resume")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert err == ""
    assert "\nrun: step 1000 of 1000" in out
    steps = [line["step"] for line in read_lines(folder / "metrics.jsonl")]
    assert steps == list(range(10, 1010, 10))


# --- in this process ---


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def check_error(found, *named):
    status, out, err = found
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert all(name in err for name in named)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--score", "adit"], "score"),
        (["--score", "nowhere:Mine"], "nowhere"),
        (["--dim", "7"], "dim"),
        (["--steps", "0"], "steps"),
        (["--checkpoint-every", "30"], "checkpoint_every"),
        (["--min-length", "9"], "min_length"),
        (["--positions", "polar"], "--positions"),
        (["--mesh", "model=2"], "mesh"),
        (["--mesh", "data=4096"], "mesh"),
        (["--mesh"], "mesh"),
        (["--process-count", "2"], "process_count"),
        (["--coordinator", "here:1", *FIRST_OF_TWO], "--distributed"),
        (["--distributed", "--coordinator", "here", *FIRST_OF_TWO], "coordinator"),
        (["--distributed"], "joined"),
        (["--log-gradients", "every=often"], "log_gradients"),
        (["--log-gradients", "every=30"], "log_gradients"),
        (["--task", "reversl"], "task"),
        (["--task", "nowhere:Task"], "nowhere"),
        (["--task", "user_tasks:Rotat"], "'Rotate'"),
        (["--task", "user_tasks:Rotate", "--letters", "3"], "--letters"),
    ],
)
def test_bad_options(command, tmp_path, arguments, named):
    check_error(command("train", "--workdir", "run", *arguments), named)
    assert list(tmp_path.iterdir()) == []


# --- a user's part that breaks its contract ---

PAIRS = "    def pair(self, rng, length, *, longest):\n        return 2 * (((rng, length)),)\n"
FIELDS = "    name = 'mine'\n    model: ModelConfig = ModelConfig()\n"
TASK = FIELDS + "    train: TrainConfig = TrainConfig()\n"
INIT = "    def init(self, rng):\n        return {}\n"
BATCH = "    def batch(self, rng, *, size, length=None):\n        return {}\n"
WRONG_PARTS = [
    ("--score", "Score", "    size: int = 3\n", "must define pair(params, q_features, k_features)"),
    ("--score", "Score", "    def pair(self, q, k):\n        return q @ k.T\n",
     "pair must take (params, q_features, k_features): too many positional arguments"),
    ("--task", "SequenceTask", "    name = 'mine'\n", "must define pair(rng, length, *, longest)"),
    ("--task", "SequenceTask", "    name = 'mine'\n" + PAIRS.replace(", *, longest", ""),
     "pair must take (rng, length, *, longest): got an unexpected keyword argument 'longest'"),
    ("--task", "Task", TASK, "must define init(rng)"),
    ("--task", "Task", TASK + INIT, "must define batch(rng, *, size, length=None)"),
    ("--task", "Task", TASK + INIT + BATCH, "must define loss(params, batch, rng)"),
    ("--task", "Task", TASK + INIT.replace(", rng", ""), "init must take (rng): too many"),
    ("--task", "Task", FIELDS, "must have a field train; got none"),
]  # fmt: skip


@pytest.mark.parametrize(("option", "base", "body", "message"), WRONG_PARTS)
def test_a_part_that_breaks_its_contract_is_one_line(
    command, tmp_path, monkeypatch, option, base, body, message
):
    (tmp_path / "broken_part.py").write_text(
        "import dataclasses\nfrom attention_jax import Score\n"
        "from attention_jax.nn import ModelConfig\n"
        "from attention_jax.tasks.sequences import SequenceTask\n"
        "from attention_jax.training.task import Task, TrainConfig\n\n\n"
        f"@dataclasses.dataclass(frozen=True)\nclass Mine({base}):\n{body}"
    )
    monkeypatch.delitem(sys.modules, "broken_part", raising=False)
    check_error(command("train", "--workdir", "run", option, "broken_part:Mine"), message)
    assert not (tmp_path / "run").exists()


def test_help_names_every_option_and_its_default(command):
    status, out, err = command("train", "--help")
    assert (status, err) == (0, "")
    for text in ("--workdir", "--score", "--mask-padding", "--resume", "(default: 2500)"):
        assert text in out


def test_what_the_workdir_holds_is_kept(command, tmp_path):
    (tmp_path / "file").write_text("mine")
    check_error(command("train", "--workdir", "file"), "workdir")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(settings_of(Reversal())))
    check_error(command("train", "--workdir", "run"), "--resume")
    found = command("train", "--workdir", "run", "--resume", "--score", "dot", "--steps", 5)
    check_error(found, "model.score", "'dot'", "train.steps")


def test_ctrl_c_before_training(command, monkeypatch):
    monkeypatch.setattr(run, "train_run", mock.Mock(side_effect=KeyboardInterrupt))
    assert command("train", "--workdir", "run") == (130, "", "")


@pytest.mark.parametrize(
    ("step", "exhausted", "status", "messages"),
    [
        (6, False, 143, ["stopped by a signal; --resume goes on from here"]),
        (10, False, 0, []),  # the signal came while the last step was saved
        (6, True, 0, ["stopped early: validation no longer improved"]),
    ],
)
def test_sigterm_during_training(command, monkeypatch, step, exhausted, status, messages):
    def train_run(task, workdir, **_):
        end = {"step": step, "interrupted": 143, "exhausted": exhausted}
        return run.TrainedRun(task, {}, seconds=3.0, **end)

    monkeypatch.setattr(run, "train_run", train_run)
    arguments = ["--workdir", "run", "--seeds", 2, "--steps", 10, "--log-every", 1]
    found = command("train", *arguments, "--checkpoint-every", 1)
    assert found[:1] == (status,)
    summary = f"run: step {step} of 10, 2 seeds, 3 s (all seeds together)"
    assert " ".join("".join(found[1:]).split()) == " ".join([summary, *messages])
