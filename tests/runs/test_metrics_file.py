"""Metrics by step: lines of JSON that survive crashes, and TensorBoard events."""

import importlib.util
import json
import math
import sys
import types
from pathlib import Path

import pytest

from attention_jax.runs.metrics_file import MetricsFile, read_lines, require_tensorboard


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_metrics_are_lines_of_json(path):
    assert read_lines(path) == []
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [1.5, 0.1], "accuracy": [0.0, 1.0]})
        assert path.read_text().endswith("\n")  # at once: a reader may follow the run
        metrics.write(10, {"loss": [0.5, 1 / 3], "accuracy": [0.25, 1.0]})
    expected = [
        {"step": 5, "loss": [1.5, 0.1], "accuracy": [0.0, 1.0]},
        {"step": 10, "loss": [0.5, 1 / 3], "accuracy": [0.25, 1.0]},
    ]
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected
    assert read_lines(path) == expected


def test_numbers_that_are_not_finite_are_null(path):
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [math.nan, math.inf, 2.0]})
    assert path.read_text() == '{"step": 5, "loss": [null, null, 2.0]}\n'
    (line,) = read_lines(path)
    assert [math.isnan(value) for value in line["loss"]] == [True, True, False]


def test_later_lines_and_a_cut_one_are_dropped(path):
    lines = [f'{{"step": {step},  "loss": [0.1]}}\n' for step in (5, 10, 15)]
    path.write_text("".join(lines) + '{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [5, 10, 15]
    with MetricsFile(path, after_step=10) as metrics:
        assert metrics.last_step == 15
        assert path.read_text() == "".join(lines[:2])
        metrics.write(15, {"loss": [0.2]})
    assert path.read_text() == "".join(lines[:2]) + '{"step": 15, "loss": [0.2]}\n'


@pytest.mark.parametrize("damaged", ['{"st', "[5]"])
def test_a_damaged_line_is_named_and_stays(path, damaged):
    path.write_text(f'{{"step": 5}}\n{damaged}\n{{"step": 15}}\n')
    before = path.read_text()
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read"):
        read_lines(path)
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read"):
        MetricsFile(path, after_step=5)
    assert path.read_text() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_line_on_a_full_disk(path):
    with MetricsFile(path, after_step=0) as metrics:
        metrics.write(5, {"loss": [0.5]})
        metrics._file.close()
        metrics._file = Path("/dev/full").open("w")  # noqa: SIM115
        with pytest.raises(ValueError, match=r"metrics.jsonl cannot be written: No space left"):
            metrics.write(10, {"loss": [0.25]})
    assert [line["step"] for line in read_lines(path)] == [5]


# --- TensorBoard ---


def test_tensorboard_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[tensorboard\]'") as error:
        require_tensorboard()
    assert "\n" not in str(error.value)


def test_tensorboard_gets_every_number(path, tmp_path, monkeypatch):
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
    with MetricsFile(path, after_step=10, tensorboard=events) as metrics:
        metrics.write(15, {"loss": [0.5, 0.25]})
    assert calls == [
        (str(events), 11),
        ("loss/seed_0", 0.5, 15),
        ("loss/seed_1", 0.25, 15),
        "closed",
    ]
