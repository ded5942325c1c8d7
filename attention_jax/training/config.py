"""How a task is trained: the settings that every task shares, the optimiser and its rate."""

import dataclasses
import functools
import math
import numbers
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.checks import check_choice, check_integer, checked_fraction
from attention_jax.core.errors import one_line
from attention_jax.core.names import imported, name_and_fields

Array = jax.Array
Schedule = Literal["cosine", "constant", "inverse-sqrt"]


class Hyperparameters(NamedTuple):
    """The numbers of an optimiser that a compiled step takes as arguments.

    They are no constants of its program, so that runs which differ in them alone share it.
    """

    rates: Any  # [updates + 2]: the learning rate after 0, 1, ... updates
    clip_norm: float
    weight_decay: float
    epsilon: float

    def rate(self, count: Array) -> Array:
        """The learning rate after so many updates; an `optax.Schedule`."""
        rate: Array = jnp.asarray(self.rates)[jnp.minimum(count, len(self.rates) - 1)]
        return rate


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
    # The program of a step depends on none of these where `hyperparameters` are its arguments, but
    # on whether there is weight decay.
    of_hyperparameters: ClassVar = (
        *("learning_rate", "schedule", "warmup_steps", "warmup_from_0", "steps"),
        *("clip_norm", "weight_decay", "epsilon"),
    )
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

    def steps_of_call(self, step: int) -> int:
        """The steps of the compiled call after a step: up to a multiple of `log_every`."""
        return min(self.log_every - step % self.log_every, self.steps - step)

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

    @property
    def takes_hyperparameters(self) -> bool:
        """Whether `transformation` takes `hyperparameters`: Adam and the optimisers of Optax.

        A function of a user may call its schedule in Python, where a traced number would fail.
        """
        return self.optimizer == "adam" or self.optimizer.startswith("optax:")

    def hyperparameters(self) -> Hyperparameters:
        """The numbers that `transformation` takes as arguments."""
        counts, rate = np.arange(self.updates + 2, dtype=np.int32), self.rate()
        # Compiled as in a step that holds them as constants: the same bits.
        with jax.numpy_dtype_promotion("standard"):
            rates = jax.jit(lambda counts: jnp.broadcast_to(rate(counts), counts.shape))(counts)
        rest = self.clip_norm, self.weight_decay, self.epsilon
        return Hyperparameters(np.asarray(rates), *map(float, rest))

    def transformation(
        self, hyperparameters: Hyperparameters | None = None
    ) -> optax.GradientTransformation:
        """Clipping, then the optimiser, one update for every `accumulate` batches.

        Args:
            hyperparameters: traced numbers in place of those of the settings; None for these.

        Raises:
            ValueError: in one line: `optimizer` names no function, or the function fails or returns
                something else.
        """
        rate = self.rate() if hyperparameters is None else hyperparameters.rate
        used: Any = self if hyperparameters is None else hyperparameters
        chain = optax.chain(optax.clip_by_global_norm(used.clip_norm), self._optimizer(rate, used))
        if self.accumulate == 1:
            return chain
        steps = optax.MultiSteps(chain, self.accumulate)
        return optax.GradientTransformation(steps.init, steps.update)

    def _optimizer(self, rate: optax.Schedule, used: Any) -> optax.GradientTransformation:
        if self.optimizer == "adam":
            adam: Any = {"b2": self.beta2, "eps": used.epsilon}
            if not self.weight_decay:
                return optax.adam(rate, **adam)
            return optax.adamw(rate, weight_decay=used.weight_decay, **adam)
        get = functools.partial(imported, text=self.optimizer, noun="optimizer", names={"adam": 0})
        name, fields = name_and_fields(self.optimizer, "optimizer", {}, get)
        make, error = get(name), None
        try:
            made = make(rate, **(fields or {}))
        except Exception as raised:  # of the user's function
            made, error = f"{type(raised).__name__}: {one_line(raised)}", raised
        if not isinstance(made, optax.GradientTransformation):
            raise ValueError(
                f"optimizer {self.optimizer!r} must be a function that takes the learning rate, an"
                f" optax.Schedule, and returns an optax.GradientTransformation; got {made}"
            ) from error
        return made
