"""The contract of a task: all that training, evaluation, reports and pages ask of it."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from attention_jax.core.checks import check_choice, check_integer, checked_fraction
from attention_jax.core.errors import one_line
from attention_jax.core.names import imported, name_and_fields
from attention_jax.training.metrics import finite_mean

Array = jax.Array
Params = Any  # a pytree of arrays
Metrics = dict[str, Array]
JSON = dict[str, Any]
Schedule = Literal["cosine", "constant", "inverse-sqrt"]

# By the name of an example: labels of the tokens that are predicted, of the tokens attended to.
Labels = dict[str, tuple[list[str], list[str]]]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a task is trained: length, optimiser, logs and checkpoints.

    A run may be resumed with another `log_every`, `checkpoint_every`, `keep`, `keep_best` or
    `validate_on`, on which no bit of a parameter depends, and with more `steps` where the rate
    allows it. From JAX 0.12 on, calls of a single step (`log_every` = 1) may round a very small
    model otherwise.

    Attributes:
        seeds: runs trained at once; they differ in initial parameters, batches and dropout.
        first_seed: the seeds are first_seed, first_seed + 1, ...
        steps: optimiser steps of each seed.
        batch_size: examples per step; in a task that chooses the sizes of its batches the most
            examples, or None for no limit.
        optimizer: "adam", or "module:function", which takes the learning rate as an
            `optax.Schedule` and returns an `optax.GradientTransformation`; with further arguments,
            "optax:sgd(momentum=0.9)". Clipping and `accumulate` are the same for each.
        learning_rate: the highest rate.
        schedule: how the rate falls: along a cosine to 0 at the last step ("cosine"), not at all
            ("constant"), or as 1 / sqrt(updates) ("inverse-sqrt"). A run whose rate does not depend
            on the number of steps can be resumed with more steps.
        warmup_steps: updates over which the rate rises in equal steps: that of the n-th is
            n / `warmup_steps` of the highest, with every schedule. At most the number of updates.
        warmup_from_0: with "cosine" and "constant" the rates of n - 1 in place of n, so that the
            first update changes nothing. For runs that began when there was no other.
        clip_norm: the gradient's norm is clipped to this.
        weight_decay: each of Adam's updates also multiplies every parameter by
            1 - rate * `weight_decay` (AdamW); 0 for plain Adam.
        beta2: Adam's decay of the mean of squared gradients.
        epsilon: Adam's addend of the denominator.
        accumulate: batches for one update, which divide `steps`. Its gradient is the mean of
            their gradients, and so each batch counts the same, however many tokens it has.
        log_every: steps in one compiled call, and between two lines of metrics.jsonl.
        checkpoint_every: steps between two checkpoints, a multiple of `log_every`.
        keep: how many of the newest checkpoints are kept.
        keep_best: how many of the best checkpoints are kept, whether or not they are among the
            newest: those with the best validation metric, or without validation the smallest
            training loss (mean over `log_every` steps). The mean over seeds leaves out those
            where the number is not finite, so that a seed that diverges hides no best checkpoint.
        validate_on: how many fresh examples each checkpoint is validated on, the same ones for all
            checkpoints, seeds and runs; 0 for no validation. For tasks that draw their examples: a
            task with held-out text validates on that.
        init_from: the folder of another run, whose newest parameters this run begins with, seed by
            seed (all seeds with those of a run of one seed), or a file of scripts/export.py; None
            for the parameters that the task draws. The run keeps a copy, "initial" in its folder,
            which repeats of the run begin with.

    Raises:
        ValueError: a setting is out of range.
    """

    free_on_resume: ClassVar = ("log_every", "checkpoint_every", "keep", "keep_best", "validate_on")
    of_adam: ClassVar = ("weight_decay", "beta2", "epsilon")
    of_earlier_runs: ClassVar = {"warmup_from_0": True}  # a config.json without this setting

    seeds: int = 5
    first_seed: int = 0
    steps: int = 2500
    batch_size: int | None = 64
    optimizer: str = "adam"
    learning_rate: float = 3e-3
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    warmup_from_0: bool = False
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    beta2: float = 0.999
    epsilon: float = 1e-8
    accumulate: int = 1
    log_every: int = 25
    checkpoint_every: int = 500
    keep: int = 2
    keep_best: int = 0
    validate_on: int = 0
    init_from: Path | None = None

    def __post_init__(self) -> None:
        for name in ("seeds", "steps", "accumulate", "log_every", "checkpoint_every", "keep"):
            check_integer(name, getattr(self, name))
        for name in ("keep_best", "validate_on", "warmup_steps"):
            check_integer(name, getattr(self, name), 0)
        check_integer("first_seed", self.first_seed, 0, 2**31 - self.seeds)  # all fit int32
        if self.batch_size is not None:
            check_integer("batch_size", self.batch_size)
        check_choice("schedule", self.schedule, Schedule)
        for name in ("learning_rate", "clip_norm", "epsilon", "weight_decay"):
            value, may_be_0 = getattr(self, name), name == "weight_decay"
            number = float(value) if isinstance(value, numbers.Real) else math.nan
            if not (number > 0 or (may_be_0 and number == 0)):
                least = "at least 0" if may_be_0 else "greater than 0"
                raise ValueError(f"{name} must be a number {least}; got {value!r}")
        checked_fraction("beta2", self.beta2)
        if not isinstance(self.init_from, Path | None):
            raise ValueError(f"init_from must be a Path or None; got {self.init_from!r}")
        if self.optimizer != "adam":
            if not isinstance(self.optimizer, str):
                raise ValueError(f"optimizer must be a text; got {self.optimizer!r}")
            for name in self.of_adam:
                if (value := getattr(self, name)) != (default := getattr(TrainConfig, name)):
                    raise ValueError(
                        f"{name} must be {default} with optimizer {self.optimizer!r}, because it"
                        f" belongs to adam; got {value!r}"
                    )
        if self.checkpoint_every % self.log_every:
            raise ValueError(
                f"checkpoint_every must be a multiple of log_every {self.log_every};"
                f" got {self.checkpoint_every}"
            )

    @property
    def rate_depends_on_steps(self) -> bool:
        """Whether the learning rate of a step depends on the number of steps."""
        return self.schedule == "cosine"

    @property
    def updates(self) -> int:
        """The number of updates of each seed."""
        return -(-self.steps // self.accumulate)

    def rate(self) -> optax.Schedule:
        """The learning rate as a function of the updates done.

        Source: Vaswani et al. 2017, section 5.3, for "inverse-sqrt".
        """
        highest, warmup = self.learning_rate, self.warmup_steps
        if self.schedule == "inverse-sqrt":

            def inverse_sqrt(count: Array) -> Array:
                done = jnp.asarray(count, jnp.float32) + 1.0
                reference = float(max(warmup, 1))
                return highest * jnp.minimum(done / reference, jnp.sqrt(reference / done))

            return inverse_sqrt
        if self.schedule == "cosine":
            rate = optax.cosine_decay_schedule(highest, max(self.updates - warmup, 1))
        else:
            rate = optax.constant_schedule(highest)
        first = 0 if self.warmup_from_0 else 1
        if warmup <= first:
            return rate
        rise = optax.linear_schedule(highest * first / warmup, highest, warmup - first)
        return optax.join_schedules([rise, rate], [warmup])

    def transformation(self) -> optax.GradientTransformation:
        """Clipping, then the optimiser, one update for every `accumulate` batches.

        Raises:
            ValueError: in one line: `optimizer` names no function, or the function fails or returns
                something else.
        """
        chain = optax.chain(optax.clip_by_global_norm(self.clip_norm), self._optimizer())
        if self.accumulate == 1:
            return chain
        steps = optax.MultiSteps(chain, self.accumulate)
        return optax.GradientTransformation(steps.init, steps.update)

    def _optimizer(self) -> optax.GradientTransformation:
        if self.optimizer == "adam":
            constants: Any = {"b2": self.beta2, "eps": self.epsilon}
            if not self.weight_decay:
                return optax.adam(self.rate(), **constants)
            return optax.adamw(self.rate(), weight_decay=self.weight_decay, **constants)
        get = functools.partial(imported, text=self.optimizer, noun="optimizer", names={"adam": 0})
        name, fields = name_and_fields(self.optimizer, "optimizer", {}, get)
        make, error = get(name), None
        try:
            made = make(self.rate(), **(fields or {}))
        except Exception as raised:  # of the user's function
            made, error = f"{type(raised).__name__}: {one_line(raised)}", raised
        if not isinstance(made, optax.GradientTransformation):
            raise ValueError(
                f"optimizer {self.optimizer!r} must be a function that takes the learning rate, an"
                f" optax.Schedule, and returns an optax.GradientTransformation; got {made}"
            ) from error
        return made


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


def check_instances(task: Task, **classes: type) -> None:
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


def check_draws_no_validation(task: Task) -> None:
    """Raises ValueError if `validate_on` is set: for tasks without validation on drawn examples."""
    if task.train.validate_on:
        raise ValueError(
            f"validate_on must be 0: task {task.name} has no validation on examples that it draws;"
            f" got {task.train.validate_on}"
        )


def undefined(task: Task, method: str) -> ValueError:
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
        del folder, multiple_of
        return None

    def optimizer(self) -> optax.GradientTransformation:
        """Turns gradients into updates."""
        return self.train.transformation()

    # --- validation, at each checkpoint ---

    @property
    def validation(self) -> Validation | None:
        """What to do with the metrics of `validate`; None for no validation."""
        check_draws_no_validation(self)
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
