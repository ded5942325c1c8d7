"""Greedy decoding with a cache, against decoding that recomputes all positions for every token.

The reversal model has random parameters and never emits the end of sequence, so that every output
has the maximal length. `Model.greedy_decode` caches the keys and values of earlier tokens and of
the source. The naive contestant, defined here, keeps nothing, and runs the model on all positions
in every step. Both end with another pass that computes the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.nn import Decoded, Model
from attention_jax.nn.config import ModelConfig
from attention_jax.tasks.reversal import Reversal
from attention_jax.tasks.vocabulary import EOS, PAD, SOS
from benchmarks import measure

Array = jax.Array
Decode = Callable[[Model, Array, Array, int], Decoded]

_BATCH = 64
_LENGTH = 64  # of the source, and of the output
_NEVER = -1e9  # the logit of a token that is never emitted
_DECODE: dict[str, Any] = {"sos": SOS, "eos": EOS, "pad": PAD, "return_weights": True}

_MODELS = {
    "decoding-scaled": ModelConfig(score="scaled"),
    "decoding-additive": ModelConfig(score="additive"),
    "decoding-scaled-4-heads": ModelConfig(score="scaled", num_heads=4),
}


def _race(name: str, config: ModelConfig, options: measure.Options) -> list[measure.JSON]:
    length = max(2, _LENGTH // options.shrink)
    shape, letters = (_BATCH, length), (EOS + 1, Reversal.vocabulary.size)
    source = jax.random.randint(jax.random.key(1), shape, *letters)
    leaves, tree = jax.tree.flatten(never_ending(config))
    arguments = leaves, source, jnp.full((_BATCH,), length)
    what = f"B{_BATCH} T=S={length} D{config.dim}"
    done: measure.JSON = {"count": _BATCH * length, "unit": "tokens"}
    work = {"work": name, "score": config.score, "what": what, **done}

    def contestant(decode: Decode) -> measure.Prepare:
        def decoded(leaves: list[Array], source: Array, lengths: Array) -> Decoded:
            return decode(jax.tree.unflatten(tree, leaves), source, lengths, length)

        return measure.compiled(decoded, *arguments)

    contestants = {"with a cache": contestant(cached), "all anew": contestant(naive)}
    return measure.race(work, contestants, options.repeats)


def never_ending(config: ModelConfig) -> Model:
    """A model with random parameters, and with a bias that excludes EOS."""
    model: Any = Model(config, Reversal.vocabulary.size, rngs=nnx.Rngs(0))
    model.logits.bias[...] = model.logits.bias[...].at[EOS].set(_NEVER)
    return model


# --- the two ways ---


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


DECODING = measure.Benchmark(
    "decoding",
    lambda options: {
        name: functools.partial(_race, name, config, options) for name, config in _MODELS.items()
    },
)
