"""What a run writes while it trains: lines, checkpoints with their validation, the time it took."""

import contextlib
import os
import statistics
from pathlib import Path

import jax
import numpy as np

from attention_jax.runs import processes
from attention_jax.runs.checkpoints import Checkpoints
from attention_jax.runs.environment import usable_cpus
from attention_jax.runs.loggers import Loggers
from attention_jax.runs.metrics_file import add_line, drop_lines_after, last_line
from attention_jax.runs.progress import Progress, warn
from attention_jax.runs.run_folder import JSON, read_json, sync, writing
from attention_jax.training.metrics import finite_mean
from attention_jax.training.prepare import Prepared
from attention_jax.training.step import TrainState, batches_of_step
from attention_jax.training.task import Metrics, Params, Validation, check_metrics

_LINES = ("metrics", "gradients", "validation")  # the files of lines by step


class Records:
    """Writes what a run leaves in its folder.

    Every process calls these methods in the same order; the first one writes, and an error of it is
    raised in all.

    Args:
        prepared: the run.
        folder: of the run, which is open.
        checkpoints: in the folder; None in all processes but the first.
        progress: what is printed.
        origin: the `environment` of this start; None in all processes but the first.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        checkpoints: Checkpoints | None,
        progress: Progress,
        origin: JSON | None,
    ):
        self._prepared, self._folder, self._checkpoints = prepared, folder, checkpoints
        self._progress = progress
        self._timing, self._untimed = folder / "timing.jsonl", 0
        self._loggers: Loggers | None = None
        kept = ("python", "packages", "device", "git_commit")
        self._origin = {name: origin[name] for name in kept if origin}

    def begin(self, step: int, state: TrainState) -> None:
        """Drops the lines of steps that will be done again, and writes what belongs to a start.

        These are the statistics of the gradients at step 0, or the validation of the newest
        checkpoint if it failed once that was saved.
        """

        def write() -> None:
            # A run without a checkpoint starts over, and writes the line of step 0 again.
            for name in _LINES:
                drop_lines_after(self._folder / f"{name}.jsonl", step or -1)
            drop_lines_after(self._timing)  # none but one that a crash has cut off
            if self._timing.exists():
                self._untimed = self._timing.stat().st_size
            add_line(self._timing, {"from_step": step, **self._origin})
            self._loggers = Loggers(self._prepared.loggers, self._folder, self._prepared.config)
            if step:
                _warn_of_cpus(self._folder)
            if (feed := self._prepared.feed) is not None and feed.note:
                self._progress.note(feed.note)

        processes.first_does(write)
        if step:
            self.save(step, state, None)
        else:
            self.write_gradients(step, state)

    def write_metrics(
        self, step: int, line: dict[str, list[float]], speed: dict[str, float]
    ) -> float:
        """Writes the metrics of a compiled call; returns its loss, the mean over seeds.

        Args:
            step: at the end of the call.
            line: a number per seed for each metric.
            speed: of each seed, from `Progress.update`.
        """
        shared = {**self._rate(step), **speed}
        seeds = self._prepared.task.train.seeds
        added = {name: [value] * seeds for name, value in shared.items() if name not in line}
        processes.first_does(lambda: self._write("metrics", step, line | added))
        return finite_mean(line["loss"])

    def _rate(self, step: int) -> dict[str, float]:
        """The learning rate of the last update, if the settings of the run determine it."""
        rates, done = self._prepared.rates, step // self._prepared.task.train.accumulate
        # The shortest text of a float32: 0.003, not 0.003000000026077032.
        return {} if rates is None else {"learning_rate": float(str(rates[max(done - 1, 0)]))}

    def write_gradients(self, step: int, state: TrainState) -> None:
        """Writes the statistics of the gradients of the next batch, where they are due."""
        task, every = self._prepared.task, self._prepared.log_gradients
        if every is None or (step % every and step != task.train.steps):
            return
        batches = batches_of_step(task, self._prepared.feed, step)
        metrics = self._prepared.compiled.statistics(state, batches)
        check_metrics(f"task {task.name}", "statistics(...)", metrics)
        line = by_seed(metrics)
        processes.first_does(lambda: self._write("gradients", step, line))

    def save(self, step: int, state: TrainState, loss: float | None) -> None:
        """Validates and saves, unless both have been done for this step.

        Without validation, the loss decides which checkpoints are the best.
        """
        host_state = processes.whole(state)
        processes.first_does(lambda: self._save(step, host_state, loss))

    def _save(self, step: int, state: TrainState, loss: float | None) -> None:
        task, checkpoints = self._prepared.task, self._checkpoints
        assert checkpoints is not None  # in the first process
        train, is_saved = task.train, step in checkpoints.steps()
        # A stop by a signal is not planned: it neither validates nor keeps a checkpoint for good.
        planned = step > 0 and (step % train.checkpoint_every == 0 or step == train.steps)
        metric, rule = (loss, task.validation) if planned else (None, None)
        if is_saved and rule is None:
            return
        if rule is not None:
            line = last_line(self._folder / "validation.jsonl", step)
            if line.get("step") != step or rule.metric not in line:
                try:
                    line = self._validated(rule, state.params)
                except Exception:
                    if not is_saved:  # an error of the task loses no step
                        self._keep(step, state, None, temporary=True)
                    raise
                self._write("validation", step, line)
                means = ", ".join(f"{name} {statistics.fmean(x):.4g}" for name, x in line.items())
                self._progress.note(f"step {step}, validation: {means}")
            metric = rule.loss(line)
        self._keep(step, state, metric, temporary=not planned)

    def _validated(self, rule: Validation, params: Params) -> dict[str, list[float]]:
        """The metrics of `Task.validate` as a line; ValueError without a number per seed."""
        task, method = self._prepared.task, "validate(params, folder)"
        metrics = task.validate(jax.device_get(params), self._folder)
        check_metrics(f"task {task.name}", method, metrics)
        shapes = {name: np.shape(values) for name, values in metrics.items()}
        if {*shapes.values()} != {(task.train.seeds,)} or rule.metric not in shapes:
            raise ValueError(
                f"task {task.name}: {method} must give {rule.metric!r}, and for each metric"
                f" {task.train.seeds} numbers, one for each seed; got the shapes {shapes}"
            )
        return {name: np.asarray(values, np.float64).tolist() for name, values in metrics.items()}

    def _keep(self, step: int, state: TrainState, metric: float | None, *, temporary: bool) -> None:
        for name in _LINES:
            if (path := self._folder / f"{name}.jsonl").exists():
                with writing("file", path):
                    sync(path)  # the lines up to a checkpoint are on disk before it is
        self._checkpoints.save(step, state, metric=metric, temporary=temporary)  # type: ignore[union-attr]

    def _write(self, name: str, step: int, line: dict[str, list[float]]) -> None:
        """Adds a line to a file, and sends it to the loggers."""
        add_line(self._folder / f"{name}.jsonl", {"step": step, **line})
        prefix = "" if name == "metrics" else f"{name}/"
        assert self._loggers is not None
        self._loggers(step, {prefix + metric: values for metric, values in line.items()})

    def end(self, first_step: int, step: int) -> None:
        """Replaces the line of this start in timing.jsonl by one with the time that it took."""
        progress = self._progress
        speed = {"seconds": progress.seconds, "steps_per_second": None, **progress.speed}
        line = {"from_step": first_step, "to_step": step, **speed, **self._origin}

        def write() -> None:
            with writing("file", self._timing):
                os.truncate(self._timing, self._untimed)
            if step > first_step:
                add_line(self._timing, line)

        processes.first_does(write)

    def close(self) -> None:
        """Closes the loggers."""
        if self._loggers is not None:
            self._loggers.close()


def by_seed(metrics: Metrics) -> dict[str, list[float]]:
    """Arrays [seeds] as lists."""
    return {name: np.asarray(values).tolist() for name, values in metrics.items()}


def _warn_of_cpus(folder: Path) -> None:
    # XLA divided sums between the processors before JAX 0.12.
    before = None
    with contextlib.suppress(ValueError):
        before = read_json(folder / "env.json").get("usable_cpus")
    now, on_cpu = usable_cpus(), jax.default_backend() == "cpu"
    if on_cpu and before not in (None, now) and jax.__version_info__ < (0, 12):
        warn(
            f"the run began on {before} usable processors and goes on with {now}: with jax"
            f" {jax.__version__} its bits may differ from those of a run that was never stopped"
        )
