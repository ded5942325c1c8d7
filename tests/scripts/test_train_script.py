"""scripts/train.py as a user meets it, in this process."""

import math
from unittest import mock

import pytest

from attention_jax.training import run


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
