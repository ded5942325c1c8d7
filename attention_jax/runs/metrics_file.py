"""Metrics by step: one JSON object per line, and TensorBoard events if wanted."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from attention_jax.runs.run_folder import JSON, write_text, writing


class MetricsFile:
    """A file of metrics such as metrics.jsonl, and TensorBoard events if wanted.

    Args:
        path: the file.
        after_step: lines of later steps are dropped: training resumes from this step.
        tensorboard: folder for TensorBoard events, or None; see `require_tensorboard`.
    """

    def __init__(self, path: Path, *, after_step: int, tensorboard: Path | None = None):
        self._path = path
        lines = _lines(path)
        if not all(isinstance(content.get("step"), int) for _, content in lines):
            raise ValueError(f"{path} cannot be read: each line must have a step")
        kept = [line for line, content in lines if content["step"] <= after_step]
        self.last_step = max((content["step"] for _, content in lines), default=0)
        with writing("file", path):
            write_text(path, "".join(kept))
            self._file = path.open("a")
        self._events = None
        if tensorboard is not None:
            import tensorboardX

            self._events = tensorboardX.SummaryWriter(str(tensorboard), purge_step=after_step + 1)

    def write(self, step: int, metrics: dict[str, list[float]]) -> None:
        """Adds one line: the step, and for each metric one number per seed, null if not finite.

        Raises:
            ValueError: the file cannot be written.
        """
        numbers = {name: [*map(finite_or_null, values)] for name, values in metrics.items()}
        with writing("file", self._path):
            self._file.write(json.dumps({"step": step, **numbers}) + "\n")
            self._file.flush()
        if self._events is not None:
            for name, values in metrics.items():
                for index, value in enumerate(values):
                    self._events.add_scalar(f"{name}/seed_{index}", value, step)

    def sync(self) -> None:
        """Returns once all lines are on disk, safe from a power cut."""
        with writing("file", self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # `write` has already raised an error
            self._file.close()
        if self._events is not None:
            self._events.close()


def require_tensorboard() -> None:
    """Raises ValueError unless TensorBoard events can be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "tensorboard needs the package tensorboardX: .venv/bin/pip install -e '.[tensorboard]'"
        )


def finite_or_null(value: Any) -> Any:
    """None for a number that is not finite, which JSON cannot hold; another value as it is.

    >>> [finite_or_null(value) for value in (0.5, math.nan, "dot")]
    [0.5, None, 'dot']
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: Path) -> list[JSON]:
    """The lines of a file such as metrics.jsonl or timing.jsonl; in lists, NaN stands for null."""

    def numbers(value: Any) -> Any:
        return [math.nan if x is None else x for x in value] if isinstance(value, list) else value

    return [
        {name: numbers(value) for name, value in content.items()} for _, content in _lines(path)
    ]


def _lines(path: Path) -> list[tuple[str, JSON]]:
    """The complete lines of a file, as text and parsed."""
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        # A crash may have cut off the last line.
        parsed = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for line, content in parsed:
        if not isinstance(content, dict):
            raise ValueError(f"{path} cannot be read: each line must be an object; got {line!r}")
    return parsed
