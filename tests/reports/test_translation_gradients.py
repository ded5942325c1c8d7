"""Gradients of a translation run need the text that it learned from."""

from unittest import mock

import pytest
from stand_in_training import scaled_at_each_step
from translation_cases import run_task, write_text

from attention_jax.tasks.gradients import load_analyzed_run
from attention_jax.training.run import train_run


def test_text_that_has_changed_is_refused(tmp_path):
    text = write_text(tmp_path)
    with mock.patch("attention_jax.training.run.train", scaled_at_each_step):
        train_run(run_task(text), tmp_path / "run")
    load_analyzed_run(tmp_path / "run")
    path = text / "validation.de"
    path.write_text(path.read_text().replace("e", "a", 1))
    with pytest.raises(ValueError, match=r"text_sha256\.validation has changed"):
        load_analyzed_run(tmp_path / "run")
