"""Checkpoints: Orbax writes the arrays, and SHA-256 finds damage. No other file uses Orbax.

The folder of a step holds `state/`, which Orbax writes, and `manifest.json`: the step, its metric,
the kind of each leaf, and the SHA-256 of each file. It gets its name once all of it is on disk. A
step is read only if every file matches; otherwise the newest good step is read instead. A good
state of another configuration is an error.
"""

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
from typing import Any, Literal

import jax
import jax.numpy as jnp

from attention_jax.core.errors import one_line
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import JSON, sync, write_json, writing

State = Any  # a pytree of arrays
StepName = int | Literal["newest", "best"]

_PARTIAL = ".partial"  # ends the name of a step while it is written or deleted


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

    def save(
        self, step: int, state: State, *, metric: float | None = None, temporary: bool = False
    ) -> None:
        """Returns once the state is on disk, and the steps that are no longer kept are deleted.

        A state is written once: of a step that is kept, only the metric and `temporary` change. A
        deletion that fails is a warning.

        Args:
            step: the name of the state.
            state: a pytree of arrays.
            metric: ranks a state that is not temporary; smaller is better.
            temporary: delete the state once a later one is saved, whatever is kept.

        Raises:
            ValueError: the state could not be written, or two leaves have one name; or the step is
                kept, and is damaged or of another configuration. Earlier checkpoints are unchanged.
        """
        is_ranked = math.isfinite(metric or 0) and not temporary
        rank = {"step": step, "metric": metric if is_ranked else None, "temporary": temporary}
        try:
            self._write(rank, state)
        except Exception as error:  # Orbax and its dependencies raise dozens of types
            raise ValueError(
                f"checkpoint of step {step} could not be saved in {self._folder}:"
                f" {one_line(error)}; the checkpoints before it are unchanged"
            ) from error
        is_temporary = {each: self._read(each)[0].get("temporary") for each in self.steps()}
        lasting = [each for each in is_temporary if each == step or not is_temporary[each]]
        wanted = {*lasting[-self._keep :], *self._ranked()[: self._keep_best]}
        for old in is_temporary.keys() - wanted:
            partial = self._folder / f"{old}{_PARTIAL}"
            try:
                os.rename(self._folder / str(old), partial)
                shutil.rmtree(partial)
            except OSError as error:
                warn(
                    f"the checkpoint of step {old}, which is no longer kept, could not be"
                    f" deleted from {self._folder}: {one_line(error)}"
                )

    def _write(self, rank: JSON, state: State) -> None:
        """A kill at any moment leaves the step as it was before, or whole."""
        step, leaves = rank["step"], kinds(state)
        folder = self._folder / str(step)
        if folder.exists():
            earlier, reason = self._read(step)
            if reason := reason or first_difference(earlier["leaves"], leaves):
                raise ValueError(f"it is kept already, but {reason}")
            if (ranked := _sealed({**earlier, **rank})) != earlier:
                write_json(folder / "manifest.json", ranked)
            return
        partial = folder.with_name(folder.name + _PARTIAL)
        with _orbax(self._folder) as (orbax, parent):
            orbax.save(parent / partial.name / "state", _without_empty(state), force=True)
        files = _file_digests(partial)
        for name in files:
            sync(partial / name)
        manifest = {**rank, "leaves": leaves, "files": files}
        write_json(partial / "manifest.json", _sealed(manifest))
        os.rename(partial, folder)

    def steps(self) -> list[int]:
        """The steps that are kept, damaged ones included; the newest last."""
        return saved_steps(self._folder)

    def best_step(self) -> int | None:
        """The step with the smallest metric, of equal ones the newest; None without metrics."""
        return next(iter(self._ranked()), None)

    def _ranked(self) -> list[int]:
        """The steps with a metric, the best first."""
        metrics = {step: self._read(step)[0].get("metric") for step in self.steps()}
        ranked = [(metric, -step) for step, metric in metrics.items() if metric is not None]
        return [-step for _, step in sorted(ranked)]

    def restore(self, like: State, step: StepName = "newest") -> State:
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
            manifest, reason = self._read(candidate, check_files=True)
            if not reason:
                state = self._state(manifest, like)
                self._set_aside(damaged, candidate)
                return state
            damaged[candidate] = reason
        described = "; ".join(f"step {each}: {reason}" for each, reason in damaged.items())
        raise ValueError(
            f"no checkpoint in {self._folder} can be used: {described}. Train into another folder,"
            " or put a copy of a good checkpoint there"
        )

    def _set_aside(self, damaged: dict[int, str], used: int) -> None:
        """Warns of damaged steps; a trainer moves them away, so that they can be saved anew."""
        aside, moved = self._folder.with_name("damaged_checkpoints"), ""
        for step, reason in damaged.items():
            if not self._read_only:
                moved = f" and was moved to {aside}"
                names = (aside / f"{step}.{n}" for n in itertools.count())
                with writing("damaged checkpoints: folder", aside):
                    aside.mkdir(exist_ok=True)
                    free = next(name for name in names if not name.exists())
                    os.rename(self._folder / str(step), free)
            warn(
                f"the checkpoint of step {step} is damaged ({reason}){moved};"
                f" that of step {used} is used"
            )

    # --- one step ---

    def _read(self, step: int, *, check_files: bool = False) -> tuple[JSON, str]:
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

    def _state(self, manifest: JSON, like: State) -> State:
        """The state with this manifest; ValueError if it is of another configuration."""
        folder = self._folder / str(manifest["step"])
        if different := first_difference(manifest["leaves"], kinds(like)):
            raise ValueError(
                f"checkpoint {folder} is of another configuration: {different}."
                " Use the configuration that it was saved with"
            )
        # By default Orbax needs the devices that saved; a run may be read on another machine.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = getattr(leaf, "sharding", None)
            is_local = sharding and sharding.is_fully_addressable  # else `from_first` spreads it
            sharding = sharding if is_local else here
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        def filled(leaf: jax.ShapeDtypeStruct, found: Any) -> jax.Array:
            return found if leaf.size else jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)

        wanted = jax.tree.map(placed, like)
        if manifest["leaves"] != kinds(like):
            wanted = _with_earlier_names(wanted)
        with _orbax(self._folder) as (orbax, parent):
            found = orbax.restore(parent / folder.name / "state", _without_empty(wanted))
        leaves = named_leaves(jax.tree.map(filled, wanted, found))
        ordered = [leaves.get(name, leaves.get(earlier_name(name))) for name in named_leaves(like)]
        return jax.tree.unflatten(jax.tree.structure(like), ordered)


