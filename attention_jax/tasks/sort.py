"""Sorting: "cab" becomes "abc"."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.tasks.sequences import FIRST, Sequences, SequenceTask

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Sort(SequenceTask):
    """Sort strings of random letters by the alphabet."""

    name: ClassVar[str] = "sort"

    def pair(self, rng: Array, length: Array, *, longest: int) -> Sequences:
        letters = jax.random.randint(rng, (longest,), FIRST, self.vocabulary.size)
        counted = jnp.arange(longest) < length
        ordered = jnp.sort(jnp.where(counted, letters, self.vocabulary.size))  # padding goes last
        return (letters, length), (ordered, length)

    def solution(self, text: str) -> str:
        return "".join(sorted(text))
