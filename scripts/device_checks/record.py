"""The rows of a check in FOLDER/device.json, each written as soon as it is measured."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from attention_jax.runs.environment import environment
from attention_jax.runs.progress import say
from attention_jax.runs.run_folder import read_json, write_json
from benchmarks.measure import JSON

SCHEMA = 1  # of device.json
_GRACE_SECONDS = 3.0  # after the end, for threads that stop as soon as they see it
NOT_MEASURED: JSON = {"not measured": "no time left"}  # the next call measures it

_PACKAGES = "jax-cuda12-plugin jax-cuda13-plugin nvidia-cudnn-cu12 nvidia-cudnn-cu13 libtpu torch"
# Rows of other values of these are never in one file.
_FIXED = ("device", "devices", "driver", "python", "packages", "sources", "shrink")


class OutOfTimeError(Exception):
    """No time is left, and programs still compile."""


class Record:
    """Rows, each known by (part, work, contestant), and the time that is left.

    Args:
        folder: of device.json.
        seconds: for all parts.
        shrink: what lengths are divided by.

    Attributes:
        about: device, versions and commit.
        leaves_threads: whether threads of `in_threads` may still work.

    Raises:
        ValueError: the file is damaged, or its rows are of another device, version or source.
    """

    def __init__(self, folder: Path, seconds: float, shrink: int) -> None:
        self.folder, self.shrink, self.about = folder, shrink, _about(shrink)
        self.leaves_threads = False
        self._path, self._lock, self._closed = folder / "device.json", threading.Lock(), False
        self._start = time.monotonic()
        self._end = self._deadline = self._start + seconds
        self._rows: dict[tuple[str, str, str], JSON] = {}
        if self._path.exists():
            content = read_json(self._path)
            about = content.get("environment", {})
            if others := [name for name in _FIXED if about.get(name) != self.about[name]]:
                names = ", ".join(others)
                raise ValueError(f"out {folder} holds rows of another {names}; name another folder")
            rows = content["rows"]
            self._rows = {(row["part"], row["work"], row["contestant"]): row for row in rows}

    def rows(self, part: str = "") -> list[JSON]:
        """All rows, or those of a part."""
        return [row for row in [*self._rows.values()] if part in ("", row["part"])]

    def has(self, part: str, work: str, contestant: str = "ours") -> bool:
        """Whether there is a row that stays."""
        row = self._rows.get((part, work, contestant))
        return row is not None and "not measured" not in row

    def add(self, part: str, work: str, contestant: str = "ours", **entries: Any) -> None:
        """Writes a row; prints what was measured. After `close` it does nothing. For any thread."""
        row = {"part": part, "work": work, "contestant": contestant, **entries}
        with self._lock:
            if self._closed or self.has(part, work, contestant):
                return
            self._rows[part, work, contestant] = row
            content = {"schema": SCHEMA, "environment": self.about, "rows": self.rows()}
            write_json(self._path, content)
        if not entries.keys() & {"not measured", "not served", "absent"}:
            shown = {name: value for name, value in entries.items() if name != "turns"}
            self.note(f"{part}: {work}, {contestant}: {json.dumps(shown)}")

    def begin(self, part: str, share: float) -> None:
        """Gives a part its share of the time that is left."""
        self._deadline = time.monotonic() + share * max(0.0, self._end - time.monotonic())
        self.note(f"{part}: {self.left():.0f} s for what is not measured yet")

    def left(self) -> float:
        """The seconds that are left for this part."""
        return self._deadline - time.monotonic()

    def close(self) -> None:
        """Ends the part: threads that still run start nothing more, and write no more rows."""
        with self._lock:
            self._closed, self._deadline = True, 0.0

    def note(self, text: str) -> None:
        """Prints a line with the time that has passed and that is left."""
        now = time.monotonic()
        say(f"[{now - self._start:.0f} s, {self._end - now:.0f} s left] {text}", error=True)

    def in_threads(self, function: Callable[..., Any], cases: Iterable[Sequence]) -> list[Any]:
        """The function's result for each case.

        Ctrl-C and the end of all time leave the threads behind, see `leaves_threads`: a program
        that compiles cannot be stopped.

        Raises:
            OutOfTimeError: some threads still work when no time is left.
        """
        pool = ThreadPoolExecutor(max(2, min(12, os.cpu_count() or 1)))
        self.leaves_threads = True  # also if Ctrl-C comes while threads are started
        try:
            futures = [pool.submit(function, *case) for case in cases]
            end = max(self._end, time.monotonic()) + _GRACE_SECONDS
            results = [future.result(max(0.0, end - time.monotonic())) for future in futures]
            self.leaves_threads = False
            return results
        except TimeoutError:
            raise OutOfTimeError from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _about(shrink: int) -> JSON:
    root, device = Path(__file__).parents[2], jax.devices()[0]
    folders = (root / name for name in ("benchmarks", "experiments", "scripts"))
    about = environment(*folders, packages=_PACKAGES.split())
    memory = (device.memory_stats() or {}).get("bytes_limit")  # a CPU has none
    driver = str(device.client.platform_version)
    return about | {"driver": driver, "memory_bytes": memory, "shrink": shrink}
