"""Tasks from one sequence to another: a subclass of `SequenceTask` draws a source and its target.

    @dataclasses.dataclass(frozen=True)
    class Copy(SequenceTask):
        name: ClassVar[str] = "copy"

        def pair(self, rng, length, *, longest):
            letters = jax.random.randint(rng, (longest,), FIRST, self.vocabulary.size)
            return (letters, length), (letters, length)

Everything else is here: padding, start and end, the model, the loss, accuracies, labels, answers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.checks import check_integer, checked_number
from attention_jax.functional.coverage import coverage_loss
from attention_jax.nn import ModelConfig
from attention_jax.parts.samples import check_differ, on_numbers
from attention_jax.tasks.evaluation import (
    SHOWN,
    Accuracies,
    DrawnTask,
    ModelTask,
    accuracies,
    accuracies_of,
    best_answers,
)
from attention_jax.tasks.vocabulary import (
    EOS,
    FIRST,
    PAD,
    SOS,
    Batch,
    Vocabulary,
    labels_of,
    padded_batch,
    padded_rows,
    up_to_eos,
)
from attention_jax.training.losses import cross_entropy, masked_mean, real_tokens
from attention_jax.training.metrics import token_accuracy
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

__all__ = ["EOS", "FIRST", "PAD", "SOS", "SequenceTask", "TrainConfig", "Vocabulary"]

Array = jax.Array
Sequences = tuple[tuple[Array, Array], tuple[Array, Array]]


@dataclasses.dataclass(frozen=True)
class SequenceTask(DrawnTask, ModelTask):
    """A task whose examples are pairs of a source and a target, of letters of one vocabulary.

    Attributes:
        model: the model.
        train: steps, seeds, optimiser, checkpoints.
        min_length: shortest length of training, at least 1.
        max_length: longest length of training.
        source_start: whether the source begins with the token SOS. The query that predicts EOS has
            no letter to attend to, and attends to SOS instead. Without SOS it would attend to
            letters, and the model would confuse the end with a letter.
        coverage_weight: weight of the coverage loss, added to the cross entropy if the model
            attends with coverage; at least 0.

    Class variables:
        vocabulary: the letters of source and target.
        normalizer: of global attention, if `model.normalizer` is None.
    """

    by_length: ClassVar[bool] = True
    first_result: ClassVar[Validation] = Validation("exact match (%)", larger_is_better=True)
    vocabulary: ClassVar[Vocabulary] = Vocabulary()
    normalizer: ClassVar[str] = "softmax"

    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    min_length: int = 3
    max_length: int = 8
    source_start: bool = True
    coverage_weight: float = 1.0

    def __post_init__(self) -> None:
        check_instances(self, model=ModelConfig, train=TrainConfig, vocabulary=Vocabulary)
        check_integer("batch_size", self.train.batch_size)
        for name in ("min_length", "max_length"):
            check_integer(name, getattr(self, name))
        if self.max_length < self.min_length:
            raise ValueError(
                f"max_length must be at least min_length {self.min_length}; got {self.max_length}"
            )
        if not checked_number("coverage_weight", self.coverage_weight) >= 0:
            raise ValueError(f"coverage_weight must be at least 0; got {self.coverage_weight}")
        self.model.check_length(self.max_length + 1)

    # --- what a task defines ---

    def pair(self, rng: Array, length: Array, *, longest: int) -> Sequences:
        """Draws one example: ((source, source_length), (target, target_length)).

        Args:
            rng: one PRNG key.
            length: int32 [], traced, from 1 to `longest`.
            longest: the largest length. The sizes of the arrays depend on nothing else.

        Returns:
            ids of letters, int32 [S] and int32 [T], each with the number of them that count,
            int32 []. Ids of letters start at `FIRST`; the rest of each array is ignored.
        """
        raise undefined(self, "pair(rng, length, *, longest)")

    def solution(self, text: str) -> str | None:
        """The right answer to a source, both as letters; None if the task does not tell it."""
        return None

    # --- batches ---

    def batch(self, rng: Array, *, size: int, length: int | None = None) -> Batch:
        """Draws `size` pairs, of lengths uniform in [min_length, max_length] or of one `length`.

        They are padded to the longest of training, or to `length` if it is longer.
        """
        lengths_rng, rng = jax.random.split(rng)
        ends = (self.min_length, self.max_length) if length is None else (length, length)
        lengths = jax.random.randint(lengths_rng, (size,), ends[0], ends[1] + 1)
        batch = self.padded(*self.pairs(rng, lengths, ends[1]))
        widths = self._widths(self.max_length)

        def filled(ids: Array, width: int) -> Array:
            return jnp.pad(ids, ((0, 0), (0, max(0, width - ids.shape[1]))))

        return batch._replace(
            source=filled(batch.source, widths[0]),
            target_inputs=filled(batch.target_inputs, widths[1]),
            targets=filled(batch.targets, widths[1]),
        )

    def pairs(self, rng: Array, lengths: Array, longest: int) -> Sequences:
        """`pair` for each of the lengths [B], with a leading axis B on every array."""
        part = task_part(self)
        method = f"pair(rng, length, longest={longest})"

        def one(rng: Array, length: Array) -> Any:
            draw = functools.partial(self.pair, longest=longest)
            drawn = part.call(method, draw, rng, length)
            expected = "((source, source_length), (target, target_length)), int [S], [], [T], []"
            part.require(_is_pair(drawn), f"{method} must return {expected}", drawn)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), drawn)

        return jax.vmap(one)(jax.random.split(rng, len(lengths)), lengths)

    def check_numbers(self) -> None:
        """Draws a few examples of each length; raises ValueError if they break the contract.

        It is for ids that are no letters, wrong lengths, a `solution` that is not the target, and
        examples that are all equal because `pair` does not use its rng.
        """
        lengths = jnp.arange(self.min_length, self.max_length + 1)
        times, longest, part = max(4, 32 // len(lengths)), self.max_length, task_part(self)
        rngs = jax.random.key(0), jnp.tile(lengths, times)
        drawn = on_numbers(lambda: self.pairs(*rngs, longest))
        for name, (ids, counts) in zip(("source", "target"), drawn, strict=True):
            size, end = ids.shape[1], self.vocabulary.size
            counted = ids[np.arange(size) < counts[:, None]]
            part.require(
                bool(np.all((counts >= 0) & (counts <= size)))
                and bool(np.all((counted >= FIRST) & (counted < end))),
                f"pair must return a {name}_length from 0 to {size}, the size of its {name}, and so"
                f" many ids of letters, from FIRST = {FIRST} to {end - 1}; got the lengths"
                f" {sorted({*counts.tolist()})} and the ids {sorted({*counted.tolist()})[:5]}",
            )
        texts = [
            [self.vocabulary.decode(row[:count]) for row, count in zip(*side, strict=True)]
            for side in drawn
        ]
        for source, target in zip(*texts, strict=True):
            right = part.call("solution(text)", self.solution, source)
            part.require(
                right is None or right == target,
                f"solution must give the target of pair, or None; it gives {right!r} for"
                f" {source!r}, and pair gives {target!r}",
            )
        of_keys = np.moveaxis(np.reshape(texts, (2, times, -1)), 1, 0)  # keys, side, length

        def draw(rng: Array) -> Any:
            return self.pair(rng, lengths[-1], longest=longest)

        check_differ(part, "pair", draw, of_keys)

    def padded(self, source: tuple[Array, Array], target: tuple[Array, Array]) -> Batch:
        """Adds SOS, EOS and PAD to pairs with a leading axis B on every array."""
        (letters, lengths), (answers, answer_lengths) = source, target
        start = jnp.full((len(letters), 1), SOS, letters.dtype)
        letters = jnp.where(real_tokens(lengths, letters.shape[1]), letters, PAD)
        positions, ends = jnp.arange(answers.shape[1] + 1)[None, :], answer_lengths[:, None]
        answers = jnp.where(positions < ends, jnp.pad(answers, ((0, 0), (0, 1))), PAD)
        return Batch(
            source=jnp.concatenate([start, letters], axis=1) if self.source_start else letters,
            source_lengths=lengths + int(self.source_start),
            target_inputs=jnp.concatenate([start, answers[:, :-1]], axis=1),
            targets=jnp.where(positions == ends, EOS, answers),
            target_lengths=answer_lengths + 1,
        )

    def _widths(self, longest: int) -> tuple[int, int]:
        """S and T of a batch with this longest length."""
        (source, _), (target, _) = jax.eval_shape(
            lambda: self.pairs(jax.random.key(0), jnp.ones((1,), jnp.int32), longest)
        )
        return source.shape[1] + int(self.source_start), target.shape[1] + 1

    # --- model and loss ---

    @property
    def network(self) -> ModelConfig:
        """`model`, with the task's normaliser if it has none."""
        if self.model.normalizer is not None:
            return self.model
        normalizer = self.normalizer if self.model.attention == "global" else "softmax"
        return dataclasses.replace(self.model, normalizer=normalizer)

    @property
    def vocabulary_size(self) -> int:
        return self.vocabulary.size

    def loss(self, params: Params, batch: Batch, rng: Array | None) -> tuple[Array, Metrics]:
        with_coverage = self.model.attention == "coverage"
        output = self.bind(params)(*batch.inputs, rng=rng, return_weights=with_coverage)
        logits, weights = output if with_coverage else (output, None)
        predictions = jnp.argmax(logits, axis=-1)
        accuracy = token_accuracy(predictions, batch.targets, batch.target_lengths)
        entropy = cross_entropy(logits, batch.targets, batch.target_lengths)
        if weights is None:
            return entropy, {"accuracy": accuracy}
        repeated = jnp.mean(coverage_loss(weights), axis=0)  # over layers: [B, T]
        repeated = masked_mean(repeated, batch.target_lengths)
        total = entropy + self.coverage_weight * repeated
        return total, {"accuracy": accuracy, "coverage_loss": repeated}

    @property
    def label(self) -> str:
        """The score, and the settings of the model that differ from the task's own."""
        usual = dataclasses.replace(self, model=type(self).model)
        return self.network.label_beside(usual.network)

    # --- a trained model ---

    def _measured(self, params: Params, rng: Array, **examples: Any) -> list[float]:
        """Exact match of the model's own answers, on fresh examples of the lengths of training."""
        return _percent(accuracies_of(self, params, rng, **examples)).tolist()

    def evaluate(
        self, params: Params, lengths: Sequence[int] = (), *, folder: Path | None = None
    ) -> dict[str, Result]:
        """Exact match of the model's own answers, on 1,000 examples of each length.

        It is NaN where the learned positions end before the length.
        """
        asked = lengths or range(self.min_length, self.max_length + 1)
        possible = [length for length in asked if self._has_positions(length)]
        found = accuracies(self, params, possible) if possible else {}
        by_length = dict.fromkeys(asked, np.full(self.train.seeds, np.nan))
        by_length |= {length: _percent(each) for length, each in found.items()}
        results = {f"exact match, length {length} (%)": x for length, x in by_length.items()}
        if not lengths:
            results = {self.first_result.metric: np.mean([*by_length.values()], axis=0)}
        return {name: Result(x.tolist(), True, high=100.0) for name, x in results.items()}

    def _has_positions(self, length: int) -> bool:
        if self.model.positions != "learned":  # the others go on beyond those of training
            return True
        source, target = self._widths(length)
        is_one_sequence = self.model.architecture == "decoder"
        try:
            self.model.check_length(source + target if is_one_sequence else max(source, target))
        except ValueError:
            return False
        return True

    def answers(
        self,
        params: Params,
        inputs: Sequence[str] = (),
        *,
        beams: int = 1,
        folder: Path | None = None,
    ) -> Answers:
        """Answers, greedily or by a beam search; sources are padded as in `batch`.

        Raises:
            ValueError: an input is empty or has a letter outside the vocabulary.
        """
        if not inputs:
            batch, _ = self.examples(folder)
            rows = np.asarray(batch.source)[:SHOWN].tolist()
            inputs = [self.vocabulary.decode(row) for row in rows]
        if not all(inputs):
            raise ValueError(f"inputs must be one or more, none of them empty; got {list(inputs)}")
        start = [SOS] * self.source_start
        rows = [[*start, *self.vocabulary.encode(text)] for text in inputs]
        width = max(map(len, rows))
        widths = self._widths(self.max_length)
        if width > widths[0]:  # a source of n letters is of length n at most
            widths = self._widths(width - len(start))
        source: Any = padded_rows(rows, len(rows), max(widths[0], width))
        answer = functools.partial(best_answers, max_length=widths[1], beams=beams)
        tokens = jax.jit(lambda params: answer(self.bind(params), *source))(params)
        targets = [up_to_eos(row) for row in tokens.tolist()]
        texts = [
            (text, self.vocabulary.decode(row), self.solution(text))
            for text, row in zip(inputs, targets, strict=True)
        ]
        batch = padded_batch(rows, targets, source_width=source[0].shape[1])
        return Answers(texts, batch, self._labels(batch, len(rows)))

    def _labels(self, batch: Batch, count: int) -> Labels:
        letters, mask_padding = self.vocabulary, self.model.mask_padding
        return labels_of(batch, count, letters.decode, letters.label, mask_padding=mask_padding)


def _percent(accuracies: Accuracies) -> np.ndarray:
    """Exact matches of the model's own answers: [seeds]."""
    return 100 * np.asarray(accuracies.free_running_exact, np.float64)


def _is_pair(drawn: Any) -> bool:
    """Whether `pair` has returned what it must."""
    leaves: list[Any] = jax.tree.leaves(drawn)
    return bool(
        str(jax.tree.structure(drawn)) == str(jax.tree.structure(((0, 0), (0, 0))))
        and [*map(jnp.ndim, leaves)] == [1, 0, 1, 0]
        and all(jnp.issubdtype(jnp.result_type(leaf), jnp.integer) for leaf in leaves)
    )
