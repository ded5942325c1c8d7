"""Trains the reversal model with one score and several seeds; see --help."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from attention_jax.command_line import run_command
from attention_jax.tasks.reversal import ReversalConfig, train_run
from attention_jax.training import processes
from attention_jax.training.processes import Distribution
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


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Train the reversal model with one score function and several seeds at once.

    The run folder gets config.json, env.json, metrics.jsonl and checkpoints/. Ctrl-C or SIGTERM
    saves after the compiled call in progress (log_every steps) and exits with 130 or 143, a second
    one exits at once; --resume goes on from there, or from the newest good checkpoint after a
    crash, and ends bit-identical to a run that was never stopped.

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
    config: Annotated[ReversalConfig, tyro.conf.OmitArgPrefixes] = ReversalConfig()
    resume: bool = False
    tensorboard: bool = False
    log_gradients: Annotated[int | None, _LOG_GRADIENTS] = None
    mesh: Annotated[MeshShape | None, _MESH] = None
    distributed: bool = False
    distribution: Annotated[Distribution, tyro.conf.OmitArgPrefixes] = Distribution()

    def __post_init__(self) -> None:
        if self.distribution != Distribution() and not self.distributed:
            raise ValueError("coordinator, process_count and process_index need --distributed")


def main(arguments: Arguments) -> int:
    if arguments.distributed:
        processes.join(arguments.distribution)
    trained = train_run(
        arguments.config,
        arguments.workdir,
        resume=arguments.resume,
        tensorboard=arguments.tensorboard,
        log_gradients=arguments.log_gradients,
        mesh=arguments.mesh,
    )
    finished = trained.step == arguments.config.loop.steps
    # A signal that came while the last step was saved changes nothing.
    status = 0 if finished else trained.interrupted
    if not processes.is_first():
        return status
    rate = "" if trained.steps_per_second is None else f", {trained.steps_per_second:.0f} steps/s"
    print(
        f"{arguments.workdir}: step {trained.step} of {arguments.config.loop.steps},"
        f" {arguments.config.loop.seeds} seeds, {trained.seconds:.0f} s{rate} (all seeds together)"
    )
    if not finished:
        print("stopped by a signal; --resume goes on from here", file=sys.stderr)
    return status


if __name__ == "__main__":
    run_command(Arguments, main)
