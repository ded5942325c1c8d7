"""A run on disk: its task, its states (step 0 included), its models, and their export to a file."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.core.checks import check_integer
from attention_jax.runs.checkpoints import (
    Checkpoints,
    StepName,
    earlier_name,
    first_difference,
    kinds,
    named_leaves,
    saved_steps,
)
from attention_jax.runs.parameters_file import read_parameters, write_parameters
from attention_jax.runs.run_folder import JSON, check_output, read_config, write_json, writing
from attention_jax.training.identity import task_in
from attention_jax.training.step import TrainState, initial_state, state_shapes
from attention_jax.training.task import Params, Task

_COPY = "initial"  # the folder of the copy of other parameters, in that of the run
_DIGEST = "init_from_sha256"  # its digest in config.json


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that was trained or loaded.

    Attributes:
        task: the task, with all settings.
        params: stacked over seeds.
        step: how far it was trained.
        workdir: its folder, if it has one.
        seconds: wall time of `run`, with the compilation that it waited for.
        steps_per_second: of all seeds together, compilation excluded.
        interrupted: 130, 143 or 129, the exit status, if a signal asked to stop; else 0.
    """

    task: Any  # a `Task`
    params: Params
    step: int
    workdir: Path | None = None
    seconds: float | None = None
    steps_per_second: float | None = None
    interrupted: int = 0

    def params_of(self, seed_index: int) -> Params:
        """The parameters of one seed; ValueError if there is no such seed."""
        check_integer("seed_index", seed_index, 0, self.task.train.seeds - 1)
        return jax.tree.map(lambda leaf: leaf[seed_index], self.params)

    def describe(self, seed_index: int | None = None) -> str:
        """The run in words: "reversal additive: step 300 of 2500 (not finished), seed 0"."""
        task, steps = self.task, self.task.train.steps
        kept = [] if self.workdir is None else saved_steps(self.workdir / "checkpoints")
        unfinished = "" if max([self.step, *kept]) >= steps else " (not finished)"
        many = f"{task.train.seeds} seed{'s' * (task.train.seeds > 1)}"
        seeds = many if seed_index is None else f"seed {seed_index}"
        name = " ".join(dict.fromkeys((task.name, task.label)))
        return f"{name}: step {self.step} of {steps}{unfinished}, {seeds}"


class SavedRun:
    """Reads a run from its folder, and changes nothing there.

    Args:
        workdir: its folder.
        score: what the score of the run is called now, as in `load_run`.

    Raises:
        ValueError: the folder holds no run of an unchanged task.
    """

    def __init__(self, workdir: Path | str, score: str | None = None):
        self.workdir = Path(workdir)
        self.task = task_in(self.workdir, score=score)
        self._kept = Checkpoints(self.workdir / "checkpoints", read_only=True)

    @property
    def steps(self) -> list[int]:
        """Step 0 and the steps that are kept."""
        return sorted({0, *self._kept.steps()})

    def state(self, step: StepName) -> TrainState:
        """The state of a step, as `Checkpoints.restore` reads it; that of step 0 computed anew.

        Raises:
            ValueError: the run has no such state, or the state is damaged.
        """
        if step == 0 and 0 not in self._kept.steps():
            params, _ = first_params(self.task, self.workdir)
            return initial_state(self.task, params=params)
        if not self._kept.steps():
            raise ValueError(f"workdir {self.workdir} has no checkpoint yet; train it first")
        state: TrainState = self._kept.restore(state_shapes(self.task), step)
        return state

    def at(self, step: StepName) -> TrainedRun:
        """The run with the parameters of a step; errors as those of `state`."""
        state = self.state(step)
        return TrainedRun(self.task, state.params, int(state.step[0]), self.workdir)


def load_run(
    workdir: Path | str, step: StepName = "newest", *, score: str | None = None
) -> TrainedRun:
    """Loads a run, of any task, at one of its steps, and changes nothing in its folder.

    Args:
        workdir: the run's folder.
        step: "newest" for the newest good checkpoint; "best" for the kept checkpoint with the best
            validation metric, or without validation the smallest loss; a step that is kept; or 0
            for the parameters before training, which are computed anew.
        score: what the score of the run is called now, "module:Name", if its file or its class has
            another name. It must give the same numbers. For other parts of a user give the setting,
            too, "task=module:Name", with spaces between several: `task`, `self_attention_score`,
            `normalizer`, `self_attention_normalizer`.

    Returns:
        the run with the parameters of that step.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or no such checkpoint; or the
            checkpoint is damaged.
    """
    return SavedRun(workdir, score).at(step)


