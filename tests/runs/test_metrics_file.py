"""Metrics by step: lines of JSON that survive crashes."""

import json
import math
from pathlib import Path

import pytest

from attention_jax.runs.metrics_file import add_line, drop_lines_after, last_line, read_lines


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_are_json_with_null_for_what_is_not_finite(path):
    assert read_lines(path) == []
    add_line(path, {"step": 5, "loss": [0.1, 1 / 3]})
    add_line(path, {"step": 10, "loss": [math.nan, math.inf, 2.0], "seconds": None})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 5, "loss": [0.1, 1 / 3]}
    assert second == {"step": 10, "loss": [None, None, 2.0], "seconds": None}
    first, second = read_lines(path)
    assert first == {"step": 5, "loss": [0.1, 1 / 3]}
    assert [math.isnan(value) for value in second["loss"]] == [True, True, False]
    assert second["seconds"] is None


def test_later_lines_and_a_cut_one_are_dropped(path):
    drop_lines_after(path, 3)
    assert not path.exists()
    assert last_line(path) == {}
    for step in (5, 10, 15):
        add_line(path, {"step": step, "loss": [math.nan, 1 / step]})
    lines = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_lines(path)] == [5, 10, 15]
    assert [last_line(path, step).get("step") for step in (4, 5, 14, 99)] == [None, 5, 10, 15]
    assert math.isnan(last_line(path)["loss"][0])
    drop_lines_after(path)
    assert path.read_text() == "".join(lines)
    drop_lines_after(path, 10)
    assert path.read_text() == "".join(lines[:2])
    drop_lines_after(path, 4)
    assert (path.read_text(), read_lines(path), last_line(path)) == ("", [], {})


def test_only_the_end_of_a_long_file_is_parsed(path):
    """What stands before the last lines may be as long as it likes: here it is no JSON at all."""
    path.write_bytes(b"?\n" * 2**20)
    for step in (5, 10):
        add_line(path, {"step": step})
    assert last_line(path, 9) == {"step": 5}
    drop_lines_after(path, 5)
    assert path.stat().st_size == 2**21 + len('{"step": 5}\n')


@pytest.mark.parametrize("damaged", ['{"st', "[5]", '{"loss": [1.0]}', '{"step": "two"}'])
def test_a_damaged_line_is_named_and_stays(path, damaged):
    path.write_text(f'{{"step": 5}}\n{damaged}\n{{"step": 15}}\n')
    before = path.read_text()
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be read"):
        drop_lines_after(path, 5)
    assert path.read_text() == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_line_on_a_full_disk(path):
    path.symlink_to("/dev/full")
    with pytest.raises(ValueError, match=r"metrics.jsonl cannot be written: No space left"):
        add_line(path, {"step": 10, "loss": [0.25]})
