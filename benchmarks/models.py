"""Benchmarks of models: decoding with a cache, and training steps with each score."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attention_jax.nn import Decoded, Model
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.translation.task import MODEL, Translation
from attention_jax.tasks.vocabulary import EOS, PAD, SOS, Batch, padded_batch
from attention_jax.training.step import (
    TrainState,
    gradient_statistics,
    initial_state,
    train_step,
    train_steps,
)
from attention_jax.training.task import TrainConfig
from benchmarks.measure import Cases, Contestant, Race, compiled

Array = jax.Array

# --- decoding ---

_DECODE: dict[str, Any] = {"sos": SOS, "eos": EOS, "pad": PAD, "return_weights": True}
_MODELS = {
    "decoding-scaled": ModelConfig(score="scaled"),
    "decoding-additive": ModelConfig(score="additive"),
    "decoding-scaled-4-heads": ModelConfig(score="scaled", num_heads=4),
}


def decoding(options: Any) -> Cases:
    """Greedy decoding of 64 sources with a cache, and without one; both compute the weights.

    The parameters are random. No output ends before the maximal length.
    """
    batch, length = 64, max(2, 64 // options.shrink)
    letters = EOS + 1, Reversal.vocabulary.size
    source = jax.random.randint(jax.random.key(1), (batch, length), *letters)
    lengths = jnp.full((batch,), length)

    def race(name: str, config: ModelConfig) -> Race:
        leaves, tree = jax.tree.flatten(never_ending(config))

        def prepare(decode: Callable[..., Decoded]) -> Contestant:
            def decoded(leaves: list[Array], *sources: Array) -> Decoded:
                return decode(jax.tree.unflatten(tree, leaves), *sources, length)

            return compiled(decoded, leaves, source, lengths)

        ways = {"with a cache": cached, "all anew": naive}
        about = {"work": name, "score": config.score, "unit": "tokens"}
        about["what"] = f"B{batch} T=S={length} D{config.dim}"
        contestants = {way: functools.partial(prepare, decode) for way, decode in ways.items()}
        return Race(about, contestants, {"rate": batch * length})

    return {name: race(name, config) for name, config in _MODELS.items()}


def never_ending(config: ModelConfig) -> Model:
    """A model with random parameters, and with a bias that excludes EOS."""
    model: Any = Model(config, Reversal.vocabulary.size, rngs=nnx.Rngs(0))
    model.logits.bias[...] = model.logits.bias[...].at[EOS].set(-1e9)
    return model


def cached(model: Model, source: Array, source_lengths: Array, max_length: int) -> Decoded:
    """Decoding with the keys and values of earlier tokens."""
    return model.greedy_decode(source, source_lengths, max_length=max_length, **_DECODE)


def naive(model: Model, source: Array, source_lengths: Array, max_length: int) -> Decoded:
    """Decoding without a cache: shapes must not change, so each step computes all positions."""
    inputs = jnp.full((len(source), max_length + 1), PAD, source.dtype).at[:, 0].set(SOS)

    def extend(step: Array, inputs: Array) -> Array:
        logits = model(source, source_lengths, inputs[:, :-1])
        best = jnp.argmax(logits[:, step], axis=-1).astype(inputs.dtype)
        return inputs.at[:, step + 1].set(best)

    inputs = jax.lax.fori_loop(0, max_length, extend, inputs)
    _, weights = model(source, source_lengths, inputs[:, :-1], return_weights=True)
    return Decoded(inputs[:, 1:], weights)


# --- training ---


def reversal(options: Any) -> Cases:
    """A hundred steps of the reversal model, all seeds at once.

    Its peers take the same steps one seed after another, and with a line of gradients.jsonl after
    them, as `--log-gradients` writes it. The model has an encoder and a decoder with self attention
    (the defaults of `ModelConfig`, not those of the task).
    """
    config, steps = TrainConfig(), max(2, 100 // options.shrink)

    def race(score: str) -> Race:
        task = Reversal(ModelConfig(score=score), config, source_start=False)
        state = initial_state(task)
        train_seed = functools.partial(train_steps, task, steps)

        def logged(state: TrainState) -> Any:
            state, metrics = jax.vmap(train_seed)(state)
            return state, metrics, gradient_statistics(task, state)

        ways: dict[str, Callable[[TrainState], Any]] = {
            "all seeds at once": jax.vmap(train_seed),  # as in `training.step`
            "a seed after another": functools.partial(jax.lax.map, train_seed),
            "with --log-gradients": logged,
        }
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params)) // config.seeds
        about = {"work": f"reversal-{score}", "score": score, "unit": "steps"}
        about["what"] = f"{steps} steps of {config.seeds} seeds, {parameters:,} parameters"
        contestants = {way: functools.partial(compiled, ways[way], state) for way in ways}
        return Race(about, contestants, {"rate": steps * config.seeds})

    return {f"reversal-{score}": race(score) for score in options.scores}


def translation(options: Any) -> Cases:
    """A step of the translator on a random batch, whose shape is the most frequent of captions."""
    width = 18  # tokens per sentence
    size = max(1, 2560 // options.shrink // (2 * width))
    tokens = np.random.default_rng(0).integers(4, 4000, (2, size, width)).tolist()
    batch = padded_batch(tokens[0], tokens[1], size, width, width)
    about = {"work": "translation", "unit": "subwords"}
    about["what"] = f"a step of {size} pairs of {width} + {width} subwords"
    contestants = {score: functools.partial(_step, score, batch) for score in options.scores}
    return {"translation": Race(about, contestants, {"rate": 2 * width * size})}


def _step(score: str, batch: Batch) -> Contestant:
    """A step of the translator, from the same state in each call."""
    task = Translation(Path("-"), Path("-"), model=dataclasses.replace(MODEL, score=score))
    state = jax.tree.map(lambda leaf: leaf[0], initial_state(task))

    def train(state: Any, batch: Batch) -> Any:
        rng = jax.random.fold_in(jax.random.key(0), state.step)
        return train_step(task, state, batch, rng)[0]

    return compiled(train, state, batch)
