"""Trains a model of a task with one score; see --help."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Annotated, Any, Generic

import tyro
from command_line import TaskName, run_command

from attention_jax.runs.progress import say
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Settings


def _every(words: list[str]) -> int:
    """Parses no word, or ["every=STEPS"]."""
    if not words:
        return 100
    name, _, steps = words[0].rpartition("=")
    if len(words) > 1 or name not in ("", "every") or not steps.isdecimal():
        raise ValueError(f"log_gradients must be nothing or every=STEPS; got {' '.join(words)}")
    return int(steps)


_LOG_GRADIENTS = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="[every=STEPS]",
    instance_from_str=_every,
    is_instance=lambda instance: isinstance(instance, int | None),
    str_from_instance=lambda instance: [] if instance is None else [f"every={instance}"],
)

_MESH = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="AXIS=DEVICES ...",
    instance_from_str=MeshShape.from_words,
    is_instance=lambda instance: isinstance(instance, MeshShape | None),
    str_from_instance=lambda instance: ["None"] if instance is None else instance.to_words(),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Generic[Settings]):
    """Train a model of a task with one score function and several seeds at once.

    Each task has options of its own: --task translation --help shows those of translation. The
    fields of a task of your own are its options: --task my_tasks:Recall, for the class Recall in
    my_tasks.py of the current folder.

    The run folder gets config.json, env.json, metrics.jsonl, checkpoints/ and the task's own files.
    Ctrl-C, SIGTERM or a closed terminal saves after the steps in progress (log_every) and exits
    with 130, 143 or 129; a second signal exits at once. --resume continues from there, or after a
    crash from the newest good checkpoint, and ends bit-identical to a run that was never stopped.

    Attributes:
        task: what to learn, a name or "module:Name".
        workdir: the run folder; made if missing.
        resume: continue the run in `workdir`, or begin it. All other options must be those of the
            run, except --steps where the learning rate does not depend on it.
        log_gradients: also write gradient norms and attention statistics of the next batch to
            `workdir`/gradients.jsonl: every 100 steps, or every=STEPS, a multiple of log_every; off
            if left out.
        mesh: devices along each axis, for example "data=4 seed=2". "seed" spreads seeds and divides
            their number; "data" spreads the batch and divides its size. If left out, one device.
            A run may be resumed on another mesh.
    """

    task: TaskName = "reversal"
    workdir: Path
    resume: bool = False
    log_gradients: Annotated[int | None, _LOG_GRADIENTS] = None
    mesh: Annotated[MeshShape | None, _MESH] = None
    settings: Annotated[Settings, tyro.conf.OmitArgPrefixes]


def main(arguments: Arguments[Any]) -> int:
    run = training.train_run(
        arguments.settings,
        arguments.workdir,
        resume=arguments.resume,
        log_gradients=arguments.log_gradients,
        mesh=arguments.mesh,
    )
    loop = run.task.train
    finished = run.step == loop.steps
    # A signal that arrived while the last step was saved did not stop anything.
    status = 0 if finished else run.interrupted
    speed = run.steps_per_second
    rate = "" if speed is None else f", {speed:.{0 if speed >= 100 else 1}f} steps/s"
    say(
        f"{arguments.workdir}: step {run.step} of {loop.steps}, {loop.seeds} seeds,"
        f" {run.seconds:.0f} s{rate} (all seeds together)"
    )
    if not finished:
        say("stopped by a signal; --resume goes on from here", error=True)
    return status


def arguments_of(words: list[str]) -> Any:
    """The arguments for the task that the command line names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", nargs="?")
    task = parser.parse_known_args(words)[0].task
    return Arguments[task_of(task or "reversal")]  # type: ignore[misc]


if __name__ == "__main__":
    run_command(arguments_of, main)
