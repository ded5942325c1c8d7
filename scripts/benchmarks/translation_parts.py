"""Where a training step of the translator spends its time, and how far it is from the machine.

The time of a part is what the step takes less without it: the same model with one part left out,
forward and backward. Operations are XLA's count for the step as written, before it is compiled. The
machine's limit is a product of square matrices, timed in turns with the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

from attention_jax.nn.attention import Attended
from attention_jax.nn.cross_attention import CrossAttention
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.vocabulary import Batch
from attention_jax.training.loop import initial_state, train_step
from attention_jax.training.settings import settings_of
from benchmarks.measure import (
    JSON,
    Options,
    Report,
    compile_cold,
    interleaved_seconds,
    print_progress,
)

_SIDE = 1024  # of the matrices whose product is the machine's limit
_COLUMNS = {
    "part of the step": ("part", ""),
    "ms": ("milliseconds", ",.1f"),
    "share of the time": ("share", ".0%"),
    "GFLOP": ("gflop", ",.2f"),
    "GFLOP/s": ("gflop_per_second", ",.0f"),
}


class Measured(NamedTuple):
    """A step or a part of it."""

    seconds: float
    operations: float


def report(options: Options, config: Translation, batch: Batch) -> Report:
    """Times the whole step, the step without each part, and the product of two matrices."""
    print_progress(f"translation, parts of the step with {config.model.score}: compiling")
    steps = {part: _step(part, config, batch) for part in ("", *PARTS)}
    print_progress("translation, parts of the step: measuring")
    contestants = {part: step for part, (step, _) in steps.items()}
    seconds = interleaved_seconds({**contestants, "machine": _product()}, options.repeats)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    whole = Measured(medians[""], steps[""][1])
    rows = [_row("the whole step", whole, whole)]
    rest = whole
    for part in PARTS:
        without = Measured(medians[part], steps[part][1])
        own = Measured(whole.seconds - without.seconds, whole.operations - without.operations)
        rest = Measured(rest.seconds - own.seconds, rest.operations - own.operations)
        rows.append({**_row(part, own, whole), "repeat_seconds": seconds[part]})
    rows.append(_row("the rest: embeddings, normalisation, residuals", rest, whole))
    machine = Measured(medians["machine"], 2.0 * _SIDE**3)
    rows.append(_row(f"for comparison: a product of {_SIDE} x {_SIDE} matrices", machine, None))
    rows[0]["repeat_seconds"] = seconds[""]
    rows[-1]["repeat_seconds"] = seconds["machine"]
    return Report(
        name="translation-parts",
        title=f"Where the step with {config.model.score} spends its time: {len(batch.source)}"
        f" pairs of sentences, median of {options.repeats} turns",
        columns=_COLUMNS,
        rows=rows,
        settings={**dataclasses.asdict(options), "config": settings_of(config)},
        notes=[
            "a part: what the step takes less without it, forward and backward",
            "dropout inside the layers counts twice, so that the rest looks smaller than it is",
            "GFLOP: XLA's count of the step as written; in dropout they are of integers",
        ],
        section=(),
    )


def _row(part: str, measured: Measured, whole: Measured | None) -> JSON:
    return {
        "part": part,
        "milliseconds": 1e3 * measured.seconds,
        "share": None if whole is None else measured.seconds / whole.seconds,
        "gflop": measured.operations / 1e9,
        "gflop_per_second": measured.operations / measured.seconds / 1e9
        if measured.seconds > 0
        else None,
    }


def _step(part: str, config: Translation, batch: Batch) -> tuple[Callable[[], None], float]:
    """(a warm call that takes one step without a part, its operations)."""
    if part == _DROPOUT:
        without = dataclasses.replace(config.model, dropout_rate=0.0, attention_dropout_rate=0.0)
        config = dataclasses.replace(config, model=without)
    make = {_OUTPUT: _WithoutOutput, _ADAM: _WithoutAdam}.get(part, Translation)
    task = make(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    state = jax.tree.map(lambda leaf: leaf[0], initial_state(task))

    def train(state: Any, batch: Batch) -> Any:
        rng = jax.random.fold_in(jax.random.key(0), state.step)
        return train_step(task, state, batch, rng)[0]

    with _LAYERS.get(part, contextlib.nullcontext)():
        costs: Any = jax.jit(train).lower(state, batch).cost_analysis()
        compiled = compile_cold(train, state, batch)

    def take_step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled.call(state, batch))

    take_step()
    return take_step, float(costs["flops"])


def _product() -> Callable[[], None]:
    """A warm call that multiplies two square matrices of float32."""
    matrix = jnp.ones((_SIDE, _SIDE))
    multiply = jax.jit(jnp.matmul)

    def call() -> None:
        jax.block_until_ready(multiply(matrix, matrix))

    call()
    return call


class _WithoutOutput(Translation):
    def loss(self, params: Any, batch: Batch, rng: jax.Array | None) -> Any:
        return jnp.mean(self.bind(params).features(*batch.inputs, rng=rng)), {}


class _WithoutAdam(Translation):
    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(1e-6)


@contextlib.contextmanager
def _replaced(*methods: tuple[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replaces the calls of modules; trace the model inside this context."""
    with contextlib.ExitStack() as stack:
        for module, call in methods:
            stack.enter_context(mock.patch.object(module, "__call__", call))
        yield


def mean_of_memory(self: Any, query: jax.Array, memory: jax.Array, **_: Any) -> Any:
    """In place of cross attention: the mean of the memory for every query, and no weights."""
    mean = jnp.mean(memory, axis=-2, keepdims=True)
    return Attended(jnp.broadcast_to(mean, query.shape), None, None)


def _itself(self: Any, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x


def _without_self_attention() -> Any:
    attend = MultiHeadAttention.__call__

    def call(self: Any, query: jax.Array, *memory: Any, **options: Any) -> Any:
        return attend(self, query, *memory, **options) if memory else query

    return _replaced((MultiHeadAttention, call))


# Layers -> the context in which a step is traced without them.
_LAYERS: dict[str, Callable[[], Any]] = {
    "cross attention": lambda: _replaced((CrossAttention, mean_of_memory)),
    "self attention": _without_self_attention,
    "feed-forward layers": lambda: _replaced((FeedForward, _itself)),
}
_OUTPUT, _DROPOUT, _ADAM = "output layer and loss", "dropout", "Adam and clipping"
PARTS = (*_LAYERS, _OUTPUT, _DROPOUT, _ADAM)
