"""Tasks that draw their examples, accuracies of sequence models, and the programs of both."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.core.checks import check_integer
from attention_jax.core.names import is_of_this_package
from attention_jax.nn import Model, ModelConfig, bind, initial_params
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Batch
from attention_jax.training.metrics import exact_match, token_accuracy
from attention_jax.training.task import Labels, Params, Task, TrainConfig, Validation, undefined

Array = jax.Array
_NO_MODEL = ModelConfig(positions="none")  # where only batches are drawn


# --- programs ---


def compiled(
    function: Callable[..., Any],
    task: Any,
    *,
    run: Path | None = None,
    model: ModelConfig | None = None,
    **static: Any,
) -> Callable[..., Any]:
    """`function` with a task as its first argument, compiled.

    Runs of a task of this library that differ only in what the function does not read share the
    program. The methods of a user's task may read more than its fields: each call of `compiled`
    gives a new program, except for the validations of one run.

    Args:
        function: takes the task, arrays, and the static arguments by keyword.
        task: a task whose model is a `ModelConfig`.
        run: the folder of the run that the function validates.
        model: stands for the model of a task of this library, for a function that reads no model.
        static: further arguments of the function.
    """
    options = tuple(static.items())
    if is_of_this_package(type(task)):
        task, run = dataclasses.replace(task, train=TrainConfig(), model=model or task.model), None
    elif run is None:
        return _compiled.__wrapped__(function, task, run, options)
    return _compiled(function, task.model.known(task), run, options)


@functools.lru_cache(maxsize=32)
def _compiled(
    function: Callable[..., Any], task: Any, run: Path | None, options: tuple[Any, ...]
) -> Callable[..., Any]:
    return jax.jit(functools.partial(function, task, **dict(options)))


def _drawn(task: Task, rng: Array, *, size: int, length: int | None = None) -> Any:
    return task.batch(rng, size=size, length=length)


# --- models ---


class ModelTask(Task):
    """A task whose model is an `nn.Model`."""

    model: ModelConfig

    @property
    def vocabulary_size(self) -> int:
        """V: tokens are numbers from 0 to V - 1."""
        raise undefined(self, "vocabulary_size")

    @property
    def network(self) -> ModelConfig:
        """The settings of the model, with what the task decides."""
        return self.model

    @property
    def label(self) -> str:
        """The score, and the settings of the model that differ from the task's own."""
        return self.model.label_beside(type(self).model)

    def init(self, rng: Array) -> Params:
        return initial_params(self.network, self.vocabulary_size, rng)

    def bind(self, params: Params) -> Model:
        return bind(self.network, params, self.vocabulary_size)

    statistics = staticmethod(learning_statistics)


# --- examples ---

EXAMPLES, SHOWN = 64, 2  # examples that reports look at, and draw


class DrawnTask(Task):
    """A task that draws its examples, those for validation too.

    Class variables:
        first_result: the first result of `evaluate`, which `validate` measures.
    """

    first_result: ClassVar[Validation]

    @property
    def validation(self) -> Validation | None:
        return self.first_result if self.train.validate_on else None

    def validate(self, params: Params, folder: Path) -> dict[str, list[float]]:
        """The first result of `evaluate`, on examples that neither it nor training has."""
        rng = jax.random.fold_in(jax.random.key(0), 2**31 - 1)
        by_seed = self._measured(params, rng, size=self.train.validate_on, run=folder)
        return {self.first_result.metric: by_seed}

    def _measured(self, params: Params, rng: Array, **examples: Any) -> list[float]:
        """The first result of each seed; `examples` are the `size` of a batch, and a `run`."""
        raise NotImplementedError

    def examples(self, folder: Path | None = None) -> tuple[Any, Labels]:
        """64 random examples."""
        batch = jax.jit(self.batch, static_argnames="size")(jax.random.key(0), size=EXAMPLES)
        return batch, self._labels(batch, SHOWN)

    def _labels(self, batch: Any, count: int) -> Labels:
        """The labels of the first rows of a batch."""
        raise NotImplementedError


# --- accuracies ---


class Accuracies(NamedTuple):
    """Three accuracies on examples of one length, each [seeds].

    Token accuracies count letters, not EOS; in an exact match every letter and EOS are correct.
    """

    teacher_forced_tokens: Array  # each letter predicted from the correct letters before it
    free_running_tokens: Array  # each letter predicted from the model's own letters
    free_running_exact: Array  # whole answers


def accuracies(
    task: Any, params: Params, lengths: Sequence[int], *, strings: int = 1000
) -> dict[int, Accuracies]:
    """Accuracies by length, on fresh random examples, the same for all seeds and models.

    Sources are padded to the longest of training, because a model without a padding mask sees
    padding; longer sources are not padded. The accuracy at a length does not depend on the other
    lengths.

    Args:
        task: a `SequenceTask`.
        params: stacked over seeds.
        lengths: each at least 1.
        strings: how many examples of each length.

    Raises:
        ValueError: an argument is out of range.
    """
    check_integer("strings", strings)
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be one or more, each at least 1; got {list(lengths)}")
    results = {}
    for length in lengths:
        rng = jax.random.fold_in(jax.random.key(0), length)
        results[length] = accuracies_of(task, params, rng, size=strings, length=length)
    return results


def accuracies_of(
    task: Any, params: Params, rng: Array, *, run: Path | None = None, **sizes: Any
) -> Accuracies:
    """Accuracies on the batch that a `SequenceTask` draws; the other arguments as in `compiled`."""
    batch = compiled(_drawn, task, run=run, model=_NO_MODEL, **sizes)(rng)
    return _accuracies_on(task.network.known(), task.vocabulary.size, params, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _accuracies_on(
    config: ModelConfig, vocabulary_size: int, params: Params, batch: Batch
) -> Accuracies:
    lengths = batch.target_lengths - 1  # letters

    def one_seed(params: Params) -> Accuracies:
        model = bind(config, params, vocabulary_size)
        forced = jnp.argmax(model(*batch.inputs), axis=-1)
        free = decoded(model, batch)
        return Accuracies(
            token_accuracy(forced, batch.targets, lengths),
            token_accuracy(free, batch.targets, lengths),
            exact_match(free, batch.targets, batch.target_lengths),
        )

    return jax.vmap(one_seed)(params)


# --- answers ---


def decoded(model: Model, batch: Batch) -> Array:
    """The model's own answers, by greedy search, int32 like the targets."""
    size = batch.targets.shape[1]
    return best_answers(model, batch.source, batch.source_lengths, max_length=size)


def best_answers(
    model: Model,
    source: Array,
    source_lengths: Array,
    *,
    max_length: int,
    sos: int = SOS,
    beams: int = 1,
    length_penalty: float = 0.0,
) -> Array:
    """Answers by greedy search, or the best of a beam: [B, max_length], with the source's dtype."""
    ends: Any = {"max_length": max_length, "sos": sos, "eos": EOS, "pad": PAD}
    if beams == 1:
        return model.greedy_decode(source, source_lengths, **ends).tokens
    search: Any = {"beams": beams, "length_penalty": length_penalty}
    found = model.beam_decode(source, source_lengths, **search, **ends)
    return found.tokens[:, 0].astype(source.dtype)