def load_states(
    workdir: Path | str, *, score: str | None = None
) -> tuple[Task, dict[int, TrainState]]:
    """Loads a run's task, and its states by step: the kept states, and step 0 computed anew.

    Args:
        workdir: the run's folder.
        score: as in `load_run`.

    Returns:
        the task, and {step: state}.

    Raises:
        ValueError: the folder holds no run of an unchanged task, or a damaged checkpoint.
    """
    run = SavedRun(workdir, score)
    return run.task, {step: run.state(step) for step in run.steps}


# --- one model ---


def export(run: TrainedRun, out: Path | str, seed_index: int = 0) -> None:
    """Writes the parameters of one seed to a safetensors file, and config.json beside it.

    The metadata of the file hold the step and the seed. A file and a config.json of the same model
    are overwritten, but no config.json of a run.

    Args:
        run: from `train_run` or `load_run`.
        out: the file, NAME.safetensors, in a folder that exists.
        seed_index: which of the run's seeds, from 0.

    Raises:
        ValueError: an argument is wrong; or the file's folder holds the config.json of another
            model, or runs, like one of which it would look; or a file cannot be written; or
            safetensors is not installed. Then nothing is written.
    """
    out, params = Path(out), run.params_of(seed_index)
    check_output(out, ".safetensors")
    if run.workdir is None:
        raise ValueError("run must be a run in a folder, with a config.json; got none")
    config, beside = read_config(run.workdir), out.with_name("config.json")
    if beside.exists():
        if _model_digest(read_config(out.parent)) != _model_digest(config):
            raise ValueError(f"out {out} must be beside no other config.json; name another folder")
    elif any(path.with_name("checkpoints").is_dir() for path in out.parent.glob("*/config.json")):
        raise ValueError(
            f"out {out} must be in a folder without runs, which would look like a run with the"
            " config.json that is written beside it; name another folder"
        )
    metadata = {
        "step": str(run.step),
        "seed": str(seed_index),
        "model_sha256": _model_digest(config),
    }
    write_parameters(out, params, metadata)
    if not (out.parent / "checkpoints").exists():  # else it is the folder of a run
        with writing("file", beside):
            write_json(beside, config)


def model_of(path: Path, seed: int, step: StepName, score: str | None) -> Any:
    """The model in a run's folder or in an exported file; see `attention_jax.load_model`."""
    if path.is_dir():
        run = load_run(path, step, score=score)
        check_integer("seed", seed, 0, run.task.train.seeds - 1)
        return run.task.bind(run.params_of(seed))
    if not (path.is_file() and path.with_name("config.json").is_file()):
        raise ValueError(
            "path must be the folder of a run, or a .safetensors file with the run's config.json"
            f" beside it; got {path}"
        )
    if (seed, step) != (0, "newest"):
        raise ValueError(
            f"seed and step must be left out for a file, which holds one model; got {seed}, {step}"
        )
    task = task_in(path.parent, score=score)
    like = of_one_seed(state_shapes(task).params)
    params, metadata = read_parameters(path, like)
    if metadata.get("model_sha256") != _model_digest(read_config(path.parent)):
        raise ValueError(f"{path} is of another model than config.json beside it")
    return task.bind(jax.device_put(params))


def _model_digest(config: JSON) -> str:
    """The SHA-256 of the settings in config.json that define the model, not its training."""
    names = ("task", "model", "scores", "normalizers")
    content = json.dumps([config.get(name) for name in names], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


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
        params = copy.restore(like)
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
        params: Params = Checkpoints(source, read_only=True).restore(like)
        return params
    if source.is_file():
        params, _ = read_parameters(source, one_seed)
        return jax.tree.map(lambda leaf: np.stack([leaf] * seeds), params)
    run = load_run(source)
    params = run.params
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
