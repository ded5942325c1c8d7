"""Checkpoints: Orbax writes the arrays, and SHA-256 finds damage. No other file uses Orbax.

The folder of a step holds `state/`, which Orbax writes, and `manifest.json`: the step, its metric,
the kind of each leaf, and the SHA-256 of each file. It gets its name once all of it is on disk. A
step is read only if every file matches. Otherwise the newest good step takes its place; a good
state of another configuration raises an error.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from attention_jax.core.programs import one_line
from attention_jax.runs import processes
from attention_jax.runs.progress import warn
from attention_jax.runs.run_folder import JSON, saved_steps, sync, write_json, writing

State = Any  # a pytree of arrays
StepName = int | Literal["newest", "best"]

_PARTIAL = ".partial"  # ends the name of a step while it is written or deleted
_LISTINGS = 10  # how often a reader lists the steps, if a trainer deletes those that it reads


class Restored(NamedTuple):
    """A good state, and the damaged ones that were skipped."""

    step: int
    state: State
    damaged: dict[int, str]  # newer steps, and the damage to each


class _Kept(NamedTuple):
    """A step on disk, as Orbax's policies look at it."""

    step: int
    metrics: float | None
    temporary: bool = False


class Checkpoints:
    """The newest states of a run, and the best ones, one folder per step.

    Args:
        folder: made if it is missing.
        keep: how many of the newest states to keep.
        keep_best: how many further states to keep, those saved with the smallest metric.
        read_only: change nothing, for reading a run that may be training; otherwise the remains of
            an interrupted save are removed.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_best: int = 0, read_only: bool = False):
        _silence_orbax()
        self._folder = folder.absolute()
        self._read_only = read_only
        self._kept: list[_Kept] = []
        self._orbax = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        best = policies.BestN(get_metric_fn=float, reverse=True, n=keep_best)  # smallest is best
        best.keep_checkpoints_without_metrics = False
        self._policy = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        if not read_only and processes.is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in self._folder.glob(f"[0-9]*{_PARTIAL}"):
                shutil.rmtree(path)
        self._list(saved_steps(self._folder))

    def save(
        self, step: int, state: State, *, metric: float | None = None, temporary: bool = False
    ) -> None:
        """Returns once the state is on disk, and the steps that are no longer kept are deleted.

        A deletion that fails is a warning.

        Args:
            step: the name of the state.
            state: a pytree of arrays.
            metric: ranks the state; smaller is better.
            temporary: delete the state once a later one is saved, whatever is kept.

        Raises:
            ValueError: the state could not be written. Earlier checkpoints are unchanged.
        """
        metric = metric if metric is not None and math.isfinite(metric) else None
        kept = _Kept(step, metric, temporary)
        manifest: JSON = {"step": step, "metric": metric, "temporary": temporary}
        manifest["leaves"] = _kinds(state)
        partial = self._folder / f"{step}{_PARTIAL}"
        try:
            args = ocp.args.StandardSave(_without_empty(state))
            self._orbax.save(partial / "state", args=args, force=True)
            with processes.together():
                if processes.is_first():
                    manifest["files"] = _digests(partial)
                    for name in manifest["files"]:
                        sync(partial / name)
                    write_json(partial / "manifest.json", _sealed(manifest))
                    os.rename(partial, self._folder / str(step))
        except Exception as error:  # Orbax and its dependencies raise dozens of types
            raise ValueError(
                f"checkpoint of step {step} could not be saved in {self._folder}:"
                f" {one_line(error)}; the checkpoints before it are unchanged"
            ) from error
        self._delete_old(kept)

    def steps(self) -> list[int]:
        """The steps that are kept, damaged ones included; the newest last."""
        return [kept.step for kept in self._kept]

    def latest_step(self) -> int | None:
        """The newest of `steps`; None if there is none."""
        return self._kept[-1].step if self._kept else None

    def best_step(self) -> int | None:
        """The step with the smallest metric, of equal ones the newest; None without metrics."""
        ranked = [(kept.metrics, -kept.step) for kept in self._kept if kept.metrics is not None]
        return -min(ranked)[1] if ranked else None

    def step_called(self, name: StepName) -> int | None:
        """The step of a name; None for "newest", which means the newest good step.

        Raises:
            ValueError: there is no such step.
        """
        if name == "newest":
            return None
        step = self.best_step() if name == "best" else name
        if step not in self.steps():
            names = "newest" if self.best_step() is None else "newest, best"
            kept = ", ".join(map(str, self.steps()))
            raise ValueError(f"step must be {names} or one of {kept}; got {name}")
        return step

    def restore(self, like: State, *, step: int | None = None) -> Restored | None:
        """The newest good state, or None if nothing was ever saved.

        If a trainer deletes steps meanwhile, who only reads lists them again.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of the same structure. Leaves without
                a sharding are put on the first device.
            step: one of `steps`, to restore no other; None for the newest good one.

        Raises:
            ValueError: every state, or that of `step`, is damaged; or a good state has another
                structure, or other shapes or dtypes.
        """
        damaged: dict[int, str] = {}
        for _ in range(_LISTINGS):
            damaged = {}
            for candidate in reversed(self.steps()) if step is None else [step]:
                state, reason = self._good_state(candidate, like)
                if not reason:
                    return Restored(candidate, state, damaged)
                damaged[candidate] = reason
                if self._read_only and step is None and self._listed_again(candidate):
                    break
            else:
                break
        if not damaged:
            return None
        described = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise ValueError(
            f"no checkpoint in {self._folder} can be used: {described}. Train into another folder,"
            " or put a copy of a good checkpoint there"
        )

    def set_aside(self, steps: dict[int, str]) -> Path:
        """Moves damaged steps to another folder, which it returns; they can then be saved anew."""
        aside = self._folder.with_name("damaged_checkpoints")
        with processes.together():
            if processes.is_first() and steps:
                with writing("damaged checkpoints: folder", aside):
                    aside.mkdir(exist_ok=True)
                    for step in steps:
                        free = next(n for n in range(10**6) if not (aside / f"{step}.{n}").exists())
                        os.rename(self._folder / str(step), aside / f"{step}.{free}")
        self._kept = [kept for kept in self._kept if kept.step not in steps]
        return aside

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what Orbax holds; nothing is left to be written."""
        self._orbax.close()

    def _list(self, steps: list[int]) -> None:
        self._kept = []
        for step in steps:
            manifest, _ = self._read(step, check_files=False)
            temporary = manifest.get("temporary", False)
            self._kept.append(_Kept(step, manifest.get("metric"), temporary))

    def _listed_again(self, step: int) -> bool:
        """Lists the steps again if `step` is gone and others are there; returns whether it did."""
        steps = saved_steps(self._folder)
        gone = bool(processes.largest(int(bool(steps) and step not in steps)))
        if gone:
            self._list(steps)
        return gone

    def _delete_old(self, newest: _Kept) -> None:
        before = self.steps()
        steps = [*(kept for kept in self._kept if not kept.temporary), newest]
        keep = self._policy.should_preserve(steps, context=policies.PreservationContext())
        self._kept = list(itertools.compress(steps, keep))
        for step in {*before} - {*self.steps()}:
            if processes.is_first():
                partial = self._folder / f"{step}{_PARTIAL}"
                try:
                    os.rename(self._folder / str(step), partial)
                    shutil.rmtree(partial)
                except OSError as error:
                    warn(
                        f"the checkpoint of step {step}, which is no longer kept, could not be"
                        f" deleted from {self._folder}: {one_line(error)}"
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
            digests = _digests(folder) if check_files else manifest["files"]
            for name, digest in manifest["files"].items():
                if digests.get(name) != digest:
                    raise ValueError(f"{name} has changed or is missing")
        except (OSError, ValueError) as error:
            return {}, one_line(error)
        return manifest, ""

    def _good_state(self, step: int, like: State) -> tuple[State, str]:
        """The state of a step and ""; or None and the damage to it."""
        manifest, reason = self._read(step, check_files=True)
        state = None
        if not processes.largest(int(bool(reason))):
            self._check_same(step, manifest["leaves"], _kinds(like))
            try:
                state = self._state(step, like)
            except (OSError, ValueError, KeyError) as error:
                if not self._read_only:
                    raise  # its files are whole, and a trainer sets aside what is damaged
                reason = one_line(error)
            if not processes.largest(int(bool(reason))):
                return state, ""
        return None, reason or "another process of this run cannot read it"

    def _check_same(self, step: int, saved: dict[str, str], wanted: dict[str, str]) -> None:
        """Raises ValueError if leaves are missing or of other shapes or dtypes."""
        different = [
            f"{name} was {saved.get(name, 'nothing')}, now {wanted.get(name, 'nothing')}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if different:
            raise ValueError(
                f"checkpoint {self._folder / str(step)} is of another configuration:"
                f" {'; '.join(different[:5])}. Use the configuration that it was saved with"
            )

    def _state(self, step: int, like: State) -> State:
        # By default Orbax needs the devices that saved; a run may be read on another machine.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

        def placed(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = getattr(leaf, "sharding", None) or here
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        def filled(leaf: jax.ShapeDtypeStruct, found: Any) -> jax.Array:
            return found if leaf.size else jnp.empty(leaf.shape, leaf.dtype, device=leaf.sharding)

        wanted = jax.tree.map(placed, like)
        args = ocp.args.StandardRestore(_without_empty(wanted))
        found = self._orbax.restore(self._folder / str(step) / "state", args=args)
        return jax.tree.map(filled, wanted, found)


@functools.cache
def _silence_orbax() -> None:
    """Silences, for the whole process, its logs and the traces of writes that it abandons."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    original = sys.unraisablehook

    # One failed write can print hundreds of traces, from other threads and at any time.
    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            original(unraisable)

    sys.unraisablehook = hook


def _kinds(tree: State) -> dict[str, str]:
    """The dtype and shape of each leaf, for example {"params.embedding": "float32[5, 3]"}."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _without_empty(tree: State) -> State:
    """The tree with None for each leaf of size 0, which Orbax cannot write."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _sealed(manifest: JSON) -> JSON:
    """The manifest with a correct digest of itself."""
    content = {name: value for name, value in manifest.items() if name != "seal"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}
