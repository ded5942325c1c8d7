"""A run's folder: config.json, env.json, metrics.jsonl, timing.jsonl, checkpoints/, and more."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

JSON = dict[str, Any]

NO_FILES: Mapping[str, bytes] = MappingProxyType({})
_BEFORE_CONFIG = {"lock", "config.json.new"}  # all that a start that was cut off may leave


class RunFolder:
    """Where one run keeps what it is, where it ran, how it went and its checkpoints.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        """The folder that Orbax owns."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def gradients(self) -> Path:
        """One JSON object a line, where training logs gradients."""
        return self.path / "gradients.jsonl"

    @property
    def validation(self) -> Path:
        """One JSON object a line, where training validates."""
        return self.path / "validation.jsonl"

    def create(
        self,
        config: JSON,
        *,
        resume: bool,
        completed: Callable[[JSON], JSON] = dict,
        files: Mapping[str, bytes] = NO_FILES,
    ) -> None:
        """Makes the folder and writes what the run is; or checks that it is the run to go on with.

        `completed` gives a stored configuration the settings that are younger than it. `files` are
        what else the folder keeps of what the run is, by name.

        Raises:
            ValueError: the path is a file or cannot be written, it holds a run already and
                `resume` is False, or it holds one of another or an unknown configuration.
        """
        with _written("workdir", self.path):
            self.check(config, resume=resume, completed=completed)
            self.path.mkdir(parents=True, exist_ok=True)
            write_json(self.path / "config.json", config)
            for name, content in files.items():
                _replace(self.path / name, content)
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
        """`create`, and `locked` while entered: of two that begin at once one writes, and goes on.

        Raises:
            ValueError: as `create` and `locked` say.
        """
        with _written("workdir", self.path):
            self.check(config, resume=resume, completed=completed)  # before anything is made
            self.path.mkdir(parents=True, exist_ok=True)
        with self.locked():
            self.create(config, resume=resume, completed=completed, files=files)
            yield

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While entered, no other process can be: two that train in one folder would spoil it.

        The lock is the operating system's (`flock` of the file "lock"): it ends with the process
        that holds it, however that ends.

        Raises:
            ValueError: another process is training here, or the folder cannot be written.
        """
        with contextlib.ExitStack() as stack:
            with _written("workdir", self.path):
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
                print(
                    f"warning: workdir {self.path} cannot be locked ({error.strerror or error});"
                    " see to it that nobody else trains in it",
                    file=sys.stderr,
                )
            with _written("workdir", self.path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}\n")
                file.flush()
            yield

    def add_timing(self, timing: JSON) -> None:
        """Adds a line to timing.jsonl: one a session, apart from what a resumed run repeats."""
        path = self.path / "timing.jsonl"
        with _written("file", path), path.open("a") as file:
            file.write(json.dumps(timing) + "\n")

    def read_config(self) -> JSON:
        """What the run is.

        Raises:
            ValueError: there is no run here, or its config.json is damaged.
        """
        path = self.path / "config.json"
        try:
            config = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(
                f"workdir must be a folder made by scripts/train.py; {self.path} has no config.json"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} cannot be read: it must hold a JSON object; got {config!r}")
        return config

    @property
    def task(self) -> str | None:
        """What the run learns; None if there is none to be read."""
        with contextlib.suppress(ValueError):
            return str(self.read_config().get("task", "reversal"))
        return None

    def check(
        self, config: JSON, *, resume: bool, completed: Callable[[JSON], JSON] = dict
    ) -> None:
        """Raises ValueError unless the run can begin here, or go on; changes nothing."""
        check_folder("workdir", self.path)
        config = json.loads(json.dumps(config))  # as it will read back
        names = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if "config.json" in names:
            if not resume:
                raise ValueError(
                    f"workdir {self.path} already holds a run; add --resume to go on with it, or"
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
                " with the same options, or name another folder"
            )


class MetricsFile:
    """metrics.jsonl, and TensorBoard beside it if asked for.

    Args:
        path: the file.
        after_step: lines of later steps are dropped: the run goes on from here.
        tensorboard: folder for TensorBoard events (see `require_tensorboard`), or None.
    """

    def __init__(self, path: Path, *, after_step: int, tensorboard: Path | None = None):
        self._path = path
        found = _lines(path)
        if not all(isinstance(content.get("step"), int) for _, content in found):
            raise ValueError(f"{path} cannot be read: each line must have a step")
        kept = [line for line, content in found if content["step"] <= after_step]
        self.last_step = max((content["step"] for _, content in found), default=0)
        with _written("file", path):
            _replace(path, "".join(kept))
            self._file = path.open("a")
        self._events = None
        if tensorboard is not None:
            import tensorboardX

            self._events = tensorboardX.SummaryWriter(str(tensorboard), purge_step=after_step + 1)

    def write(self, step: int, metrics: dict[str, list[float]]) -> None:
        """Adds one line: the step, and for each metric one number a seed, null if not finite.

        Raises:
            ValueError: it cannot be written.
        """
        numbers = {
            name: [value if math.isfinite(value) else None for value in values]
            for name, values in metrics.items()
        }
        with _written("file", self._path):
            self._file.write(json.dumps({"step": step, **numbers}) + "\n")
            self._file.flush()
        if self._events is not None:
            for name, values in metrics.items():
                for index, value in enumerate(values):
                    self._events.add_scalar(f"{name}/seed_{index}", value, step)

    def sync(self) -> None:
        """Returns once all lines are on disk, where a power cut cannot take them."""
        with _written("file", self._path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written has been told
            self._file.close()
        if self._events is not None:
            self._events.close()


def require_tensorboard() -> None:
    """Raises ValueError unless TensorBoard events can be written."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "tensorboard needs the package tensorboardX: .venv/bin/pip install -e '.[tensorboard]'"
        )


def read_lines(path: Path) -> list[JSON]:
    """All lines of a metrics.jsonl or timing.jsonl; in lists of numbers, NaN for null."""

    def numbers(value: Any) -> Any:
        return [math.nan if x is None else x for x in value] if isinstance(value, list) else value

    return [
        {name: numbers(value) for name, value in content.items()} for _, content in _lines(path)
    ]


def environment() -> JSON:
    """Versions, device and git commit: where a result came from."""
    packages = ("attention-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "packages": versions,
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": f"{device.platform}: {device.device_kind}",
        "devices": jax.device_count(),
        "git_commit": _git_commit(),
    }


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError unless `path` is a folder, or may become one."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder; {path} is a file")


def make_folder(name: str, path: Path) -> None:
    """Makes it, unless it is there; ValueError if nothing can be written to it."""
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
    """Writes the whole file or nothing."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes the whole file or nothing."""
    _replace(path, text)


def _flat(config: JSON) -> JSON:
    """Nested settings under dotted names."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{inner}": leaf for inner, leaf in _flat(value).items()})
        else:
            flat[name] = value
    return flat


def _git_commit() -> str | None:
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _lines(path: Path) -> list[tuple[str, JSON]]:
    """The lines of a file, and what they say."""
    if not path.exists():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        # A line without its end was cut off by a crash.
        found = [(line, json.loads(line)) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for line, content in found:
        if not isinstance(content, dict):
            raise ValueError(f"{path} cannot be read: each line must be an object; got {line!r}")
    return found


@contextlib.contextmanager
def _written(kind: str, path: Path) -> Iterator[None]:
    """A folder or file that cannot be written is told in one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{kind} {path} cannot be written: {error.strerror or error}") from error


def _replace(path: Path, content: str | bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())  # else a power cut may leave the new name on an empty file
    os.replace(temporary, path)
