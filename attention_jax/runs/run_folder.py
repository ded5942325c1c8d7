"""A run's folder: config.json, env.json, metrics.jsonl, timing.jsonl, checkpoints/ and others."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attention_jax.runs.environment import environment
from attention_jax.runs.progress import warn

JSON = dict[str, Any]

# No further files for a new run folder.
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_BEFORE_CONFIG = {"lock", "config.json.new"}  # all that a start may leave if it is cut off


class RunFolder:
    """The files of one run: its settings, its environment, its metrics and its checkpoints.

    Args:
        path: the folder.

    Attributes:
        path: the folder.
        checkpoints: the folder of `Checkpoints`.
        metrics: training metrics, one JSON object per line.
        gradients: gradient statistics, one JSON object per line.
        validation: validation metrics, one JSON object per line.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.metrics = self.path / "metrics.jsonl"
        self.gradients = self.path / "gradients.jsonl"
        self.validation = self.path / "validation.jsonl"

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, which may be damaged; 0 if there is none."""
        return max(saved_steps(self.checkpoints), default=0)

    @contextlib.contextmanager
    def begun(
        self,
        config: JSON,
        *,
        resume: bool,
        completed: Callable[[JSON], JSON] = dict,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> Iterator[None]:
        """Makes the folder of a new run, or opens the run in it; while entered, no other can.

        Args:
            config: all settings, for config.json.
            resume: whether to resume the run that is there.
            completed: adds to stored settings the defaults of settings that are newer.
            files: what else to write, by name.

        Raises:
            ValueError: the path is a file or cannot be written; or it holds a run and `resume` is
                False; or it holds a run of another or an unknown configuration; or another process
                trains in it.
        """
        with contextlib.ExitStack() as stack:
            with writing("workdir", self.path):
                self.check(config, resume=resume, completed=completed)  # before anything is made
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(self._locked())
                # Another start may have been faster; of two at the same time, one succeeds.
                self.check(config, resume=resume, completed=completed)
                write_json(self.path / "config.json", config)
                for name, content in files.items():
                    write_bytes(self.path / name, content)
                if not (self.path / "env.json").exists():
                    write_json(self.path / "env.json", environment())
                self.checkpoints.mkdir(exist_ok=True)
            yield

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds `flock` of the file "lock", which ends with this process, even if it is killed."""
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ValueError(
                    f"workdir {self.path} is in use: {file.read().strip() or 'another process'} is"
                    " training in it; wait for its end, or name another folder"
                ) from None
            except OSError as error:
                warn(
                    f"workdir {self.path} cannot be locked ({error.strerror or error}); make sure"
                    " that no other process trains in it"
                )
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
            yield

    def add_timing(self, timing: JSON) -> None:
        """Adds a line to timing.jsonl, which has one line per session."""
        path = self.path / "timing.jsonl"
        with writing("file", path), path.open("a") as file:
            file.write(json.dumps(timing) + "\n")

    def read_config(self) -> JSON:
        """The settings in config.json.

        Raises:
            ValueError: the folder holds no run, or its config.json is damaged.
        """
        path = self.path / "config.json"
        try:
            config = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"workdir must be the folder of a training run; {self.path} has no config.json"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} cannot be read: it must hold a JSON object; got {config!r}")
        return config

    def check(
        self, config: JSON, *, resume: bool, completed: Callable[[JSON], JSON] = dict
    ) -> None:
        """Raises ValueError unless the run can begin in the folder, or resume; changes nothing."""
        check_folder("workdir", self.path)
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if "config.json" in names:
            if not resume:
                raise ValueError(
                    f"workdir {self.path} already holds a run; add resume=True to go on with it, or"
                    " name another folder"
                )
            self._check_same(config, completed)
        elif names - _BEFORE_CONFIG:
            raise ValueError(
                f"workdir must be new, empty, or the folder of a run; {self.path} holds other"
                " files and no config.json"
            )

    def _check_same(self, config: JSON, completed: Callable[[JSON], JSON]) -> None:
        try:
            stored = _flat(completed(self.read_config()))
        except ValueError as error:
            raise ValueError(f"workdir {self.path}: {error}") from error
        config = _flat(config)
        different = [
            f"{name} was {stored.get(name)!r}, now {config.get(name)!r}"
            for name in sorted(stored.keys() | config.keys())
            if stored.get(name) != config.get(name)
        ]
        if different:
            raise ValueError(
                f"workdir {self.path} holds a run of another configuration:"
                f" {'; '.join(different)}. Resume with the same settings, or name another folder"
            )


def _flat(config: JSON) -> JSON:
    """Nested settings under dotted names, as they are read back from JSON."""
    flat = {}
    for name, value in json.loads(json.dumps(config)).items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": leaf for inner, leaf in _flat(value).items()})
        else:
            flat[name] = value
    return flat


def saved_steps(checkpoints: Path) -> list[int]:
    """The steps in the folder of checkpoints, damaged ones included; the newest last."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


# --- files and folders ---


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError if `path` exists and is no folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder; {path} is a file")


def make_folder(name: str, path: Path) -> None:
    """Makes the folder if it is missing; raises ValueError if it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be made: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{name} {path} cannot be written")


def check_output(path: Path | None) -> None:
    """Raises ValueError unless `path` is None or a file that can be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"out must be a file in a folder that can be written; got {path}")


@contextlib.contextmanager
def writing(kind: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the folder or file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{kind} {path} cannot be written: {error.strerror or error}") from error


def write_json(path: Path, content: Any) -> None:
    """Writes JSON to a file, which is never left half written; a list of numbers is one line."""
    # JSON has no line break inside a string, so these brackets are those of lists.
    lists = re.compile(r"\[\n([^\[\]{}]*)\n *\]")
    text = lists.sub(_on_one_line, json.dumps(content, indent=2))
    write_text(path, text + "\n")


def _on_one_line(found: re.Match[str]) -> str:
    return f"[{' '.join(line.strip() for line in found[1].splitlines())}]"


def write_text(path: Path, text: str) -> None:
    """Writes a file, which is never left half written."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file under another name, then renames it: readers see the old file or the new."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Returns once a file is on disk; otherwise a power cut may leave it empty."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
