"""Files of one JSON object per line, such as metrics.jsonl: the measurements of a run by step."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attention_jax.runs.run_folder import JSON, writing


def add_line(path: Path, line: JSON) -> None:
    """Adds a line, with null for each number that is not finite.

    Raises:
        ValueError: the file cannot be written.
    """
    numbers = {
        name: [*map(finite_or_null, value)] if isinstance(value, list) else value
        for name, value in line.items()
    }
    with writing("file", path), path.open("a", encoding="ascii", newline="\n") as file:
        file.write(json.dumps(numbers) + "\n")


def drop_lines_after(path: Path, step: int | None = None) -> None:
    """Drops the lines of later steps, which a resumed run writes again, and a line that is cut off.

    Args:
        path: the file; its lines are parsed from the last up to the first one that stays.
        step: the last one that stays; None for all of them.

    Raises:
        ValueError: a line is damaged or has no step, or the file cannot be written.
    """
    ends = (
        end for end, line in _from_end(path) if step is None or _step_of_line(path, line) <= step
    )
    length = next(ends, 0)
    if path.exists() and length < path.stat().st_size:
        with writing("file", path):
            os.truncate(path, length)


def last_line(path: Path, step: float = math.inf) -> JSON:
    """The last line of this step or an earlier one, as `read_lines` gives it; {} without one.

    Raises:
        ValueError: this line or a later one cannot be read.
    """
    lines = (line for _, line in _from_end(path) if _step_of_line(path, line) <= step)
    return _parsed(path, next(lines, b"{}"))


def read_lines(path: Path) -> list[JSON]:
    """The complete lines of a file, with NaN for null in lists; [] if there is no file.

    Raises:
        ValueError: the file or one of its lines cannot be read.
    """
    return [_parsed(path, line) for _, line in _from_end(path)][::-1]


def finite_or_null(value: Any) -> Any:
    """None for a number that is not finite, which JSON cannot hold; another value as it is.

    >>> [finite_or_null(value) for value in (0.5, math.nan, "dot")]
    [0.5, None, 'dot']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each line ends, and the line; from the last, unless a crash has cut it off, back."""
    try:
        text = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    end = len(text)
    for line in reversed(text.splitlines(keepends=True)):
        if line.endswith(b"\n"):
            yield end, line
        end -= len(line)


def _parsed(path: Path, text: bytes) -> JSON:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"{path} cannot be read: each line must be an object; got {line!r}")
    for name, value in line.items():
        if isinstance(value, list):
            line[name] = [math.nan if number is None else number for number in value]
    return line


def _step_of_line(path: Path, text: bytes) -> int:
    step = _parsed(path, text).get("step")
    if not isinstance(step, int):
        raise ValueError(f"{path} cannot be read: each line must have a step")
    return step
