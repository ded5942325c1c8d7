"""Tasks of one sequence, which a decoder alone reads from left to right.

A subclass of `TokenTask` draws the tokens of an example, and gives the right answers to them:

    @dataclasses.dataclass(frozen=True)
    class Again(TokenTask):
        name: ClassVar[str] = "again"
        vocabulary_size: int = 12

        def tokens(self, rng):
            return jax.random.randint(rng, (self.length,), 1, self.vocabulary_size)

        def targets(self, tokens):
            return following(tokens)

Everything else is here: the model, the loss, accuracies, labels, answers.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from attention_jax.core.checks import check_integer
from attention_jax.nn import ModelConfig
from attention_jax.parts.samples import check_differ, on_numbers
from attention_jax.tasks.evaluation import EXAMPLES, SHOWN, DrawnTask, ModelTask, compiled
from attention_jax.tasks.vocabulary import PAD, Batch, labels_of, padded_rows
from attention_jax.training.settings import task_part
from attention_jax.training.task import (
    Answers,
    Labels,
    Metrics,
    Params,
    Result,
    TrainConfig,
    Validation,
    check_instances,
    undefined,
)

Array = jax.Array

# 600 steps of recall with one seed take 33 to 75 seconds of CPU time, by score.
MODEL = ModelConfig("decoder", decoder_layers=2, positions="learned", position_limit=128)
TRAIN = TrainConfig(seeds=3, steps=600, batch_size=32)
_TESTS = 16  # batches of `EXAMPLES` sequences for a result


class CausalTask(ModelTask):
    """The base of tasks of one sequence: a "decoder" without a source."""

    def __post_init__(self) -> None:
        check_instances(self, model=ModelConfig, train=TrainConfig)
        if self.model.architecture != "decoder":
            raise ValueError(f"architecture must be decoder; got {self.model.architecture}")
        check_integer("batch_size", self.train.batch_size)
        check_integer("length", self.length)
        check_integer("vocabulary_size", self.vocabulary_size)
        self.model.check_length(self.length)

    @property
    def length(self) -> int:
        """T: tokens of an example."""
        raise undefined(self, "length")


def without_source(inputs: Any, targets: Any) -> Batch:
    """The batch of a `CausalTask`: inputs [B, T] or [B, T, D], and a target [B, T] for each."""
    none = np.zeros(len(targets), np.int32)
    lengths = np.full_like(none, targets.shape[1])
    return Batch(none[:, None][:, :0], none, inputs, targets, lengths)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class TokenTask(DrawnTask, CausalTask):
    """Read tokens, and answer at those where something is asked.

    Attributes:
        model: the model, a "decoder".
        train: steps, seeds, optimiser, checkpoints.
        length: tokens of an example.
    """

    first_result: ClassVar[Validation] = Validation("accuracy (%)", larger_is_better=True)

    model: ModelConfig = MODEL
    train: TrainConfig = TRAIN
    length: int = 32

    # --- what a task defines, with `vocabulary_size` ---

    def tokens(self, rng: Array) -> Array:
        """Draws one example: int32 [length]; 0 is a blank."""
        raise undefined(self, "tokens(rng)")

    def targets(self, tokens: Array) -> Array:
        """The right answer at each token of one example, int32 [T]; 0 where nothing is asked."""
        raise undefined(self, "targets(tokens)")

    @property
    def most_asked(self) -> int:
        """The largest number of tokens of an example at which something is asked.

        The loss computes the logits of this many tokens per example.
        """
        return self.length

    # --- training ---

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Batch:
        task = self if length is None else dataclasses.replace(self, length=length)
        return self._asked(jax.vmap(task.tokens)(jax.random.split(rng, size)))

    def check_numbers(self) -> None:
        """Draws a few examples; raises ValueError for wrong ids, or if all must be equal."""
        drawn = on_numbers(lambda: self.batch(jax.random.key(0), size=EXAMPLES))
        part = task_part(self)
        for name, ids in (("tokens", drawn.target_inputs), ("targets", drawn.targets)):
            part.require(
                ids.shape == (EXAMPLES, self.length)
                and np.issubdtype(ids.dtype, np.integer)
                and bool(np.all((ids >= 0) & (ids < self.vocabulary_size))),
                f"{name} must return ids from 0 to {self.vocabulary_size - 1}, int32"
                f" [{self.length}]; got {ids.dtype} {list(ids.shape[1:])}, from {ids.min()} to"
                f" {ids.max()}",
            )
        asked = int(np.sum(drawn.targets != PAD, axis=1).max())
        part.require(
            asked <= self.most_asked,
            f"most_asked must be the largest number of targets; it is {self.most_asked}, and an"
            f" example has {asked}",
        )
        check_differ(part, "tokens", self.tokens, drawn.target_inputs)

    def _asked(self, tokens: Any) -> Batch:
        return without_source(tokens, jax.vmap(self.targets)(tokens))

    def loss(self, params: Params, batch: Batch, rng: Array | None) -> tuple[Array, Metrics]:
        """The mean cross entropy in nats, and the accuracy, where something is asked."""
        model, targets = self.bind(params), batch.targets
        features = model.features(*batch.inputs, rng=rng)
        if self.most_asked < targets.shape[1]:
            first = jnp.argsort(targets == PAD, axis=1, stable=True)[:, : self.most_asked]
            targets = jnp.take_along_axis(targets, first, axis=1)
            features = jnp.take_along_axis(features, first[..., None], axis=1)
        logits, asked = model.logits_of(features), targets != PAD
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        right = asked & (jnp.argmax(logits, axis=-1) == targets)
        count = jnp.maximum(jnp.sum(asked), 1).astype(nats.dtype)
        accuracy = jnp.sum(right).astype(nats.dtype) / count
        return jnp.sum(jnp.where(asked, nats, 0)) / count, {"accuracy": accuracy}

    # --- a trained model ---

    def _measured(self, params: Params, rng: Array, **examples: Any) -> list[float]:
        """The accuracy where something is asked, on a batch for each of one or more keys."""
        by_batch = compiled(_accuracies, self, **examples)(params, rng.reshape(-1))
        by_seed: list[float] = (100 * np.mean(np.asarray(by_batch, np.float64), axis=0)).tolist()
        return by_seed

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """The accuracy where something is asked: the mean over 16 batches of 64 fresh examples."""
        rngs = jax.random.split(jax.random.key(0), _TESTS)
        by_seed = self._measured(params, rngs, size=EXAMPLES)
        return {self.first_result.metric: Result(by_seed, True, high=100.0)}

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """The likeliest answers where something is asked; inputs are tokens, "2 8 4 7 0 2".

        Raises:
            ValueError: an input is empty, too long, or no sequence of tokens.
        """
        if not inputs:
            shown = np.asarray(self.examples(folder)[0].target_inputs)[:SHOWN]
            inputs = [" ".join(map(str, row)) for row in shown.tolist()]
        rows = [self._encoded(text) for text in inputs]
        if not all(rows):
            raise ValueError(f"inputs must be one or more, none of them empty; got {list(inputs)}")
        batch = self._asked(padded_rows(rows, len(rows))[0])
        logits = jax.jit(lambda params: self.bind(params)(*batch.inputs))(params)
        targets = np.asarray(batch.targets)
        found = np.where(targets != PAD, np.argmax(logits, axis=-1), PAD)
        texts: Any = [
            (text, *(" ".join(map(str, row[right != PAD])) for row in (answer, right)))
            for text, answer, right in zip(inputs, found, targets, strict=True)
        ]
        batch = without_source(batch.target_inputs, found)
        return Answers(texts, batch, self._labels(batch, len(texts)))

    def _labels(self, batch: Batch, count: int) -> Labels:
        def text(ids: list[int]) -> str:
            return " ".join(map(str, ids))[:40]

        return labels_of(batch, count, text, lambda token: str(token or "."), mask_padding=True)

    def _encoded(self, text: str) -> list[int]:
        known = {str(token): token for token in range(self.vocabulary_size)}
        try:
            tokens = [known[word] for word in text.split()]
        except KeyError as error:
            raise ValueError(
                f"inputs must be tokens from 0 to {self.vocabulary_size - 1}, with spaces between;"
                f" got {text!r}"
            ) from error
        self.model.check_length(len(tokens))
        return tokens


def _accuracies(task: TokenTask, params: Params, rngs: Array, *, size: int) -> Array:
    """The accuracy of each seed on the batch of each key: [keys, seeds]."""

    def of_batch(rng: Array) -> Array:
        batch = task.batch(rng, size=size)
        return jax.vmap(lambda params: task.loss(params, batch, None)[1]["accuracy"])(params)

    return jax.lax.map(of_batch, rngs)


# --- what several tasks draw and ask ---


def drawn(rng: Array, weights: Array, count: int) -> Array:
    """Indices of weights [n], drawn one after another in proportion to them, each once at most.

    They are those of the largest log(weight) + Gumbel noise: int32 [count].

    Source: Yellott 1977; Kool et al. 2019, "Stochastic beams and where to find them".
    """
    return jax.lax.top_k(jnp.log(weights) + jax.random.gumbel(rng, weights.shape), count)[1]


def following(tokens: Array) -> Array:
    """For each repeated token, the token after its first occurrence, otherwise 0: int32 [T].

    >>> following(jnp.array([2, 8, 4, 7, 4, 2])).tolist()
    [0, 0, 0, 0, 7, 8]
    """
    first = jnp.argmax(tokens[:, None] == tokens[None, :], axis=1)
    again = first < jnp.arange(len(tokens))
    return jnp.where(again, jnp.roll(tokens, -1)[first], 0)
