"""Training steps of the reversal model and of the translator, with each score.

A step of the reversal model trains all seeds at once. Its peers take the same steps one seed after
another, and with a line of gradients.jsonl after 100 steps, as `--log-gradients` writes it. The
model has an encoder and a decoder with self attention (the defaults of `ModelConfig`, not those of
the task). The translator trains on a random batch, whose shape is the most frequent one of
captions, so no text is needed; there the scores take turns.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import MODEL, Translation
from attention_jax.tasks.vocabulary import Batch, padded_batch
from attention_jax.training.loop import (
    TrainState,
    gradient_statistics,
    initial_state,
    train_step,
    train_steps,
)
from attention_jax.training.task import TrainConfig
from benchmarks import measure

_TRAIN = TrainConfig()
_STEPS = 100  # of each seed in one call: the interval of --log-gradients
_TOKENS = 2560  # of a batch to translate, source and target together
_WIDTH = 18  # tokens per sentence


def _reversal(score: str, options: measure.Options) -> list[measure.JSON]:
    steps = max(2, _STEPS // options.shrink)
    task = Reversal(ModelConfig(score=score), _TRAIN, source_start=False)
    state = initial_state(task)
    train_seed = functools.partial(train_steps, task, steps)

    def logged(state: TrainState) -> Any:
        state, metrics = jax.vmap(train_seed)(state)
        return state, metrics, gradient_statistics(task, state)

    contestants = {
        "all seeds at once": measure.compiled(jax.vmap(train_seed), state),  # as in `training.loop`
        "a seed after another": measure.compiled(functools.partial(jax.lax.map, train_seed), state),
        "with --log-gradients": measure.compiled(logged, state),
    }
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params)) // _TRAIN.seeds
    what = f"{steps} steps of {_TRAIN.seeds} seeds, {parameters:,} parameters"
    done: measure.JSON = {"count": steps * _TRAIN.seeds, "unit": "steps"}
    work = {"work": f"reversal-{score}", "score": score, "what": what, **done}
    return measure.race(work, contestants, options.repeats)


def _translation(options: measure.Options) -> list[measure.JSON]:
    size = max(1, _TOKENS // options.shrink // (2 * _WIDTH))
    tokens = np.random.default_rng(0).integers(4, 4000, (2, size, _WIDTH)).tolist()
    batch = padded_batch(tokens[0], tokens[1], size, _WIDTH, _WIDTH)
    contestants = {score: functools.partial(_step, score, batch) for score in options.scores}
    what = f"a step of {size} pairs of {_WIDTH} + {_WIDTH} subwords"
    done: measure.JSON = {"count": 2 * _WIDTH * size, "unit": "subwords"}
    work = {"work": "translation", "what": what, **done}
    return measure.race(work, contestants, options.repeats)


def _step(score: str, batch: Batch) -> measure.Contestant:
    """A step of the translator, from the same state in each call."""
    task = Translation(Path("-"), Path("-"), model=dataclasses.replace(MODEL, score=score))
    state = jax.tree.map(lambda leaf: leaf[0], initial_state(task))

    def train(state: Any, batch: Batch) -> Any:
        rng = jax.random.fold_in(jax.random.key(0), state.step)
        return train_step(task, state, batch, rng)[0]

    return measure.compiled(train, state, batch)()


REVERSAL = measure.Benchmark(
    "reversal",
    lambda options: {
        f"reversal-{score}": functools.partial(_reversal, score, options)
        for score in options.scores
    },
)
TRANSLATION = measure.Benchmark(
    "translation", lambda options: {"translation": functools.partial(_translation, options)}
)
