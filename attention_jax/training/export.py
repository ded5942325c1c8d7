"""Exports a trained model to a file, and reads a model from such a file or from a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax

from attention_jax.core.checks import check_integer
from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.parameters_file import read_parameters, write_parameters
from attention_jax.runs.run_folder import JSON, check_output, read_config, write_json, writing
from attention_jax.training.loop import state_shapes
from attention_jax.training.run import TrainedRun, load_run
from attention_jax.training.saved_run import of_one_seed
from attention_jax.training.settings import task_in


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
