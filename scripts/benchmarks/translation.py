"""A training step of the translator: each score, the share of cross attention, and two peers.

All contestants train on the same random batch, whose shape is the most frequent shape of captions,
so no text is needed. The time of cross attention, including its projections, is the difference to
the same model with the memory's mean in its place. Each peer replaces one part by another library:
the output layer with its loss by optax, which materialises all logits, or dropout by
`flax.nnx.Dropout`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
from flax import nnx

from attention_jax.nn import block, cross_attention, model
from attention_jax.tasks.translation.task import MODEL, Translation
from attention_jax.tasks.vocabulary import Batch, padded_batch
from attention_jax.training.loop import initial_state, train_step
from attention_jax.training.losses import masked_mean
from attention_jax.training.settings import settings_of
from benchmarks.measure import (
    JSON,
    Options,
    Report,
    compile_cold,
    interleaved_seconds,
    print_progress,
)
from benchmarks.translation_parts import mean_of_memory, report

_TOKENS = 2560  # per batch, source and target together
_WIDTH = 18  # tokens per sentence
_COLUMNS = {
    "cross attention": ("score", ""),
    "step": ("variant", ""),
    "ms": ("milliseconds", ",.1f"),
    "subwords/s": ("tokens_per_second", ",.0f"),
    "times ours": ("times_ours", ".2f"),
    "cross attention's share": ("cross_attention_share", ".1%"),
    "temporary MiB": ("temporary_mib", ",.1f"),
}
_PEERS = ("optax loss", "nnx.Dropout")  # with the first score only


def check(options: Options) -> None:
    """Accepts all options."""


def run(options: Options) -> Iterator[Report]:
    """Times a step with every score, the peers with the first score, and parts with scaled dot."""
    tokens = max(2 * _WIDTH, _TOKENS // options.shrink)
    batch = _batch(tokens // (2 * _WIDTH))
    rows: list[JSON] = []
    for index, score in enumerate(options.scores):
        print_progress(f"translation, {score}: compiling")
        variants = ["ours", "without cross attention", *(_PEERS if index == 0 else ())]
        steps = {variant: _step(score, variant, batch) for variant in variants}
        print_progress(f"translation, {score}: measuring")
        seconds = interleaved_seconds(
            {variant: step for variant, (step, _) in steps.items()}, options.repeats
        )
        medians = {variant: statistics.median(times) for variant, times in seconds.items()}
        for variant, median in medians.items():
            ours, without = medians["ours"], medians["without cross attention"]
            rows.append(
                {
                    "score": score,
                    "variant": variant,
                    "milliseconds": 1e3 * median,
                    "tokens_per_second": 2 * _WIDTH * len(batch.source) / median,
                    "times_ours": median / ours,
                    "cross_attention_share": 1 - without / ours if variant == "ours" else None,
                    "temporary_mib": steps[variant][1],
                    "repeat_seconds": seconds[variant],
                }
            )
    config = _task("scaled")
    yield Report(
        name="translation",
        title=f"Training the translator: a step of {len(batch.source)} pairs of {_WIDTH} +"
        f" {_WIDTH} subwords, median of {options.repeats} turns",
        columns=_COLUMNS,
        rows=rows,
        settings={**dataclasses.asdict(options), "config": settings_of(config)},
        notes=[
            "subwords/s: source and target together",
            "without cross attention: the memory's mean in its place",
            "optax loss: logits of all subwords at once, and optax's cross entropy",
            "nnx.Dropout: in place of the hash that XLA fuses, except on attention weights",
        ],
    )
    yield report(options, config, batch)


def _task(score: str, variant: str = "") -> Translation:
    model = dataclasses.replace(MODEL, score=score)
    make = _WithOptaxLoss if variant == "optax loss" else Translation
    return make(Path("-"), Path("-"), model=model)


def _batch(size: int) -> Batch:
    rows = np.random.default_rng(0).integers(4, 4000, (2, size, _WIDTH)).tolist()
    return padded_batch(rows[0], rows[1], size, _WIDTH, _WIDTH)


def _step(score: str, variant: str, batch: Batch) -> tuple[Callable[[], None], float]:
    """(a warm call that takes one step, the temporary memory of its program in MiB)."""
    task = _task(score, variant)
    state = jax.tree.map(lambda leaf: leaf[0], initial_state(task))

    def train(state: Any, batch: Batch) -> Any:
        rng = jax.random.fold_in(jax.random.key(0), state.step)
        return train_step(task, state, batch, rng)[0]

    with _patched(variant):
        compiled = compile_cold(train, state, batch)

    def take_step() -> None:
        nonlocal state
        state = jax.block_until_ready(compiled.call(state, batch))

    take_step()
    return take_step, compiled.temporary_mib


@contextlib.contextmanager
def _patched(variant: str) -> Iterator[None]:
    """Replaces the variant's part of the model; trace the model inside this context."""
    with contextlib.ExitStack() as stack:
        if variant == "without cross attention":
            kind = cross_attention.CrossAttention
            stack.enter_context(mock.patch.object(kind, "__call__", mean_of_memory))
        if variant == "nnx.Dropout":
            for module in (block, model):
                stack.enter_context(mock.patch.object(module, "drop_features", _flax_dropout))
        yield


def _flax_dropout(x: jax.Array, rng: jax.Array | None, rate: float) -> jax.Array:
    return nnx.Dropout(rate)(x, deterministic=rng is None, rngs=rng)


class _WithOptaxLoss(Translation):
    def loss(self, params: Any, batch: Batch, rng: jax.Array | None) -> Any:
        logits = self.bind(params)(*batch.inputs, rng=rng)
        labels = jax.nn.one_hot(batch.targets, logits.shape[-1])
        smoothed = optax.smooth_labels(labels, self.label_smoothing)
        nats = optax.softmax_cross_entropy(logits, smoothed)
        return masked_mean(nats, batch.target_lengths), {}
