"""Associative recall: "a4c1b7c" becomes "1", the value that stands behind the last key.

Source: Ba et al. 2016, "Using fast weights to attend to the recent past", section 4.1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.nn import ModelConfig
from attention_jax.tasks.sequences import FIRST, Sequences, SequenceTask, Vocabulary

Array = jax.Array
_KEYS, _VALUES = 26, 10


@dataclasses.dataclass(frozen=True)
class Recall(SequenceTask):
    """Recall the value of a key, after `length` pairs of a key and its value."""

    name: ClassVar[str] = "recall"
    vocabulary: ClassVar[Vocabulary] = Vocabulary("abcdefghijklmnopqrstuvwxyz0123456789")

    # The first block brings keys to their values.
    model: ModelConfig = ModelConfig(encoder_layers=2)
    max_length: int = 6

    def pair(self, rng: Array, length: Array, *, longest: int) -> Sequences:
        if longest > _KEYS:
            raise ValueError(f"length must be at most {_KEYS}, the number of keys; got {longest}")
        key_rng, value_rng, query_rng = jax.random.split(rng, 3)
        keys = FIRST + jax.random.permutation(key_rng, _KEYS)[:longest]  # all different
        values = FIRST + _KEYS + jax.random.randint(value_rng, (longest,), 0, _VALUES)
        asked = jax.random.randint(query_rng, (), 0, length)
        source = jnp.append(jnp.stack([keys, values], axis=1).ravel(), 0)
        source = source.at[2 * length].set(keys[asked])
        return (source, 2 * length + 1), (values[asked][None], jnp.int32(1))

    def solution(self, text: str) -> str | None:
        position = text[:-1].find(text[-1])
        return text[position + 1] if position >= 0 else None
