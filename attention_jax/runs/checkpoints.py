"""Checkpoints: Orbax writes the arrays, and SHA-256 finds damage. No other file uses Orbax.

The folder of a step holds `state/`, which Orbax writes, and `manifest.json`: the step, its metric,
the kind of each leaf, and the SHA-256 of each file. It gets its name once all of it is on disk. A
step is read only if every file matches; otherwise the newest good step is read instead. A good
state of another configuration is an error.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.errors import one_line
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import JSON, sync, write_json, writing

State = Any  # a pytree of arrays
StepName = int | Literal["newest", "best"]

_PARTIAL = ".partial"  # ends the name of a step while it is written or deleted


class Restored(NamedTuple):
    """A good state and its step."""

    step: int
    state: State


class _Kept(NamedTuple):
    """A step on disk; arguments as in `Checkpoints.save`."""

    step: int
    metric: float | None
    temporary: bool


class Checkpoints:
    """The newest states of a run, and the best ones, one folder per step.

    Args:
        folder: made if it is missing.
        keep: how many of the newest states to keep.
        keep_best: how many states with the smallest metric to keep, besides the newest.
        read_only: change nothing, for reading a run that may be training; otherwise the remains of
            an interrupted save are removed.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_best: int = 0, read_only: bool = False):
        _silence_orbax()
        self._folder, self._read_only = folder.absolute(), read_only
        self._keep, self._keep_best = keep, keep_best
        if not read_only:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"[0-9]*{_PARTIAL}"):
                # Earlier versions set a step aside while they saved it again.
                step_of = path.with_name(path.name.removesuffix(f".replaced{_PARTIAL}"))
                if step_of != path and not step_of.exists():
                    os.rename(path, step_of)
                else:
                    shutil.rmtree(path)
        self._kept: dict[int, _Kept] = {}
        for step in saved_steps(self._folder):
            read, _ = self._read(step, check_files=False)
            self._kept[step] = _Kept(step, read.get("metric"), read.get("temporary", False))

    def save(
        self, step: int, state: State, *, metric: float | None = None, temporary: bool = False
    ) -> None:
        """Returns once the state is on disk, and the steps that are no longer kept are deleted.

        A state is written once: of a step that is kept, only the metric and `temporary` change. A
        deletion that fails is a warning.

        Args:
            step: the name of the state.
            state: a pytree of arrays.
            metric: ranks the state; smaller is better.
            temporary: delete the state once a later one is saved, whatever is kept.

        Raises:
            ValueError: the state could not be written, or two leaves have one name; or the step is
                kept, and is damaged or of another configuration. Earlier checkpoints are unchanged.
        """
        kept = _Kept(step, metric if math.isfinite(metric or 0) else None, temporary)
        try:
            self._write(kept, state)
        except Exception as error:  # Orbax and its dependencies raise dozens of types
            raise ValueError(
                f"checkpoint of step {step} could not be saved in {self._folder}:"
                f" {one_line(error)}; the checkpoints before it are unchanged"
            ) from error
        self._delete_old(kept)

    def _write(self, kept: _Kept, state: State) -> None:
        """A kill at any moment leaves the step as it was before, or whole."""
        folder = self._folder / str(kept.step)
        manifest: JSON = {**kept._asdict(), "leaves": kinds(state)}
        if kept.step in self._kept:
            earlier, reason = self._read(kept.step, check_files=False)
            reason = reason or first_difference(earlier["leaves"], manifest["leaves"])
            if reason:
                raise ValueError(f"it is kept already, but {reason}")
            if (ranked := _sealed({**earlier, **kept._asdict()})) != earlier:
                write_json(folder / "manifest.json", ranked)
            return
        partial = folder.with_name(folder.name + _PARTIAL)
        args = _orbax_module().args.StandardSave(_without_empty(state))
        with _path_for_orbax(self._folder) as parent, _orbax() as orbax:
            orbax.save(parent / partial.name / "state", args=args, force=True)
        manifest["files"] = _file_digests(partial)
        for name in manifest["files"]:
            sync(partial / name)
        write_json(partial / "manifest.json", _sealed(manifest))
        os.rename(partial, folder)

    def _delete_old(self, newest: _Kept) -> None:
        before = self.steps()
        self._kept = {step: kept for step, kept in self._kept.items() if not kept.temporary}
        self._kept[newest.step] = newest
        wanted = {*self.steps()[-self._keep :], *self._ranked()[: self._keep_best]}
        self._kept = {step: kept for step, kept in self._kept.items() if step in wanted}
        for step in {*before} - wanted:
            partial = self._folder / f"{step}{_PARTIAL}"
            try:
                os.rename(self._folder / str(step), partial)
                shutil.rmtree(partial)
            except OSError as error:
                warn(
                    f"the checkpoint of step {step}, which is no longer kept, could not be"
                    f" deleted from {self._folder}: {one_line(error)}"
                )

    def steps(self) -> list[int]:
        """The steps that are kept, damaged ones included; the newest last."""
        return [*self._kept]

    def best_step(self) -> int | None:
        """The step with the smallest metric, of equal ones the newest; None without metrics."""
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[int]:
        """The steps with a metric, the best first."""
        of_steps = self._kept.values()
        ranked = [(kept.metric, -kept.step) for kept in of_steps if kept.metric is not None]
        return [-step for _, step in sorted(ranked)]

    def restore(self, like: State, step: StepName = "newest") -> Restored:
        """A good state. Warns of the damaged ones that it skips; a trainer also moves them away.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of the same structure. Leaves without
                a sharding are put on the first device.
            step: "newest" for the newest good state; "best" or one of `steps` for no other.

        Raises:
            ValueError: there is no such state, or it is damaged; or it has another structure, or
                other shapes or dtypes.
        """
        candidates = [*reversed(self.steps())]
        if step != "newest":
            wanted = self.best_step() if step == "best" else step
            candidates = [each for each in candidates if each == wanted]
            if not candidates:
                names = "newest" if self.best_step() is None else "newest, best"
                kept = ", ".join(map(str, sorted({0, *self.steps()})))
                reason = "; no checkpoint has a finite metric" if step == "best" else ""
                raise ValueError(f"step must be {names} or one of {kept}; got {step}{reason}")
        damaged: dict[int, str] = {}
        for candidate in candidates:
            state, reason = self._good_state(candidate, like)
            if not reason:
                self._set_aside(damaged, candidate)
                return Restored(candidate, state)
            damaged[candidate] = reason
        described = "; ".join(f"step {each}: {reason}" for each, reason in damaged.items())
        raise ValueError(
            f"no checkpoint in {self._folder} can be used: {described}. Train into another folder,"
            " or put a copy of a good checkpoint there"
        )

    def _set_aside(self, damaged: dict[int, str], used: int) -> None:
        """Warns of damaged steps; a trainer moves them away, so that they can be saved anew."""
        moved = ""
        if damaged and not self._read_only:
            aside = self._folder.with_name("damaged_checkpoints")
            moved = f" and was moved to {aside}"
            with writing("damaged checkpoints: folder", aside):
                aside.mkdir(exist_ok=True)
                for step in damaged:
                    names = (aside / f"{step}.{n}" for n in itertools.count())
                    free = next(name for name in names if not name.exists())
                    os.rename(self._folder / str(step), free)
                    del self._kept[step]
        for step, reason in damaged.items():
            warn(
                f"the checkpoint of step {step} is damaged ({reason}){moved};"
                f" that of step {used} is used"
            )

    # --- one step ---

    def _read(self, step: int, *, check_files: bool) -> tuple[JSON, str]:
        """The manifest of a step and ""; or {} and the damage to it, or to one of the files."""
        folder = self._folder / str(step)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
            if not isinstance(manifest, dict) or _sealed(manifest) != manifest:
                raise ValueError("manifest.json has changed")
            if manifest["step"] != step:
                raise ValueError(f"it was saved as step {manifest['step']}")
            digests = _file_digests(folder) if check_files else manifest["files"]
            for name, digest in manifest["files"].items():
                if digests.get(name) != digest:
                    raise ValueError(f"{name} has changed or is missing")
        except (OSError, ValueError) as error:
            return {}, one_line(error)
        return manifest, ""

    def _good_state(self, step: int, like: State) -> tuple[State, str]:
        """The state of a step and ""; or None and the damage to it."""
        manifest, reason = self._read(step, check_files=True)
        if reason:
            return None, reason
        if different := first_difference(manifest["leaves"], kinds(like)):
            raise ValueError(
                f"checkpoint {self._folder / str(step)} is of another configuration: {different}."
                " Use the configuration that it was saved with"
            )
        if manifest["leaves"] == kinds(like):
            return self._state(step, like), ""
        leaves = named_leaves(self._state(step, _with_earlier_names(like)))
        ordered = [leaves[earlier_name(name)] for name in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), ordered), ""

    def _state(self, step: int, like: State) -> State:
        # By default Orbax needs the devices that saved; a run may be read on another machine.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = getattr(leaf, "sharding", None) or here
            if not sharding.is_fully_addressable:  # `processes.from_first` spreads it
                sharding = here
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        def filled(leaf: jax.ShapeDtypeStruct, found: Any) -> jax.Array:
            return found if leaf.size else jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)

        wanted = jax.tree.map(placed, like)
        args = _orbax_module().args.StandardRestore(_without_empty(wanted))
        with _path_for_orbax(self._folder) as folder, _orbax() as orbax:
            found = orbax.restore(folder / str(step) / "state", args=args)
        return jax.tree.map(filled, wanted, found)


