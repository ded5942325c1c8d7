"""A run's folder: its settings in config.json, its lock; and files that are never half written."""

import contextlib
import json
import os
import platform
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from attention_jax.runs.environment import environment
from attention_jax.runs.progress import warn

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

JSON = dict[str, Any]

# What a run writes besides config.json, its lock and the files of its task. A folder with one of
# these and no config.json holds the remains of a run, which a new one would overwrite or mix with.
_OF_A_RUN = {
    *("env.json", "metrics.jsonl", "gradients.jsonl", "validation.jsonl", "timing.jsonl"),
    *("checkpoints", "damaged_checkpoints", "initial", "tensorboard", "wandb", "profile"),
}


@contextlib.contextmanager
def open_run_folder(
    folder: Path, config: JSON, files: Mapping[str, bytes], *, check: Callable[[], None]
) -> Iterator[JSON]:
    """Makes the folder of a new run, or opens the run in it; while entered, no other can.

    Gives the `environment` of this start.

    Args:
        folder: of the run.
        config: all settings, for config.json.
        files: what else to write, by name.
        check: raises ValueError unless a run can begin in the folder, or resume. It is called
            before anything is made, and again once no other process can open the folder.

    Raises:
        ValueError: `check` raises it; or the path is a file or cannot be written; or another
            process trains in it.
    """
    with contextlib.ExitStack() as stack:
        with writing("workdir", folder):
            check()
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder))
            check()  # another start may have been faster; of two at the same time, one succeeds
            write_json(folder / "config.json", config)
            for name, content in files.items():
                write_bytes(folder / name, content)
            now = environment()
            if not (folder / "env.json").exists():
                write_json(folder / "env.json", now)
        yield now


def check_run_folder(folder: Path, *, resume: bool, files: Collection[str]) -> JSON | None:
    """The config.json of the run in a folder; None for a folder in which a run can begin.

    A new run may begin beside files of others, such as a scheduler's log.

    Args:
        folder: of the run.
        resume: whether the run that is there may go on.
        files: the names of the files that a new run would write besides its own.

    Raises:
        ValueError: the path is a file; or it holds a run, and `resume` is False; or a new run would
            overwrite files.
    """
    check_folder("workdir", folder)
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if "config.json" in names:
        if not resume:
            raise ValueError(
                f"workdir {folder} already holds a run; add resume=True to go on with it, or name"
                " another folder"
            )
        return read_config(folder)
    if overwritten := sorted(names & {*_OF_A_RUN, *files}):
        raise ValueError(
            f"workdir must be new, or the folder of a run; {folder} has no config.json, and a new"
            f" run would overwrite {', '.join(overwritten)}"
        )
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds `flock` of the file "lock", which ends with this process, even if it is killed."""
    with (folder / "lock").open("a+", encoding="utf-8") as file:
        try:
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"workdir {folder} is in use: {file.read().strip() or 'another process'} is"
                " training in it; wait for its end, or name another folder"
            ) from None
        except OSError as error:
            warn(
                f"workdir {folder} cannot be locked ({error.strerror or error}); make sure that no"
                " other process trains in it"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()
        yield


def read_config(folder: Path) -> JSON:
    """The settings in the config.json of a run.

    Raises:
        ValueError: the folder holds no run, or its config.json is damaged.
    """
    if not (folder / "config.json").exists():
        raise ValueError(
            f"workdir must be the folder of a training run; {folder} has no config.json"
        )
    content = read_json(folder / "config.json")
    if content.get("task") == "attention_jax.tasks:Translation" and "precision" in content:
        # Earlier versions had the dtype of the model under this name.
        content["model"] = {**content.get("model", {}), "dtype": content.pop("precision")}
    return content


def read_json(path: Path) -> JSON:
    """The JSON object in a file; raises ValueError if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} cannot be read: it must hold a JSON object; got {content!r}")
    return content


# --- files and folders ---


def check_folder(name: str, path: Path) -> None:
    """Raises ValueError if `path` exists and is no folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{name} must be a folder; {path} is a file")


def make_folder(name: str, path: Path) -> None:
    """Makes the folder if it is missing; raises ValueError if it cannot be written."""
    check_folder(name, path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{name} {path} cannot be made: {error.strerror or error}") from error
    if not os.access(path, os.W_OK):
        raise ValueError(f"{name} {path} cannot be written")


def check_output(path: Path | None, suffix: str = "", *, name: str = "out") -> None:
    """Raises ValueError unless `path` is None or a file with this suffix that can be written."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{name} must be a file in a folder that can be written; got {path}")
    if suffix not in ("", path.suffix):
        raise ValueError(f"{name} must be a file that ends in {suffix}; got {path}")


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
    lists, breaks = re.compile(r"\[\n *([^\[\]{}]*)\n *\]"), re.compile(r"\n *")
    text = json.dumps(content, indent=2)
    text = lists.sub(lambda found: f"[{breaks.sub(' ', found[1])}]", text)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file, which is never left half written.

    A letter that UTF-8 lacks, from a file name of another encoding, is written as an escape.
    """
    write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file under another name, then renames it: readers see the old file or the new.

    A device such as /dev/null, or a pipe, is written to as it is.
    """
    path = path.resolve()  # a link stays, and the file that it points to is written
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(content)
    sync(temporary)
    os.replace(temporary, path)


def sync(path: Path) -> None:
    """Returns once a file is on disk; otherwise a power cut may leave it empty."""
    with path.open("r+b") as file:  # Windows syncs only what may be written
        os.fsync(file.fileno())
