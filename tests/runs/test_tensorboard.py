"""Metrics for TensorBoard, where the package tensorboardX is installed."""

import importlib.util
import sys
import types

import pytest

from attention_jax.runs.metrics_file import MetricsFile, require_tensorboard


def test_tensorboard_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[tensorboard\]'") as error:
        require_tensorboard()
    assert "\n" not in str(error.value)


def test_tensorboard_gets_every_number(tmp_path, monkeypatch):
    calls = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

        def close(self):
            calls.append("closed")

    module = types.SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    events = tmp_path / "tensorboard"
    with MetricsFile(tmp_path / "m.jsonl", after_step=10, tensorboard=events) as metrics:
        metrics.write(15, {"loss": [0.5, 0.25]})
    assert calls == [
        (str(events), 11),
        ("loss/seed_0", 0.5, 15),
        ("loss/seed_1", 0.25, 15),
        "closed",
    ]
