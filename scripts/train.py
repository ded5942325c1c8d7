"""Trains a model of a task with one score; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import traceback
from pathlib import Path
from typing import Annotated, Any, Generic

import jax
import tyro
from command_line import TaskName, is_users_mistake, run_command

from attention_jax.core.programs import one_line
from attention_jax.runs.processes import is_first, several, together
from attention_jax.runs.progress import say
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Settings


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
            their number; "data" spreads the batch and divides its size. If left out, one device;
            with `distributed`, all devices along "data". A run may be resumed on another mesh.
        distributed: this is one of several processes that train together, each with the same
            command. The first one prints, and reads and writes `workdir`. On SLURM, TPU pods,
            Kubernetes and Open MPI JAX finds the others; elsewhere give the address of the first
            process, `processes` and `process`.
        processes: how many there are.
        process: which of them this is, from 0 on.
    """

    task: TaskName = "reversal"
    workdir: Path
    resume: bool = False
    log_gradients: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[every=STEPS]")] = None
    mesh: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="AXIS=DEVICES ...")] = None
    distributed: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[HOST:PORT]")] = None
    processes: int | None = None
    process: int | None = None
    settings: Annotated[Settings, tyro.conf.OmitArgPrefixes]

    @property
    def options(self) -> dict[str, Any]:
        """What `train_run` takes besides the settings and the folder.

        Raises:
            ValueError: the words of `log_gradients` or of `mesh` are wrong.
        """
        mesh = None if self.mesh is None else MeshShape.from_words(self.mesh)
        every = None if self.log_gradients is None else 100
        if self.log_gradients:
            words = " ".join(self.log_gradients)
            steps = words.removeprefix("every=")
            if not steps.isdecimal():
                raise ValueError(f"log_gradients must be nothing or every=STEPS; got {words}")
            every = int(steps)
        return {"resume": self.resume, "log_gradients": every, "mesh": mesh}


def main(arguments: Arguments[Any]) -> int:
    with together():
        options = arguments.options
    try:
        run = training.train_run(arguments.settings, arguments.workdir, **options)
    except Exception as error:
        if several() and not is_users_mistake(error):
            _end_alone(error)
        raise
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
    if not finished and is_first():
        say("stopped by a signal; --resume goes on from here", error=True)
    return status


def arguments_of(words: list[str]) -> Any:
    """The arguments for the task that the command line names.

    With --distributed this process joins the others here, before the file of a user's task, which
    may compute something, is imported.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--task", "--processes", "--process"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--distributed", nargs="*")
    given = parser.parse_known_args(words)[0]
    if given.distributed is None and (given.processes or given.process):
        raise ValueError("processes and process must go with distributed HOST:PORT")
    if given.distributed is not None and not {"-h", "--help"} & {*words}:
        _join(given.distributed, given.processes, given.process)
    return Arguments[task_of(given.task or "reversal")]  # type: ignore[misc]


def _join(address: list[str], processes: str | None, process: str | None) -> None:
    """Joins the other processes.

    Raises:
        ValueError: the words are wrong, JAX finds no cluster, or the others do not come.
    """
    if address and not (re.fullmatch(r"\S+:\d+", address[0]) and len(address) == 1):
        raise ValueError(f"distributed must be nothing or HOST:PORT; got {' '.join(address)}")
    numbers = {"num_processes": processes, "process_id": process}
    if wrong := [each for each in numbers.values() if each and not each.isdecimal()]:
        raise ValueError(f"processes and process must be integers; got {wrong[0]}")
    # JAX's handler of SIGTERM would swallow those that come before the first step.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        given: Any = {name: int(number) for name, number in numbers.items() if number}
        jax.distributed.initialize(next(iter(address), None), **given)
    except Exception as error:  # JAX asks the cluster in many ways
        raise ValueError(
            f"distributed: {one_line(error)}; where JAX finds no cluster (SLURM, TPU pod,"
            " Kubernetes, Open MPI), give HOST:PORT of the first process, processes and process"
        ) from error


def _end_alone(error: Exception) -> None:
    """Ends this process at once, for an error that the others do not know: a lost one, or a bug.

    Otherwise JAX would wait at the end for the others, which wait for this one.
    """
    if re.match(r"[A-Z_]+: ", str(error)):  # a status of XLA's runtime
        message = f"error: process {jax.process_index()} cannot go on: {one_line(error)}"
        say(f"{message}; --resume goes on from the last checkpoint", error=True)
    else:
        traceback.print_exception(error)
    os._exit(1)


if __name__ == "__main__":
    run_command(arguments_of, main)
