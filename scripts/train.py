"""Trains a model of a task with one score; see --help."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Generic

import tyro
from command_line import TaskName, run_command
from config_file import read_settings, words_of

from attention_jax.runs.progress import say
from attention_jax.tasks import task_of
from attention_jax.training import run as training
from attention_jax.training.sharding import MeshShape
from attention_jax.training.task import Settings
from attention_jax.training.task_class import option_types


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
        config: a file of settings: YAML with a line "dim: 64" for --dim 64, or the config.json of
            a run. Options on the command line win. It holds no `workdir` and no `resume`.
        resume: continue the run in `workdir`, or begin it. The options of the model, the task and
            the optimiser must be those of the run. --log-every, --checkpoint-every, --keep,
            --keep-best, --log-gradients and --mesh may change, and --steps where the learning rate
            does not depend on it.
        log_gradients: also write gradient norms and attention statistics of the next batch to
            `workdir`/gradients.jsonl: every 100 steps, or every=STEPS, a multiple of log_every; off
            if left out.
        mesh: devices along each axis, for example "data=4 seed=2". "seed" spreads seeds and divides
            their number; "data" spreads the batch and divides its size. If left out, one device.
    """

    task: TaskName = "reversal"
    workdir: Path
    config: Path | None = None
    resume: bool = False
    log_gradients: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="[every=STEPS]")] = None
    mesh: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="AXIS=DEVICES ...")] = None
    settings: Annotated[Settings, tyro.conf.OmitArgPrefixes]

    @property
    def options(self) -> dict[str, Any]:
        """What `train_run` takes besides the settings and the folder.

        Raises:
            ValueError: the words of `log_gradients` or of `mesh` are wrong.
        """
        every = mesh = None
        if self.log_gradients is not None:
            every = _numbers("log_gradients", self.log_gradients, ["every"]).get("every", 100)
        if self.mesh is not None:
            mesh = MeshShape(**_numbers("mesh", self.mesh or [""], ["data", "seed"]))
        return {"resume": self.resume, "log_gradients": every, "mesh": mesh}


def _numbers(option: str, words: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """The numbers in the words of an option, such as ["data=4", "seed=2"]."""
    pairs = {name: number for name, _, number in (word.partition("=") for word in words)}
    right = all(name in names and number.isdecimal() for name, number in pairs.items())
    if not right or len(pairs) < len(words):
        form = " ".join(f"{name}=NUMBER" for name in names)
        raise ValueError(f"{option} must be of the form {form}; got {' '.join(words)!r}")
    return {name: int(number) for name, number in pairs.items()}


def main(arguments: Arguments[Any]) -> int:
    run = training.train_run(arguments.settings, arguments.workdir, **arguments.options)
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


def arguments_of(words: list[str]) -> tuple[Any, list[str]]:
    """The arguments for the task that is named, and the words, those of --config first."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--task", nargs="?")
    parser.add_argument("--config", nargs="?", type=Path)
    given = parser.parse_known_args(words)[0]
    content = read_settings(given.config) if given.config else {}
    task = task_of(given.task or str(content.get("task", "reversal")))
    if content:
        types = typing.get_type_hints(Arguments)
        for name in ("workdir", "config", "resume", "settings"):
            del types[name]
        words = [*words_of(given.config, content, types | option_types(task)), *words]
    return Arguments[task], words  # type: ignore[valid-type]


if __name__ == "__main__":
    run_command(arguments_of, main)
