"""The contract of a task: all that training, evaluation, reports and pages ask of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import optax

from attention_jax.training.config import TrainConfig as TrainConfig
from attention_jax.training.metrics import finite_mean

Array = jax.Array
Params = Any  # a pytree of arrays
Metrics = dict[str, Array]
JSON = dict[str, Any]

# By the name of an example: labels of the tokens that are predicted, of the tokens attended to.
Labels = dict[str, tuple[list[str], list[str]]]


class Result(NamedTuple):
    """One measure of a trained run, and what tables and figures need to know of it."""

    by_seed: Sequence[float]  # a number per seed; NaN where training diverged
    larger_is_better: bool
    low: float = 0.0  # the smallest number that it can be
    high: float | None = None  # the largest; None for no bound


class Feed(NamedTuple):
    """Batches made on the host, and digests and files of their data for the run folder."""

    batch: Callable[[int, int], Any]  # (seed, step) -> NumPy arrays; the step fixes their shapes
    digests: Mapping[str, Any] = MappingProxyType({})  # a run is resumed on equal digests only
    files: Mapping[str, bytes] = MappingProxyType({})  # written to the run folder, by name
    note: str = ""  # for the user


class Validation(NamedTuple):
    """What to do with the metrics that `Task.validate` measures."""

    metric: str  # its mean over the seeds where it is finite ranks checkpoints
    larger_is_better: bool

    def loss(self, line: JSON) -> float:
        """What ranks the checkpoint of a line of validation.jsonl; smaller is better."""
        mean = finite_mean(line[self.metric])
        if math.isnan(mean):
            return math.inf  # never the best
        return -mean if self.larger_is_better else mean


class Answers(NamedTuple):
    """A model's answers to a few inputs, ready to be printed and drawn."""

    texts: list[tuple[str, str, str | None]]  # (input, answer, the right one if the task knows it)
    batch: Any  # the inputs with the model's own answers as targets
    labels: Labels  # one for each row of `batch`


def check_instances(task: "Task", **classes: type) -> None:
    """Raises ValueError unless the attributes of a task are instances of classes, by name."""
    for name, cls in classes.items():
        if not isinstance(value := getattr(task, name), cls):
            raise ValueError(f"{name} must be a {cls.__name__}; got {value!r}")


def check_metrics(owner: str, method: str, metrics: Any, *taken: str) -> None:
    """Raises ValueError unless metrics are a dict whose names are free in a line of a file."""
    if not isinstance(metrics, dict):
        raise ValueError(f"{owner}: {method} must return a dict of metrics; got {metrics!r}")
    for name in metrics:
        if not isinstance(name, str) or name in ("step", *taken):
            raise ValueError(
                f"{owner}: {method} must give metrics names other than"
                f" {', '.join(('step', *taken))}; got {name!r}"
            )


def undefined(task: "Task", method: str) -> ValueError:
    """The error for a method that a task has to define."""
    return ValueError(f"task {type(task).__name__} must define {method}")


class Task:
    """What a model learns. A task is a frozen dataclass; its fields are its settings.

    Its fields, those of `model` and those of `train` are the options of the command lines, and the
    content of config.json. `tasks.sequences.SequenceTask` implements all methods for tasks from one
    sequence to another.

    Attributes:
        name: what labels and folders call the task.
        by_length: whether `evaluate` takes lengths.
        model: the settings of the model.
        train: how it is trained.
    """

    name: ClassVar[str]
    by_length: ClassVar[bool] = False
    model: Any
    train: TrainConfig

    # --- training: pure functions ---

    def init(self, rng: Array) -> Params:
        """The initial parameters."""
        raise undefined(self, "init(rng)")

    def loss(self, params: Params, batch: Any, rng: Array | None) -> tuple[Array, Metrics]:
        """The loss of a batch, float [], and further metrics, float [] each.

        Without an `rng` there is no dropout.
        """
        raise undefined(self, "loss(params, batch, rng)")

    def check_numbers(self) -> None:
        """Draws a few examples of a user's task; raises ValueError if they break its contract."""

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Any:
        """Draws a batch on the device; with a `length`, all its examples have this length."""
        raise undefined(self, "batch(rng, *, size, length=None)")

    def feed(self, folder: Path, *, multiple_of: int = 1) -> Feed | None:
        """Batches made on the host, for example from files; None for a task that draws its own.

        Args:
            folder: of the run, which may not exist yet. Nothing is written there.
            multiple_of: the number of examples of each batch must be a multiple of this.

        Raises:
            ValueError: the data cannot be used.
        """
        return None

    def optimizer(self) -> optax.GradientTransformation:
        """Turns gradients into updates."""
        return self.train.transformation()

    # --- validation, at each checkpoint ---

    @property
    def validation(self) -> Validation | None:
        """What to do with the metrics of `validate`; None for no validation.

        Raises:
            ValueError: `train.validate_on` is set, and the task draws no examples to validate on.
        """
        if self.train.validate_on:
            raise ValueError(
                f"validate_on must be 0: task {self.name} has no validation on examples that it"
                f" draws; got {self.train.validate_on}"
            )
        return None

    def validate(self, params: Params, folder: Path) -> dict[str, list[float]]:
        """Metrics of parameters that are stacked over seeds: {name: one number per seed}."""
        raise undefined(self, "validate(params, folder)")

    # --- a trained model ---

    def bind(self, params: Params) -> Any:
        """The model with these parameters; `model(*batch.inputs)` is its output for a batch."""
        raise undefined(self, "bind(params)")

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """Results by name, which carries the unit; with `lengths`, those at each of the lengths.

        Args:
            params: stacked over seeds.
            lengths: of examples.
            folder: of the run.
        """
        raise undefined(self, "evaluate(params, lengths=(), *, folder=None)")

    def examples(self, folder: Path | None = None) -> tuple[Any, Labels]:
        """A batch for reports and pages, and the labels of its first rows."""
        raise undefined(self, "examples(folder=None)")

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """The answers of one seed's model to inputs, or to those of `examples`."""
        raise undefined(self, "answers(params, inputs=(), *, beams=1, folder=None)")

    def statistics(
        self, loss: Callable[..., Any], params: Params, batch: Any, rng: Array, /
    ) -> Metrics:
        """The statistics of one seed that `log_gradients` logs: {name: float []}; pure."""
        raise undefined(self, "statistics(loss, params, batch, rng)")

    @property
    def label(self) -> str:
        """The name of a run in progress and tables."""
        return self.name


# The class of a task, where it is chosen by a command line.
ChosenTask = TypeVar("ChosenTask", bound=Task)
