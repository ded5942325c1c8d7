"""The reversal task: settings, batches, loss and optimiser."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from attention_jax import nn
from attention_jax.core.checks import check_choice, check_integer
from attention_jax.functional.coverage import coverage_loss
from attention_jax.nn.config import ANY_LENGTH, ModelConfig
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.vocabulary import Vocabulary
from attention_jax.training.loop import LoopConfig, Task
from attention_jax.training.losses import cross_entropy, masked_mean
from attention_jax.training.metrics import token_accuracy
from attention_jax.training.run import TrainedRun

Array = jax.Array
JSON = dict[str, Any]
Params = Any

Schedule = Literal["cosine", "constant"]

# The letters a to z and the three special tokens.
VOCABULARY = Vocabulary()

# The default model of a run. Trained on a few letters it reverses strings of hundreds, with every
# score: the score under study is in its only attention, the query of letter i of the answer and the
# key of that letter have the same position id, and logits grow with the length of the source. Nine
# tokens are the longest source of training by default, SOS included.
MODEL = ModelConfig(
    normalizer=None,  # `NORMALIZER`, or softmax where the kind of attention takes no other
    encoder_layers=0,
    decoder_self_attention=False,
    **ANY_LENGTH,
)
# The normaliser of global attention; the other kinds have softmax.
NORMALIZER = "log_scaled(start=9)"


@dataclasses.dataclass(frozen=True)
class ReversalConfig:
    """Settings of one training run; all defaults stand here and in the two parts.

    Attributes:
        model: the model.
        loop: steps, seeds, checkpoints.
        batch_size: strings per step.
        min_length: shortest training string, at least 1.
        max_length: longest training string.
        letters: strings use the first so many letters of the alphabet.
        source_start: whether the source begins with the token SOS. The query that writes EOS has no
            letter to attend to, and SOS is the key that it attends to instead. Without that key it
            attends to letters, and the model confuses the end with a letter.
        learning_rate: Adam's rate at the start.
        schedule: "cosine": the rate falls along a cosine to 0 at the last step; "constant": it
            stays, and a finished run can be resumed with more steps.
        clip_norm: the gradient's norm is clipped to this.
        weight_decay: each step also multiplies every parameter by 1 - rate * `weight_decay`, with
            the rate of that step (AdamW); 0 for plain Adam. Without decay a few queries in a
            thousand attend to a wrong letter among hundreds of keys.
        coverage_weight: weight of the coverage loss, added to the cross entropy if the model
            attends with coverage; at least 0.
    """

    model: ModelConfig = MODEL
    loop: LoopConfig = LoopConfig()
    batch_size: int = 64
    min_length: int = 3
    max_length: int = 8
    letters: int = len(VOCABULARY.alphabet)
    source_start: bool = True
    learning_rate: float = 3e-3
    schedule: Schedule = "cosine"
    clip_norm: float = 1.0
    weight_decay: float = 0.3
    coverage_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.model.normalizer is None:
            usual = NORMALIZER if self.model.attention == "global" else "softmax"
            model = dataclasses.replace(self.model, normalizer=usual)
            object.__setattr__(self, "model", model)
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
        self.model.check_length(self.max_length + 1)
        check_choice("schedule", self.schedule, Schedule)
        for name in ("learning_rate", "clip_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0; got {getattr(self, name)}")
        for name in ("weight_decay", "coverage_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")

    @property
    def drawn(self) -> Vocabulary:
        """The letters of the strings, with the same ids as in `VOCABULARY`."""
        return Vocabulary(VOCABULARY.alphabet[: self.letters])

    @property
    def label(self) -> str:
        """What progress and tables call the run: the score, and what is not the default."""
        return self.model.label_beside(dataclasses.replace(MODEL, normalizer=NORMALIZER))

    def to_json(self) -> JSON:
        """All settings and the fields of scores and normalisers, for config.json."""
        parts = self.model.describe_parts()
        return {"task": "reversal", **dataclasses.asdict(self), **parts}

    @classmethod
    def from_json(cls, content: JSON) -> ReversalConfig:
        """The inverse of `to_json`; ValueError if a score or normaliser has changed."""
        # The first version of config.json did not name the task.
        if content.get("task", "reversal") != "reversal":
            raise ValueError("config.json is not that of a reversal run")
        parts: JSON = {kind: content[kind] for kind in ("scores", "normalizers") if kind in content}
        content = {k: value for k, value in content.items() if k not in ("task", *parts)}
        try:
            # Of earlier versions, whose sources had no SOS and whose optimiser was plain Adam.
            content = {"source_start": False, "weight_decay": 0.0, **content}
            model = ModelConfig(**content["model"])
            model.check_parts_are(parts)
            loop = LoopConfig(**content["loop"])
            return cls(**{**content, "model": model, "loop": loop})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"config.json is not that of a reversal run: {error}") from error


def reversal_task(config: ReversalConfig) -> Task:
    """Initialisation, batches and loss; ValueError if a score fails for the model's sizes."""
    config.model.check_scores_run()

    def init(rng: Array) -> Params:
        return nn.initial_params(config.model, VOCABULARY.size, rng)

    def batch(rng: Array) -> Batch:
        return random_batch(
            rng,
            vocabulary=config.drawn,
            batch_size=config.batch_size,
            min_length=config.min_length,
            max_length=config.max_length,
            source_start=config.source_start,
        )

    def loss(params: Params, batch: Batch, rng: Array) -> tuple[Array, dict[str, Array]]:
        model = bind(config.model, params)
        with_coverage = config.model.attention == "coverage"
        output = model(
            batch.source,
            batch.source_lengths,
            batch.target_inputs,
            rng=rng,
            return_weights=with_coverage,
        )
        logits, weights = output if with_coverage else (output, None)
        predictions = jnp.argmax(logits, axis=-1)
        accuracy = token_accuracy(predictions, batch.targets, batch.target_lengths)
        entropy = cross_entropy(logits, batch.targets, batch.target_lengths)
        if weights is None:
            return entropy, {"accuracy": accuracy}
        repeated = jnp.mean(coverage_loss(weights), axis=0)  # over layers: [B, T]
        repeated = masked_mean(repeated, batch.target_lengths)
        total = entropy + config.coverage_weight * repeated
        return total, {"accuracy": accuracy, "coverage_loss": repeated}

    return Task(init, batch, loss)


def bind(config: ModelConfig, params: Params) -> nn.Model:
    """The model with given parameters: the pure dict of a checkpoint."""
    return nn.bind(config, params, VOCABULARY.size)


def optimizer(config: ReversalConfig) -> optax.GradientTransformation:
    """Clipping, then Adam or AdamW with a rate that falls along a cosine to 0 or stays."""
    if config.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(config.learning_rate, config.loop.steps)
    else:
        schedule = optax.constant_schedule(config.learning_rate)
    adam = (
        optax.adamw(schedule, weight_decay=config.weight_decay)
        if config.weight_decay
        else optax.adam(schedule)
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)


def why_steps_are_fixed(config: ReversalConfig) -> str:
    """Why a run cannot be extended: its schedule; "" if it can."""
    if config.schedule == "constant":
        return ""
    return (
        f"the learning rate falls along a cosine to 0 at step {config.loop.steps} (runs with"
        " schedule constant can be extended)"
    )


ReversalRun = TrainedRun[ReversalConfig]
