"""Files of one JSON object per line, such as metrics.jsonl: the measurements of a run by step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from attention_jax.runs.run_folder import JSON, write_text, writing


def add_line(path: Path, line: JSON) -> None:
    """Adds a line, with null for each number that is not finite.

    Raises:
        ValueError: the file cannot be written.
    """
    with writing("file", path), path.open("a") as file:
        file.write(_text(line))


def drop_lines_after(path: Path, step: int) -> None:
    """Drops the lines of later steps, which a resumed run writes again.

    Raises:
        ValueError: a line is damaged or has no step, or the file cannot be written.
    """
    lines = read_lines(path)
    if not all(isinstance(line.get("step"), int) for line in lines):
        raise ValueError(f"{path} cannot be read: each line must have a step")
    if path.exists():
        with writing("file", path):
            write_text(path, "".join(_text(line) for line in lines if line["step"] <= step))


def read_lines(path: Path) -> list[JSON]:
    """The complete lines of a file, with NaN for null in lists; [] if there is no file.

    Raises:
        ValueError: the file or one of its lines cannot be read.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        # A crash may have cut off the last line.
        parsed = [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for line in parsed:
        if not isinstance(line, dict):
            raise ValueError(f"{path} cannot be read: each line must be an object; got {line!r}")
        for name, value in line.items():
            if isinstance(value, list):
                line[name] = [math.nan if number is None else number for number in value]
    return parsed


def finite_or_null(value: Any) -> Any:
    """None for a number that is not finite, which JSON cannot hold; another value as it is.

    >>> [finite_or_null(value) for value in (0.5, math.nan, "dot")]
    [0.5, None, 'dot']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(line: JSON) -> str:
    numbers = {
        name: [*map(finite_or_null, value)] if isinstance(value, list) else value
        for name, value in line.items()
    }
    return json.dumps(numbers) + "\n"
