"""The reversal task: settings, model, loss, optimiser, and a training run in a folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.core.checks import check_integer
from attention_jax.functional.coverage import coverage_loss
from attention_jax.nn import seq2seq_params
from attention_jax.nn.seq2seq import Seq2Seq
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.runs.checkpoints import Checkpoints, StepName
from attention_jax.runs.run_folder import RunFolder, require_tensorboard
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.vocabulary import Vocabulary
from attention_jax.training.loop import (
    LoopConfig,
    Task,
    TrainState,
    check_gradient_log_every,
    initial_state,
)
from attention_jax.training.losses import cross_entropy, masked_mean
from attention_jax.training.metrics import token_accuracy
from attention_jax.training.run import Run, tell_damage, train_in_folder
from attention_jax.training.sharding import Layout, MeshShape, whole_machine

Array = jax.Array
Params = Any


VOCABULARY = Vocabulary()


@dataclasses.dataclass(frozen=True)
class ReversalConfig:
    """Settings of one training run; all defaults stand here and in the two parts.

    Attributes:
        model: the model.
        loop: steps, seeds, checkpoints.
        batch_size: strings a step.
        min_length: shortest training string, at least 1.
        max_length: longest training string.
        letters: strings are of the first so many letters of the alphabet.
        learning_rate: Adam's rate at the start; it falls to 0 along a cosine.
        clip_norm: the gradient's norm is clipped to this.
        coverage_weight: how much the coverage loss counts beside the cross entropy, where the model
            attends with coverage; at least 0.
    """

    model: Seq2SeqConfig = Seq2SeqConfig()
    loop: LoopConfig = LoopConfig()
    batch_size: int = 64
    min_length: int = 3
    max_length: int = 8
    letters: int = len(VOCABULARY.alphabet)
    learning_rate: float = 3e-3
    clip_norm: float = 1.0
    coverage_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("score", "self_attention_score"):
            if not isinstance(getattr(self.model, name), str | None):
                raise ValueError(
                    f"model.{name} must be a name, for config.json to hold it;"
                    f" got {getattr(self.model, name)!r}"
                )
        for name in ("batch_size", "min_length", "max_length", "letters"):
            check_integer(name, getattr(self, name))
        if not 1 <= self.letters <= len(VOCABULARY.alphabet):
            raise ValueError(
                f"letters must be from 1 to {len(VOCABULARY.alphabet)}; got {self.letters}"
            )
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length must be at least min_length {self.min_length}; got {self.max_length}"
            )
        self.model.positions.check_length(self.max_length + 1)
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0; got {getattr(self, name)}")
        if not self.coverage_weight >= 0:
            raise ValueError(f"coverage_weight must be at least 0; got {self.coverage_weight}")

    @property
    def drawn(self) -> Vocabulary:
        """The letters that strings are of, with the ids they have in `VOCABULARY`."""
        return Vocabulary(VOCABULARY.alphabet[: self.letters])

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> ReversalConfig:
        """What `dataclasses.asdict` made."""
        try:
            model = Seq2SeqConfig.from_json(content["model"])
            loop = LoopConfig(**content["loop"])
            return cls(**{**content, "model": model, "loop": loop})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"config.json is not that of a reversal run: {error}") from error


def reversal_task(config: ReversalConfig) -> Task:
    """Initialisation, batches and loss, as `training.loop` wants them."""

    def init(rng: Array) -> Params:
        return seq2seq_params.initial_params(config.model, VOCABULARY.size, rng)

    def batch(rng: Array) -> Batch:
        return random_batch(
            rng,
            vocabulary=config.drawn,
            batch_size=config.batch_size,
            min_length=config.min_length,
            max_length=config.max_length,
        )

    def loss(params: Params, batch: Batch, rng: Array) -> tuple[Array, dict[str, Array]]:
        model = bind(config.model, params)
        with_coverage = config.model.cross_attention.attention == "coverage"
        found = model(
            batch.source, batch.source_lengths, batch.target_inputs,
            dropout_rng=rng, return_weights=with_coverage,
        )  # fmt: skip
        logits, weights = found if with_coverage else (found, None)
        predictions = jnp.argmax(logits, axis=-1)
        accuracy = token_accuracy(predictions, batch.targets, batch.target_lengths)
        entropy = cross_entropy(logits, batch.targets, batch.target_lengths)
        if weights is None:
            return entropy, {"accuracy": accuracy}
        seen_twice = jnp.mean(coverage_loss(weights), axis=0)  # over layers: [B, T]
        seen_twice = masked_mean(seen_twice, batch.target_lengths)
        total = entropy + config.coverage_weight * seen_twice
        return total, {"accuracy": accuracy, "coverage_loss": seen_twice}

    return Task(init, batch, loss)


def bind(config: Seq2SeqConfig, params: Params) -> Seq2Seq:
    """The model with given parameters: the pure dict of a checkpoint."""
    return seq2seq_params.bind(config, params, VOCABULARY.size)


def optimizer(config: ReversalConfig) -> optax.GradientTransformation:
    """Clipping, then Adam with a cosine schedule to 0."""
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.loop.steps)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optax.adam(schedule))


# --- a run in a folder ---


class Trained(NamedTuple):
    """What is known of a run."""

    config: ReversalConfig
    params: Params  # stacked over seeds
    step: int
    seconds: float | None = None  # wall time of this call, compilation included
    steps_per_second: float | None = None  # of all seeds together, without compilation
    interrupted: int = 0  # 130 or 143, an exit status, if a signal asked to stop


def train_run(
    config: ReversalConfig,
    workdir: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
) -> Trained:
    """Trains in a folder, from its newest good checkpoint if it has one and `resume` is set.

    Args:
        config: all settings.
        workdir: the folder.
        resume: go on with the run that is there.
        tensorboard: also write TensorBoard events.
        log_gradients: every so many steps, `analysis.learning_statistics` to gradients.jsonl.
        mesh: over which devices; one if left out, or all of them in a run of many processes. No
            part of the run: it may go on over others.

    Raises:
        ValueError: the folder is not fit for it, or a setting, and nothing has been changed; or
            no state there is as it was saved; or something cannot be written.
    """
    if tensorboard:
        require_tensorboard()
    if log_gradients is not None:
        check_gradient_log_every(log_gradients, config.loop)
    mesh = mesh or whole_machine()
    mesh.check(seeds=config.loop.seeds, batch_size=config.batch_size)
    reached = train_in_folder(
        _run(config),
        RunFolder(workdir),
        resume=resume,
        tensorboard=tensorboard,
        gradient_statistics=(log_gradients, learning_statistics) if log_gradients else None,
        layout=Layout(mesh),
    )
    return Trained(
        config,
        reached.state.params,
        reached.step,
        reached.seconds,
        reached.steps_per_second,
        reached.interrupted,
    )


def _run(config: ReversalConfig) -> Run:
    return Run(
        reversal_task(config),
        optimizer(config),
        config.loop,
        label=config.model.label,
        settings=dataclasses.asdict(config),
        completed=lambda stored: dataclasses.asdict(ReversalConfig.from_json(stored)),
    )


def load_run(workdir: Path, step: StepName = "newest") -> Trained:
    """A state of a run: the newest good one, the best one, or that of a step.

    Args:
        workdir: the run's folder; nothing in it is changed.
        step: "newest", "best" (the smallest loss among those kept) or a step that is kept.

    Raises:
        ValueError: the folder holds no run, no checkpoint yet, no such one or no good one.
    """
    config, checkpoints = _checkpoints_of(workdir)
    with checkpoints:
        restored = checkpoints.restore(
            jax.eval_shape(_start(config)), step=checkpoints.step_called(step)
        )
    assert restored is not None  # there are steps
    tell_damage(restored)
    return Trained(config, restored.state.params, restored.step)


def load_states(
    workdir: Path,
) -> tuple[ReversalConfig, dict[int, Callable[[], TrainState]]]:
    """A run's settings, and by step how to get each state of it that is to be had.

    That of step 0 is made again from the seeds; the others are the checkpoints that are kept.

    Raises:
        ValueError: the folder holds no run, or no checkpoint yet; of a state, it is damaged.
    """
    config, checkpoints = _checkpoints_of(workdir)
    with checkpoints:
        kept = checkpoints.steps()

    def restore(step: int) -> TrainState:
        _, checkpoints = _checkpoints_of(workdir)
        with checkpoints:
            restored = checkpoints.restore(jax.eval_shape(_start(config)), step=step)
        assert restored is not None  # there is such a step
        return restored.state

    return config, {0: _start(config), **{step: functools.partial(restore, step) for step in kept}}


def _checkpoints_of(workdir: Path) -> tuple[ReversalConfig, Checkpoints]:
    """A run's settings and its checkpoints, to be read."""
    folder = RunFolder(workdir)
    content = folder.read_config()
    try:
        config = ReversalConfig.from_json(content)
    except ValueError as error:
        raise ValueError(f"workdir {workdir}: {error}") from error
    if folder.checkpoints.is_dir():
        checkpoints = Checkpoints(folder.checkpoints, read_only=True)
        if checkpoints.steps():
            return config, checkpoints
        checkpoints.close()
    raise ValueError(f"workdir {workdir} has no checkpoint yet; train it first")


def _start(config: ReversalConfig) -> Callable[[], TrainState]:
    return functools.partial(initial_state, reversal_task(config), optimizer(config), config.loop)
