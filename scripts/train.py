"""Trains a model of a task with one score; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Generic

import jax
import tyro

from attention_jax.commands.command_line import TaskName, parse, run_command
from attention_jax.commands.config_file import read_settings, words_of
from attention_jax.commands.introduction import introduce
from attention_jax.core.errors import one_line
from attention_jax.runs.loggers import get_logger
from attention_jax.runs.processes import is_first, together
from attention_jax.runs.progress import say
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.settings import option_types
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import ChosenTask, TrainConfig

_IN_A_FILE = ("log_gradients", "mesh", "log_to", "profile")  # besides the task and its settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(Generic[ChosenTask]):
    """Train a model of a task with one score function and several seeds at once.

    Each task has options of its own: --task translation --help shows those of translation. The
    fields of a task of your own are its options: --task my_tasks:Recall, for the class Recall in
    my_tasks.py of the current folder.

    The run folder gets config.json, env.json, metrics.jsonl, checkpoints/ and the task's own files.
    Ctrl-C, SIGTERM or a closed terminal saves after the steps in progress (log_every) and exits
    with 130, 143 or 129; a second signal exits at once. --resume continues from there, or after a
    crash from the newest good checkpoint; on a CPU it ends bit-identical to a run that was never
    stopped, before JAX 0.12 only with as many usable processors.

    Attributes:
        task_name: what to learn, a name or "module:Name".
        workdir: the run folder; made if missing.
        config: a file of settings: YAML with a line "dim: 64" for --dim 64, or the config.json of
            a run. Options on the command line win. It holds no `workdir` and no `resume`.
        resume: continue the run in `workdir`, or begin it. The options of the model, the task and
            the optimiser must be those of the run. --log-every, --checkpoint-every, --keep,
            --keep-best, --validate-on, --log-gradients and --mesh may change, and --steps where the
            learning rate does not depend on it.
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
        log_to: also send the metrics to "tensorboard" (event files in `workdir`/tensorboard), to
            "wandb" (Weights & Biases), or to "module:Name", your own function f(step, metrics) or
            class of such functions. A logger that fails stops nothing.
        profile: trace so many steps after the first compiled call, for Perfetto and TensorBoard, in
            `workdir`/profile.
    """

    task_name: TaskName = "reversal"
    workdir: Path
    config: Path | None = None
    resume: bool = False
    log_gradients: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[every=STEPS]")] = None
    mesh: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="AXIS=DEVICES ...")] = None
    distributed: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[HOST:PORT]")] = None
    processes: int | None = None
    process: int | None = None
    log_to: Annotated[tuple[str, ...], tyro.conf.arg(metavar="LOGGER ...")] = ()
    profile: Annotated[int | None, tyro.conf.arg(metavar="STEPS")] = None
    task: Annotated[ChosenTask, tyro.conf.OmitArgPrefixes]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of `train_run`.

        Raises:
            ValueError: the words of `log_gradients`, `mesh` or `log_to` are wrong.
        """
        every = mesh = None
        if self.log_gradients is not None:
            every = _numbers("log_gradients", self.log_gradients, ["every"]).get("every", 100)
        if self.mesh is not None:
            mesh = MeshShape(**_numbers("mesh", self.mesh or [""], ["data", "seed"]))
        loggers = [get_logger(text) for text in self.log_to]
        options = {"resume": self.resume, "log_gradients": every, "mesh": mesh}
        return {**options, "on_metrics": loggers, "profile": self.profile}


def _numbers(option: str, words: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Reads the numbers in the words of an option, such as ["data=4", "seed=2"]."""
    pairs = {name: number for name, _, number in (word.partition("=") for word in words)}
    right = all(name in names and number.isdecimal() for name, number in pairs.items())
    if not right or len(pairs) < len(words):
        form = " ".join(f"{name}=NUMBER" for name in names)
        raise ValueError(f"{option} must be of the form {form}; got {' '.join(words)!r}")
    return {name: int(number) for name, number in pairs.items()}


def main(arguments: Arguments[Any]) -> int:
    with together():
        options = arguments.options
    prepared = training.prepare(arguments.task, arguments.workdir, **options)
    prepared.begin_compiling()  # while the table is made
    run = training.run(prepared, peak=introduce(prepared))
    steps, seeds = run.task.train.steps, run.task.train.seeds
    finished = run.step == steps
    # A signal that arrived while the last step was saved did not stop anything.
    status = 0 if finished else run.interrupted
    speed = run.steps_per_second
    rate = "" if speed is None else f", {speed:.{0 if speed >= 100 else 1}f} steps/s"
    plural, of_all = ("s", " (all seeds together)") if seeds > 1 else ("", "")
    say(
        f"{arguments.workdir}: step {run.step} of {steps}, {seeds} seed{plural},"
        f" {run.seconds:.0f} s{rate}{of_all}"
    )
    if not finished and is_first():
        say("stopped by a signal; --resume goes on from here", error=True)
    return status


def arguments_of(words: list[str]) -> Arguments[Any]:
    """Reads the words of a command line, with those of the file --config in front of them.

    With --distributed this process joins the others here, before the file of a user's task, which
    may compute something, is imported.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--task", "--processes", "--process", "--optimizer"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--distributed", nargs="*")
    parser.add_argument("--config", nargs="?", type=Path)
    chosen = parser.parse_known_args(words)[0]
    if chosen.distributed is None and (chosen.processes or chosen.process):
        raise ValueError("processes and process must go with distributed HOST:PORT")
    if chosen.distributed is not None and not {"-h", "--help"} & {*words}:
        _join(chosen.distributed, chosen.processes, chosen.process)
    settings = read_settings(chosen.config) if chosen.config else {}
    task = task_of(chosen.task or str(settings.get("task", "reversal")))
    of_file: list[str] = []
    if settings:
        hints = typing.get_type_hints(Arguments)
        types = {"task": str, **{name: hints[name] for name in _IN_A_FILE}, **option_types(task)}
        of_file = words_of(chosen.config, settings, types)
    if chosen.optimizer is None:
        optimizer = parser.parse_known_args(of_file)[0].optimizer
        words = [*_without_adam(optimizer), *of_file, *words]
    else:
        words = [*of_file, *_without_adam(chosen.optimizer), *words]
    arguments: Arguments[Any] = parse(Arguments[task], words)  # type: ignore[valid-type]
    return arguments


def _without_adam(optimizer: str | None) -> list[str]:
    """The words that undo a task's own settings of Adam, for another optimiser."""
    if optimizer in (None, "adam"):
        return []
    names = TrainConfig.of_adam
    return [f"--{name.replace('_', '-')}={getattr(TrainConfig, name)}" for name in names]


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
        known: Any = {name: int(number) for name, number in numbers.items() if number}
        jax.distributed.initialize(next(iter(address), None), **known)
    except Exception as error:  # JAX asks the cluster in many ways
        raise ValueError(
            f"distributed: {one_line(error)}; where JAX finds no cluster (SLURM, TPU pod,"
            " Kubernetes, Open MPI), give HOST:PORT of the first process, processes and process"
        ) from error


if __name__ == "__main__":
    run_command(arguments_of, main)