def saved_steps(folder: Path) -> list[int]:
    """The steps in a folder of checkpoints, damaged ones included; the newest last."""
    names = (path.name for path in folder.glob("*"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))


@contextlib.contextmanager
def _orbax(folder: Path) -> Iterator[tuple[Any, Path]]:
    """Orbax for this process alone, which waits for no other one; and a path of a folder for it.

    Orbax reads [, * and ? as a pattern, and loses arrays. It takes no letters that UTF-8 lacks.
    """
    # The import takes so long that a new run makes its first step before.
    import orbax.checkpoint as ocp

    _silence_orbax()
    index, name = jax.process_index(), str(folder)
    alone = ocp.options.MultiprocessingOptions(index, {index}, f"process_{index}")
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=alone)
    with contextlib.ExitStack() as stack:
        if glob.escape(name) != name.encode(errors="replace").decode():
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (place / "checkpoints").symlink_to(folder, target_is_directory=True)
            folder = place / "checkpoints"
        yield stack.enter_context(ocp.Checkpointer(handler, multiprocessing_options=alone)), folder


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
    different = sorted({name for name, _ in saved.items() ^ wanted.items()})
    return "; ".join(
        f"{name} was {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
        for name in different[:5]
    )


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
    return {path.relative_to(folder).as_posix(): digest(path) for path in paths}


def _sealed(manifest: JSON) -> JSON:
    """The manifest with a correct digest of itself."""
    content = {name: value for name, value in manifest.items() if name != "seal"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}
