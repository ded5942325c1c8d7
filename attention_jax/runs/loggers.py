"""Loggers: functions that get the metrics of a run while it trains, beside its own files."""

import collections
import json
import os
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from attention_jax.core.checks import optional_package
from attention_jax.core.errors import one_line
from attention_jax.core.names import imported
from attention_jax.runs.metrics_file import last_line
from attention_jax.runs.progress import say, warn
from attention_jax.runs.run_folder import JSON

Metrics = dict[str, list[float]]  # a number per seed
# A function f(step, metrics), or a class that is called with the folder of a run and the content of
# its config.json, and whose instance is such a function. It may have a method `close()`.
Logger = Callable[..., Any]


class Loggers:
    """Calls several loggers. When a logger raises, a warning is printed and training goes on.

    Args:
        loggers: the loggers.
        folder: of the run, which has begun.
        config: the content of its config.json.
    """

    def __init__(self, loggers: Sequence[Logger], folder: Path, config: JSON):
        self._failures: collections.Counter[str] = collections.Counter()
        self._open: list[tuple[str, Logger]] = []
        for logger in loggers:
            name = getattr(logger, "__qualname__", type(logger).__qualname__)
            is_class = isinstance(logger, type)
            opened = self._called(name, logger, folder, config) if is_class else logger
            if opened is not None:
                self._open.append((name, opened))

    def __call__(self, step: int, metrics: Metrics) -> None:
        for name, logger in self._open:
            # A logger gets lists of its own, and may change them.
            self._called(name, logger, step, {key: [*each] for key, each in metrics.items()})

    def close(self) -> None:
        """Closes each logger, and warns how often it has failed."""
        for name, logger in self._open:
            self._called(name, getattr(logger, "close", lambda: None))
        for name, count in self._failures.items():
            warn(f"logger {name}, failures: {count}; the run's own files have every line")

    def _called(self, name: str, function: Logger, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            self._failures[name] += 1
            if self._failures[name] == 1:
                reason = f"{type(error).__name__}: {one_line(error)}"
                warn(f"logger {name} failed, and training goes on: {reason}")
            return None


class TensorBoard:
    """Writes the event files that TensorBoard reads, to the run's folder "tensorboard"."""

    def __init__(self, folder: Path, config: JSON):
        protos = "tensorboard.compat.proto"
        self._event = import_module(f"{protos}.event_pb2")
        self._summary = import_module(f"{protos}.summary_pb2").Summary
        self._first_seed = config["train"]["first_seed"]
        writer = import_module("tensorboard.summary.writer.event_file_writer")
        self._writer = writer.EventFileWriter(str(folder / "tensorboard"))
        # TensorBoard drops the events of the steps that a resumed run makes again.
        first = last_line(folder / "metrics.jsonl").get("step", -1) + 1
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(first, session_log=start)
        markdown = textwrap.indent(json.dumps(config, indent=2), "    ")
        text = import_module("tensorboard.plugins.text.summary_v2").text_pb
        self._write(first, summary=text("config.json", markdown))

    def __call__(self, step: int, metrics: Metrics) -> None:
        series = _series(metrics, self._first_seed)
        values = [{"tag": tag, "simple_value": number} for tag, number in series]
        self._write(step, summary=self._summary(value=values))

    def _write(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()  # before the checkpoint of this step

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()


_WAITS = {"init_timeout": 30.0, "finish_timeout": 60.0}  # seconds, if there is no network


class WeightsAndBiases:
    """Logs to a run of Weights & Biases with the run's name and settings; resumes the same run.

    Its files lie in the run's folder "wandb". The variables of the environment, such as
    WANDB_PROJECT and WANDB_MODE, decide the rest.
    """

    def __init__(self, folder: Path, config: JSON):
        self._first_seed = config["train"]["first_seed"]
        wandb = import_module("wandb")
        names = sorted(path.name for path in (folder / "wandb").glob("*run-*_*-*"))
        ids = [name.partition("run-")[2].split("-", 1)[1] for name in names]
        self._run = wandb.init(
            dir=str(folder),
            name=folder.name,
            config=config,
            id=ids[0] if ids else None,
            resume="allow",
            reinit="create_new",  # a caller may have a run of its own
            settings={
                name: seconds
                for name, seconds in _WAITS.items()
                if name in wandb.Settings.model_fields and f"WANDB_{name.upper()}" not in os.environ
            },
        )

    def __call__(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(_series(metrics, self._first_seed)), step=step)

    def close(self) -> None:
        """Ends the run of Weights & Biases."""
        self._run.finish()


class Profile:
    """Traces compiled calls with JAX's profiler, but not the first call, which compiles.

    Args:
        folder: of the run; the trace is written to its folder "profile".
        steps: how many steps are traced, or some more, because a call is traced as a whole.
    """

    def __init__(self, folder: Path, steps: int):
        self._folder, self._steps = folder / "profile", steps
        self._first = self._last = -1  # the steps before and at the end of the trace
        self._is_open = False

    def __call__(self, step: int, metrics: Metrics) -> None:
        if "loss" not in metrics:  # gradients or validation
            return
        self._last = step
        if self._first < 0:
            self._first, self._is_open = step, True
            jax.profiler.start_trace(self._folder)
        elif step - self._first >= self._steps:
            self.close()

    def close(self) -> None:
        """Writes the trace, if it has not been written."""
        if not self._is_open:
            return
        self._is_open = False
        jax.profiler.stop_trace()
        if self._first == self._last:
            warn("profile: nothing was traced, because the run ended after its first compiled call")
            return
        path = [self._folder, *sorted(self._folder.rglob("*.trace.json.gz"))][-1]
        say(
            f"profile of steps {self._first} to {self._last}: open {path} in ui.perfetto.dev, or"
            f" pip install xprof tensorboard, and tensorboard --logdir {self._folder}"
        )


_BY_NAME: dict[str, type[Any]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def get_logger(text: str) -> Logger:
    """The logger that a text names: "tensorboard", "wandb" or "module:Name".

    Raises:
        ValueError: there is no such logger, or its package is not installed.
    """
    if text in _BY_NAME:
        optional_package(text, f"log_to {text}", extra="log")
    found: Any = _BY_NAME.get(text) or imported(text, text, "log_to", _BY_NAME)
    if not callable(found):
        raise ValueError(f"log_to {text!r} must be a function or a class; got {found!r}")
    return found


# Metrics whose numbers are the same for all seeds.
_SHARED = ("learning_rate", "steps_per_second", "tokens_per_second")


def _series(metrics: Metrics, first_seed: int) -> Iterator[tuple[str, float]]:
    """The mean over seeds of each metric, and if there are several seeds each seed's number."""
    for name, by_seed in metrics.items():
        yield name, statistics.fmean(by_seed)
        if len(by_seed) > 1 and name not in _SHARED:
            for seed, number in enumerate(by_seed, first_seed):
                yield f"{name}/seed {seed}", number
