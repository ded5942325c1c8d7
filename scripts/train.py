"""Trains a model of a task, reversal or translation, with one score; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from command_line import run_command

from attention_jax.runs import processes
from attention_jax.runs.processes import Distribution
from attention_jax.tasks.reversal import task as reversal
from attention_jax.tasks.reversal.task import ReversalConfig
from attention_jax.tasks.translation import run as translation_run
from attention_jax.tasks.translation.task import TranslationConfig
from attention_jax.training.run import Reached
from attention_jax.training.sharding import MeshShape


def _every(arguments: list[str]) -> int:
    """Nothing, or ["every=STEPS"]."""
    if not arguments:
        return 100
    name, _, steps = arguments[0].rpartition("=")
    if len(arguments) > 1 or name not in ("", "every") or not steps.isdecimal():
        raise ValueError(f"expected nothing or every=STEPS; got {' '.join(arguments)}")
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


TaskName = Literal["reversal", "translation"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Of every task.

    Attributes:
        workdir: the run folder; made if missing.
        resume: go on with the run in `workdir` (or begin it).
        tensorboard: also write TensorBoard events to `workdir`/tensorboard.
        log_gradients: also write gradient norms and attention statistics, of the batch to come, to
            `workdir`/gradients.jsonl: every 100 steps, or every=STEPS, a multiple of log_every; off
            if left out.
        mesh: devices along each axis, "data=4 seed=2" say: "seed" spreads seeds and divides their
            number; "data" spreads the batch; "fsdp" the batch, parameters and optimiser state; both
            together divide the batch. One device if left out, or with --distributed all. A run may
            go on over others.
        distributed: this is one of many processes, each started with the same command; `workdir` is
            on a file system that all of them see.
        distribution: which of the processes this is, where the cluster does not say it.
    """

    workdir: Path
    resume: bool = False
    tensorboard: bool = False
    log_gradients: Annotated[int | None, _LOG_GRADIENTS] = None
    mesh: Annotated[MeshShape | None, _MESH] = None
    distributed: bool = False
    distribution: Annotated[Distribution, tyro.conf.OmitArgPrefixes] = Distribution()

    def __post_init__(self) -> None:
        if self.distribution != Distribution() and not self.distributed:
            raise ValueError("coordinator, process_count and process_index need --distributed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReversalArguments(_Arguments):
    """Train the reversal model with one score function and several seeds at once.

    (Or, with --task translation, a translator; --task translation --help says how.)

    The run folder gets config.json, env.json, metrics.jsonl and checkpoints/. Ctrl-C or SIGTERM
    saves after the compiled call in progress (log_every steps) and exits with 130 or 143, a second
    one exits at once; --resume goes on from there, or from the newest good checkpoint after a
    crash, and ends bit-identical to a run that was never stopped.

    Attributes:
        task: what is learned.
    """

    task: TaskName = "reversal"
    config: Annotated[ReversalConfig, tyro.conf.OmitArgPrefixes] = ReversalConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslationArguments(_Arguments):
    """Train a translator on two files of sentences, line by line translations of each other.

    The run folder gets config.json, env.json, the subwords, metrics.jsonl, validation.jsonl and
    checkpoints/. Ctrl-C or SIGTERM saves after the steps in progress (log_every) and exits with 130
    or 143, a second one exits at once; --resume goes on from there, or from the newest good
    checkpoint after a crash, and ends bit-identical to a run that was never stopped.

    Attributes:
        task: what is learned.
    """

    task: TaskName = "translation"
    config: Annotated[TranslationConfig, tyro.conf.OmitArgPrefixes]


def main(arguments: ReversalArguments | TranslationArguments) -> int:
    if arguments.distributed:
        processes.join(arguments.distribution)
    names = ("resume", "tensorboard", "log_gradients", "mesh")
    options: Any = {name: getattr(arguments, name) for name in names}
    trained: reversal.Trained | Reached
    patience = None
    if isinstance(arguments, ReversalArguments):
        trained = reversal.train_run(arguments.config, arguments.workdir, **options)
    else:
        trained = translation_run.train_run(arguments.config, arguments.workdir, **options)
        patience = arguments.config.patience if trained.exhausted else None
    loop = arguments.config.loop
    finished = patience is not None or trained.step == loop.steps
    # A signal that came while the last step was saved changes nothing.
    status = 0 if finished else trained.interrupted
    if not processes.is_first():
        return status
    speed = trained.steps_per_second
    rate = "" if speed is None else f", {speed:.{0 if speed >= 100 else 1}f} steps/s"
    print(
        f"{arguments.workdir}: step {trained.step} of {loop.steps}, {loop.seeds} seeds,"
        f" {trained.seconds:.0f} s{rate} (all seeds together)"
    )
    if patience is not None:
        print(f"stopped early: {patience} validations without a better one")
    if not finished:
        print("stopped by a signal; --resume goes on from here", file=sys.stderr)
    return status


def arguments_of(words: list[str]) -> type[ReversalArguments] | type[TranslationArguments]:
    """Those of the task that the command line names: each has options of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", nargs="?")
    task = parser.parse_known_args(words)[0].task
    return TranslationArguments if task == "translation" else ReversalArguments


if __name__ == "__main__":
    run_command(arguments_of, main)