def saved_steps(folder: Path) -> list[int]:
    """The steps in a folder of checkpoints, damaged ones included; the newest last."""
    names = (path.name for path in folder.glob("*"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


def _orbax_module() -> Any:
    """Orbax, which takes so long to import that a new run makes its first step before."""
    import orbax.checkpoint as ocp

    return ocp


def _orbax() -> Any:
    """Orbax for this process alone: it waits for no other one."""
    ocp, index = _orbax_module(), jax.process_index()
    alone = ocp.options.MultiprocessingOptions(index, {index}, f"process_{index}")
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


@contextlib.contextmanager
def _path_for_orbax(folder: Path) -> Iterator[Path]:
    """A path of the folder that Orbax can use.

    Orbax reads [, * and ? as a pattern, and loses arrays. It takes no letters that UTF-8 lacks.
    """
    name = str(folder)
    if glob.escape(name) == name.encode(errors="replace").decode():
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place) / "checkpoints"
        link.symlink_to(folder, target_is_directory=True)
        yield link


@functools.cache
def _silence_orbax() -> None:
    """Silences Orbax's logs and tracebacks of abandoned writes, in the whole process."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    original = sys.unraisablehook

    # One failed write can print hundreds of tracebacks, from other threads and at any time.
    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            original(unraisable)

    sys.unraisablehook = hook


def kinds(tree: State) -> dict[str, str]:
    """The dtype and shape of each leaf, for example {"params.embedding": "float32[5, 3]"}."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in named_leaves(tree).items()}


def first_difference(saved: dict[str, str], wanted: dict[str, str]) -> str:
    """The first of two `kinds` that differ, for an error; "" if all agree. Old names are equal."""
    saved, wanted = (
        {earlier_name(name): kind for name, kind in each.items()} for each in (saved, wanted)
    )
    different = [
        f"{name} was {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    return "; ".join(different[:5])


def named_leaves(tree: State) -> dict[str, Any]:
    """The leaves by the names that Orbax gives them, such as "params.embedding".

    Raises:
        ValueError: two leaves have the same name, so that one would overwrite the other.
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if name in leaves:
            raise ValueError(
                f"leaf {name!r} must be one leaf of the state; got two, as {{'a.b': x}} and"
                " {'a': {'b': y}} have: rename one of them"
            )
        leaves[name] = leaf
    return leaves


def earlier_name(name: Any) -> Any:
    """The name of a leaf in files of before; Linen refuses modules with a child "params"."""
    return name.replace("params_of_score", "params") if isinstance(name, str) else name


def _with_earlier_names(tree: State) -> State:
    def renamed(node: Any) -> Any:
        if not isinstance(node, Mapping):
            return node
        children = {earlier_name(key): _with_earlier_names(node[key]) for key in node}
        return type(node)(children)  # type: ignore[call-arg]

    return jax.tree.map(renamed, tree, is_leaf=lambda node: isinstance(node, Mapping))


def _without_empty(tree: State) -> State:
    """The tree with None for each leaf of size 0, which Orbax cannot write."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by name."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    paths = filter(Path.is_file, sorted(folder.rglob("*")))
    return {str(path.relative_to(folder)): digest(path) for path in paths}


def _sealed(manifest: JSON) -> JSON:
    """The manifest with a correct digest of itself."""
    content = {name: value for name, value in manifest.items() if name != "seal"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}
