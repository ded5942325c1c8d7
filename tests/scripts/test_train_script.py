"""scripts/train.py as a user meets it, in this process."""

import json
import sys
from unittest import mock

import pytest
from command_lines import check_error

from attention_jax.tasks.reversal import Reversal
from attention_jax.training import run
from attention_jax.training.settings import settings_of


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--score", "nowhere:Mine"], "nowhere"),
        (["--dim", "7"], "dim"),
        (["--positions", "polar"], "--positions"),
        (["--mesh", "data=4096"], "mesh"),
        (["--mesh"], "mesh"),
        (["--log-gradients", "every=often"], "log_gradients"),
        (["--task", "user_tasks:Rotate", "--letters", "3"], "--letters"),
    ],
)
def test_bad_options(command, tmp_path, arguments, named):
    check_error(command("train", "--workdir", "run", *arguments), named)
    assert list(tmp_path.iterdir()) == []


# --- a task of a user that breaks its contract ---

PAIRS = "    def pair(self, rng, length, *, longest):\n        return 2 * (((rng, length)),)\n"
FIELDS = "    name = 'mine'\n    model: ModelConfig = ModelConfig()\n"
TASK = FIELDS + "    train: TrainConfig = TrainConfig()\n"
INIT = "    def init(self, rng):\n        return {}\n"
BATCH = "    def batch(self, rng, *, size, length=None):\n        return {}\n"
WRONG_PARTS = [
    ("SequenceTask", "    name = 'mine'\n", "must define pair(rng, length, *, longest)"),
    ("SequenceTask", "    name = 'mine'\n" + PAIRS.replace(", *, longest", ""),
     "pair must take (rng, length, *, longest): got an unexpected keyword argument 'longest'"),
    ("Task", TASK, "must define init(rng)"),
    ("Task", TASK + INIT, "must define batch(rng, *, size, length=None)"),
    ("Task", TASK + INIT + BATCH, "must define loss(params, batch, rng)"),
    ("Task", TASK + INIT.replace(", rng", ""), "init must take (rng): too many"),
    ("Task", FIELDS, "must have a field train; got none"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "body", "message"), WRONG_PARTS)
def test_a_task_that_breaks_its_contract_is_one_line(
    command, tmp_path, monkeypatch, base, body, message
):
    (tmp_path / "broken_part.py").write_text(
        "import dataclasses\n"
        "from attention_jax.nn import ModelConfig\n"
        "from attention_jax.tasks.sequences import SequenceTask\n"
        "from attention_jax.training.task import Task, TrainConfig\n\n\n"
        f"@dataclasses.dataclass(frozen=True)\nclass Mine({base}):\n{body}"
    )
    monkeypatch.delitem(sys.modules, "broken_part", raising=False)
    check_error(command("train", "--workdir", "run", "--task", "broken_part:Mine"), message)
    assert not (tmp_path / "run").exists()


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
    ("step", "status", "messages"),
    [
        (6, 143, ["stopped by a signal; --resume goes on from here"]),
        (10, 0, []),  # the signal came while the last step was saved
    ],
)
def test_sigterm_during_training(command, monkeypatch, step, status, messages):
    def train_run(task, workdir, **_):
        return run.TrainedRun(task, {}, step, seconds=3.0, interrupted=143)

    monkeypatch.setattr(run, "train_run", train_run)
    arguments = ["--workdir", "run", "--seeds", 2, "--steps", 10, "--log-every", 1]
    found = command("train", *arguments, "--checkpoint-every", 1)
    assert found[:1] == (status,)
    summary = f"run: step {step} of 10, 2 seeds, 3 s (all seeds together)"
    assert " ".join("".join(found[1:]).split()) == " ".join([summary, *messages])
