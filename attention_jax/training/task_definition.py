"""What a task supplies, so that one trainer serves all tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import optax

from attention_jax.runs.run_folder import JSON, NO_FILES, RunFolder
from attention_jax.training.loop import AnyTask, LoopConfig, Metrics, TrainState, initial_state
from attention_jax.training.validation import ValidationPlan


class RunConfig(Protocol):
    """The settings of a run, a frozen dataclass."""

    @property
    def loop(self) -> LoopConfig:
        """Steps, seeds and checkpoints."""

    @property
    def label(self) -> str:
        """What progress and tables call the run."""

    def to_json(self) -> JSON:
        """All settings and the name of the task, for config.json."""

    @classmethod
    def from_json(cls, content: JSON) -> Self:
        """The inverse of `to_json`; raises ValueError for the settings of another task."""


Config = TypeVar("Config", bound=RunConfig)


class RunData(NamedTuple):
    """What a run learns from, and how it is validated.

    The digests become part of the settings, so that a run is resumed on the same data only. The
    files are copied into the run folder under their names.
    """

    task: AnyTask
    digests: JSON | None = None
    files: Mapping[str, bytes] = NO_FILES
    validation: ValidationPlan | None = None
    description: str = ""  # for the user


class Result(NamedTuple):
    """One measure of a finished run, and what tables and figures need to know of it."""

    by_seed: Sequence[float]  # a number per seed; NaN where training diverged
    larger_is_better: bool
    low: float = 0.0  # the smallest number that it can be
    high: float | None = None  # the largest; None for no bound


# The results of a run by name.
Results = dict[str, Result]


@dataclasses.dataclass(frozen=True)
class TaskDefinition(Generic[Config]):
    """What a task supplies to be trained, resumed and loaded.

    Attributes:
        name: what config.json and the command line call it.
        config_class: the class of its settings.
        task: settings -> the functions to learn with; for loading a run, no data is needed.
        optimizer: settings -> optimiser.
        prepare: (settings, run folder, divisor) -> the run's data; the size of each batch must be a
            multiple of the divisor. None if `task` draws its batches on the device.
        batch_size: settings -> examples of a batch; None if `prepare` makes batches fit the mesh.
        why_steps_are_fixed: settings -> why a run with these settings cannot go on beyond
            `loop.steps`, to follow the word "since"; "" if training does not depend on them.
        gradient_statistics: what `log_gradients` logs; see `GradientLog`.
        results: `TrainedRun` of a finished run -> its results by name; the names carry the units.
        length_results: (run, lengths of the source) -> results at each of these lengths; None if
            the task has no results by length.
        stopped_early: run -> whether it ended before its last step because validation no longer
            improved.
    """

    name: str
    config_class: type[Config]
    task: Callable[[Config], AnyTask]
    optimizer: Callable[[Config], optax.GradientTransformation]
    prepare: Callable[[Config, Path, int], RunData] | None = None
    batch_size: Callable[[Config], int | None] = lambda config: None
    why_steps_are_fixed: Callable[[Config], str] = lambda config: (
        "the task does not say that its training is independent of them"
    )
    gradient_statistics: Callable[..., Metrics] | None = None
    results: Callable[[Any], Results] = lambda run: {}
    length_results: Callable[[Any, Sequence[int]], Results] | None = None
    stopped_early: Callable[[Any], bool] = lambda run: False

    def config_from(self, workdir: Path) -> Config:
        """The settings of the run in a folder.

        Raises:
            ValueError: the folder holds no run, or a run of another task.
        """
        content = RunFolder(workdir).read_config()
        try:
            return self.config_class.from_json(content)
        except ValueError as error:
            raise ValueError(f"workdir {workdir}: {error}") from error

    def initial_state(self, config: Config) -> TrainState:
        """The stacked state of all seeds before the first step, on one device."""
        return initial_state(self.task(config), self.optimizer(config), config.loop)
