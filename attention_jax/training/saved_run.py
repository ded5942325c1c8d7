"""A run on disk: its task, its states (step 0 included) and the parameters it started from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import numpy as np

from attention_jax.runs.checkpoints import (
    Checkpoints,
    Restored,
    StepName,
    earlier_name,
    first_difference,
    kinds,
    named_leaves,
    saved_steps,
)
from attention_jax.runs.parameters_file import read_parameters
from attention_jax.runs.run_folder import JSON, read_config
from attention_jax.training.loop import initial_state, state_shapes
from attention_jax.training.settings import task_in
from attention_jax.training.task import Params, Task

_COPY = "initial"  # the folder of the copy of other parameters, in that of the run
_DIGEST = "init_from_sha256"  # its digest in config.json


class SavedRun:
    """Reads a run from its folder, and changes nothing there.

    Args:
        workdir: its folder.
        score: what the score of the run is called now, as in `load_run`.

    Raises:
        ValueError: the folder holds no run of an unchanged task.
    """

    def __init__(self, workdir: Path, score: str | None = None):
        self.workdir, self.task = workdir, task_in(workdir, score=score)
        self._kept = Checkpoints(workdir / "checkpoints", read_only=True)

    @property
    def steps(self) -> list[int]:
        """Step 0 and the steps that are kept."""
        return sorted({0, *self._kept.steps()})

    def restore(self, step: StepName) -> Restored:
        """Returns the state of a step, as `Checkpoints.restore` does; computes step 0 anew.

        Raises:
            ValueError: the run has no such state, or the state is damaged.
        """
        if step == 0 and 0 not in self._kept.steps():
            params, _ = first_params(self.task, self.workdir)
            return Restored(0, initial_state(self.task, params=params))
        if not self._kept.steps():
            raise ValueError(f"workdir {self.workdir} has no checkpoint yet; train it first")
        return self._kept.restore(state_shapes(self.task), step)


# --- parameters from another run ---


def first_params(task: Task, folder: Path, *, resumes: bool = False) -> tuple[Params | None, JSON]:
    """Returns the parameters that `init_from` names, and an entry for config.json: their digest.

    Args:
        task: the task.
        folder: of the run, which may not exist yet.
        resumes: do not read the parameters if the run has a checkpoint to resume from.

    Returns:
        the parameters in NumPy, stacked over seeds, or None for those of `Task.init`; and an entry
        for config.json.

    Raises:
        ValueError: they cannot be read, or do not fit the task.
    """
    source = task.train.init_from
    if source is None:
        return None, {}
    like = state_shapes(task).params
    stored = read_config(folder) if (folder / "config.json").exists() else {}
    has_begun = stored.get("train", {}).get("init_from") == str(source.absolute())
    if resumes and has_begun and saved_steps(folder / "checkpoints"):
        return None, {_DIGEST: stored.get(_DIGEST)}
    copy = Checkpoints(folder / _COPY, read_only=True)
    if has_begun and copy.steps():
        params = copy.restore(like).state
    else:
        try:
            params = _read(source, task, like)
        except ValueError as error:
            raise ValueError(f"init_from {source}: {error}") from error
    params = jax.device_get(params)
    digest = _params_digest(params)
    if has_begun and stored.get(_DIGEST) != digest:
        raise ValueError(f"init_from {source} has other parameters than when {folder} began")
    return params, {_DIGEST: digest}


def keep_first_params(folder: Path, params: Params | None) -> None:
    """Copies the parameters to the run's folder, so that the run no longer needs `init_from`."""
    if params is not None and not saved_steps(folder / _COPY):
        Checkpoints(folder / _COPY).save(0, params)


def with_copy(config: JSON, folder: Path) -> JSON:
    """The config.json of a run in a folder, whose `init_from` names the copy that the run has kept.

    Where the run found the parameters, there may be others now.

    Raises:
        ValueError: the run has no such copy.
    """
    if _DIGEST not in config:
        return config
    if not saved_steps(folder / _COPY):
        raise ValueError(
            f"init_from cannot be repeated, because {folder / _COPY}, the copy of the parameters"
            " with which the run began, is missing"
        )
    copy = str((folder / _COPY).absolute())
    return {**config, "train": {**config["train"], "init_from": copy}}


def _read(source: Path, task: Task, like: Params) -> Params:
    """Reads the newest parameters of a run, those in a file, or a run's copy of its first ones."""
    seeds, one_seed = task.train.seeds, of_one_seed(like)
    if source.name == _COPY and saved_steps(source):
        params: Params = Checkpoints(source, read_only=True).restore(like).state
        return params
    if source.is_file():
        params, _ = read_parameters(source, one_seed)
        return jax.tree.map(lambda leaf: np.stack([leaf] * seeds), params)
    run = SavedRun(source)
    params = run.restore("newest").state.params
    if different := first_difference(kinds(of_one_seed(params)), kinds(one_seed)):
        raise ValueError(f"its parameters must be those of this run: {different}")
    if run.task.train.seeds not in (1, seeds):
        raise ValueError(
            f"it must have 1 seed, or {seeds} as this run has; got {run.task.train.seeds}"
        )
    return jax.tree.map(lambda leaf: np.repeat(leaf, seeds // len(leaf), axis=0), params)


def of_one_seed(params: Params) -> Params:
    """The shapes of one seed's parameters, from those that are stacked over seeds."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)


def _params_digest(params: Params) -> str:
    """SHA-256 of the names (those of before), kinds and bytes of all leaves."""
    digest, kind_of = hashlib.sha256(), kinds(params)
    for name, leaf in named_leaves(params).items():
        text = f"{earlier_name(name)} {kind_of[name]}\n"
        digest.update(text.encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()
