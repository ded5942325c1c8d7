"""scripts/train.py as a user meets it, in this process."""

import json
import math
from unittest import mock

import pytest
from command_lines import check_error

from attention_jax.tasks.reversal import Reversal
from attention_jax.training import run
from attention_jax.training.settings import settings_of


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    words = ("--log-gradients", "--clip-norm", "inf", "--no-mask-padding")
    assert command("train", "--workdir", "run", *words) == (130, "", "")
    task, options = run.train_run.call_args.args[0], run.train_run.call_args.kwargs
    assert (options["log_gradients"], task.train.clip_norm) == (100, math.inf)
    assert not task.model.mask_padding


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
