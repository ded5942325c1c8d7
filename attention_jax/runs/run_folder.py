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
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """The folder that Orbax manages."""
        return self.path / "checkpoints"

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint, which may be damaged; 0 if there is none."""
        # Read without Orbax, which would wait for the other processes of the run.
        paths = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return max((int(path.name) for path in paths if path.name.isdecimal()), default=0)

    @property
    def metrics(self) -> Path:
        """Training metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def gradients(self) -> Path:
        """Gradient statistics, one JSON object per line."""
        return self.path / "gradients.jsonl"

    @property
    def validation(self) -> Path:
        """Validation metrics, one JSON object per line."""
        return self.path / "validation.jsonl"

    def create(
        self,
        config: JSON,
        *,
        resume: bool,
        completed: Callable[[JSON], JSON] = dict,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> None:
        """Makes the folder of a new run, or checks that the run in it can be resumed.

        Args:
            config: all settings, for config.json.
            resume: whether to resume the run that is there.
            completed: adds to stored settings the defaults of settings that are newer.
            files: what else to write, by name.

        Raises:
            ValueError: the path is a file or cannot be written; or it holds a run and `resume` is
                False; or it holds a run of another or an unknown configuration.
        """
        with writing("workdir", self.path):
            self.check(config, resume=resume, completed=completed)
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", config)
            for name, content in files.items():
                replace_file(self.path / name, content)
            if not (self.path / "env.json").exists():
                write_json(self.path / "env.json", environment())
            self.checkpoints.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def begun(
        self,
        config: JSON,
        *,
        resume: bool,
        completed: Callable[[JSON], JSON] = dict,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> Iterator[None]:
        """`create`, and `locked` while entered: of two simultaneous starts, one succeeds.

        Raises:
            ValueError: see `create` and `locked`.
        """
        with writing("workdir", self.path):
            self.check(config, resume=resume, completed=completed)  # before anything is made
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.create(config, resume=resume, completed=completed, files=files)
            yield

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While entered, no other process can train in the folder.

        The lock belongs to the operating system (`flock` of the file "lock"): it ends with the
        process that holds it, even if that process is killed.

        Raises:
            ValueError: another process is training in the folder, or it cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with writing("workdir", self.path):
                file = stack.enter_context((self.path / "lock").open("a+"))
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
            with writing("workdir", self.path):
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
        config = json.loads(json.dumps(config))  # as it will be read back
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
            old = json.loads(json.dumps(completed(self.read_config())))
        except ValueError as error:
            raise ValueError(f"workdir {self.path}: {error}") from error
        stored, config = _flat(old), _flat(config)
        names = sorted(stored.keys() | config.keys())
        different = [name for name in names if stored.get(name) != config.get(name)]
        if different:
            described = "; ".join(
                f"{name} was {stored.get(name)!r}, now {config.get(name)!r}" for name in different
            )
            raise ValueError(
                f"workdir {self.path} holds a run of another configuration: {described}. Resume"
                " with the same settings, or name another folder"
            )


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
    replace_file(path, text)


def _flat(config: JSON) -> JSON:
    """Nested settings under dotted names."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": leaf for inner, leaf in _flat(value).items()})
        else:
            flat[name] = value
    return flat


@contextlib.contextmanager
def writing(kind: str, path: Path) -> Iterator[None]:
    """Turns an OSError into a ValueError that names the folder or file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{kind} {path} cannot be written: {error.strerror or error}") from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Writes a file under another name, then renames it: readers see the old file or the new."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # otherwise a power cut may leave an empty file
    os.replace(temporary, path)
