"""Checkpoints by Orbax, verified when they are restored. No other file uses Orbax.

Each state is saved with a record of its leaves: shape, dtype and a digest of the bits
(`digest.py`). A state is restored only if it matches its record. A damaged state is skipped in
favour of the newest good one; a state of another configuration raises an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from attention_jax.core.programs import one_line
from attention_jax.runs import processes
from attention_jax.runs.digest import Description, describe, digests
from attention_jax.runs.orbax_noise import silence_narration, without_unawaited_reads

Result = TypeVar("Result")
State = Any  # a pytree of arrays
JSON = dict[str, Any]
StepName = int | Literal["newest", "best"]


_ITEMS = ("state", "record")  # the parts of a checkpoint


class Restored(NamedTuple):
    """A good state, and the damaged ones that were skipped."""

    step: int
    state: State
    damaged: dict[int, str]  # newer steps, and the damage to each


class DamagedError(ValueError):
    """Every state is damaged."""


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
        silence_narration()
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._policy = _NewestAndBest(keep, keep_best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            lightweight_initialize=True,  # otherwise a damaged step raises here
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_names=_ITEMS)
        if keep_best:
            self._read_metrics()

    def save(self, step: int, state: State, *, metric: float | None = None) -> None:
        """Starts to save, after the previous save has ended; returns once the state is copied.

        Args:
            step: the name of the state.
            state: a pytree of arrays.
            metric: ranks the state; smaller is better.

        Raises:
            ValueError: the disk has no room, or this state or the one before could not be written.
                Earlier checkpoints are unchanged.
        """
        with self._explained(step), processes.together():
            if processes.is_first():
                _check_room(self._folder, state)
        metric = metric if metric is not None and math.isfinite(metric) else None
        record = _sealed({"step": step, "metric": metric, "leaves": digests(state)})
        self._policy.metrics[step] = metric
        # Save a copy: the next call donates the buffers of `state`, perhaps before they are read.
        copied = jax.tree.map(jnp.copy, _without_empty(state))
        items = {"state": ocp.args.StandardSave(copied), "record": ocp.args.JsonSave(record)}
        with self._explained(step):
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Returns once every save is on disk.

        Raises:
            ValueError: a state could not be written.
        """
        with self._explained(self.latest_step()):
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """The steps that are kept, damaged ones included; the newest last."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """The newest of `steps`; None if there is none."""
        return max(self.steps(), default=None)

    def best_step(self) -> int | None:
        """The step with the smallest metric; None if no kept step has a metric."""
        self._read_metrics()
        return next(iter(self._policy.best(self.steps())), None)

    def step_called(self, name: StepName) -> int | None:
        """The step of a name; None for "newest", which means the newest good step.

        Raises:
            ValueError: there is no such step.
        """
        if name == "newest":
            return None
        step = self.best_step() if name == "best" else name
        if step not in self.steps():
            kept = ", ".join(map(str, self.steps()))
            raise ValueError(f"step must be newest, best or one of {kept}; got {name}")
        return step

    def restore(self, like: State, *, step: int | None = None) -> Restored | None:
        """The newest good state, or None if nothing was ever saved.

        Args:
            like: a pytree of arrays or `jax.ShapeDtypeStruct` of the same structure. Leaves without
                a sharding are put on the first device.
            step: one of `steps`, to restore no other; None for the newest good one.

        Raises:
            DamagedError: every state, or that of `step`, is damaged.
            ValueError: a good state has another structure, or other shapes or dtypes.
        """
        damaged: dict[int, str] = {}
        for candidate in reversed(self.steps()) if step is None else [step]:
            state, reason = self._checked_state(candidate, like)
            if not reason:
                return Restored(candidate, state, damaged)
            damaged[candidate] = reason
        if not damaged:
            return None
        described = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise DamagedError(
            f"no checkpoint in {self._folder} can be used: {described}. Train into another folder,"
            " or put a copy of a good checkpoint there"
        )

    def set_aside(self, steps: dict[int, str]) -> Path:
        """Moves damaged steps to another folder, which it returns; they can then be saved anew."""
        aside = self._folder.with_name("damaged_checkpoints")
        with processes.together():
            if processes.is_first() and steps:
                try:
                    aside.mkdir(exist_ok=True)
                    for step in steps:
                        free = next(n for n in range(10**6) if not (aside / f"{step}.{n}").exists())
                        os.rename(self._folder / str(step), aside / f"{step}.{free}")
                except OSError as error:
                    raise ValueError(
                        f"damaged checkpoints cannot be moved to {aside}: {error.strerror or error}"
                    ) from error
        self._manager.reload()
        return aside

    def close(self) -> None:
        """Waits for saves and closes the folder."""
        self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except Exception:
            if kind is None:
                raise

    @contextlib.contextmanager
    def _explained(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and its dependencies raise dozens of types
            raise ValueError(
                f"checkpoint of step {step} could not be saved in {self._folder}:"
                f" {one_line(error)}; the checkpoints before it are unchanged"
            ) from error

    # --- one step ---

    def _checked_state(self, step: int, like: State) -> tuple[State, str]:
        """A state and "", or None and the damage; ValueError if the configuration differs."""
        record, reason = _attempt(self._record, step)
        if record is None:
            return None, reason
        self._check_same(step, record["leaves"], like)
        state, reason = _attempt(self._state, step, like)
        return state, reason or _difference(record["leaves"], digests(state))

    @contextlib.contextmanager
    def _reader(self) -> Iterator[ocp.CheckpointManager]:
        """A reader that does not wait for other processes: reading may fail on one alone."""
        if jax.process_count() == 1:
            yield self._manager
            return
        here = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"reader_{here}"
        )
        options = ocp.CheckpointManagerOptions(
            read_only=True,
            create=False,
            save_interval_steps=0,
            lightweight_initialize=True,
            multiprocessing_options=alone,
        )
        folder = self._folder.absolute()
        with ocp.CheckpointManager(folder, options=options, item_names=_ITEMS) as reader:
            yield reader

    def _record(self, step: int) -> JSON:
        if (self._folder / str(step) / "default").is_dir():
            raise ValueError("an older version saved it, without digests")
        items = ocp.args.Composite(record=ocp.args.JsonRestore())
        with self._reader() as reader:
            record = reader.restore(step, args=items)["record"]
        if not isinstance(record, dict) or _sealed(record) != record:
            raise ValueError("its record of digests is damaged")
        if record["step"] != step:
            raise ValueError(f"it was saved as step {record['step']}")
        return record

    def _check_same(self, step: int, saved: dict[str, Description], like: State) -> None:
        """Raises ValueError if leaves are missing or of other shapes or dtypes."""
        wanted = describe(like)

        def kind(description: Description | None) -> str:
            return "nothing" if description is None else "{dtype}{shape}".format(**description)

        different = [
            f"{path} was {kind(saved.get(path))}, now {kind(wanted.get(path))}"
            for path in sorted(saved.keys() | wanted.keys())
            if kind(saved.get(path)) != kind(wanted.get(path))
        ]
        if different:
            more = f"; and {len(different) - 5} more" if len(different) > 5 else ""
            raise ValueError(
                f"checkpoint {self._folder / str(step)} is of another configuration:"
                f" {'; '.join(different[:5])}{more}. Use the configuration that it was saved with"
            )

    def _read_metrics(self) -> None:
        """Reads the metrics of steps that an earlier process saved."""
        for step in self.steps():
            if step not in self._policy.metrics:
                record, _ = _attempt(self._record, step)
                self._policy.metrics[step] = None if record is None else record["metric"]

    def _state(self, step: int, like: State) -> State:
        # By default Orbax needs the devices that saved; a run may be read on another machine.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None) or here
            ),
            like,
        )
        items = ocp.args.Composite(state=ocp.args.StandardRestore(_without_empty(abstract)))
        with self._reader() as reader:
            state = reader.restore(step, args=items)["state"]
        return _with_empty(state, abstract)


class _NewestAndBest:
    """Decides which steps Orbax keeps; a `PreservationPolicy`."""

    def __init__(self, newest: int, best: int):
        self.metrics: dict[int, float | None] = {}  # by step
        self._newest, self._best = newest, best

    def best(self, steps: Iterable[int]) -> list[int]:
        """The steps that have a metric, the best first, and of equal metrics the newest first."""
        known = [
            (metric, -step) for step in steps if (metric := self.metrics.get(step)) is not None
        ]
        return [-step for _, step in sorted(known)]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        del context
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-self._newest :], *self.best(steps)[: self._best]}
        return [step in kept for step in steps]


def _check_room(folder: Path, state: State) -> None:
    needed = 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 2**20
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(
            f"it needs about {needed / 2**20:.1f} MiB and the disk has {free / 2**20:.1f} MiB free"
        )


def _sealed(record: JSON) -> JSON:
    """The record with a correct digest of itself."""
    content = {name: value for name, value in record.items() if name != "seal"}
    text = json.dumps(content, sort_keys=True)
    return {**content, "seal": hashlib.sha256(text.encode()).hexdigest()}


def _difference(saved: dict[str, Description], read: dict[str, Description]) -> str:
    """Describes the leaves whose shape, dtype or bits have changed; "" if none has."""
    different = [path for path in saved if saved[path] != read.get(path)]
    if not different:
        return ""
    return f"{len(different)} of {len(saved)} leaves changed, {different[0]} among them"


def _without_empty(tree: State) -> State:
    """Replaces leaves of size 0, which Orbax does not support, by None."""
    return jax.tree.map(lambda leaf: leaf if leaf.size else None, tree)


def _with_empty(tree: State, like: State) -> State:
    """The inverse of `_without_empty`."""

    def filled(wanted: jax.ShapeDtypeStruct, leaf: jax.Array | None) -> jax.Array:
        if leaf is not None:
            return leaf
        return jnp.zeros(wanted.shape, wanted.dtype, device=wanted.sharding)

    return jax.tree.map(filled, like, tree)


def _attempt(function: Callable[..., Result], *arguments: Any) -> tuple[Result | None, str]:
    """The result of a function and "", or None and the reason if it fails on any process."""
    result, reason = None, ""
    try:
        with without_unawaited_reads():
            result = function(*arguments)
    except MemoryError:
        raise
    except Exception as error:  # Orbax and its dependencies raise dozens of types
        reason = one_line(error)
    if processes.largest(int(bool(reason))):
        return None, reason or "another process of this run cannot read it"
    return result, ""
