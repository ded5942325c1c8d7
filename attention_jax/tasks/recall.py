"""Multi-query associative recall: "2 8 4 7 4 0 2 0" asks 7 at the second 4, and 8 at the second 2.

Source: Arora et al. 2023, "Zoology: measuring and improving recall in efficient language models",
section 4 and appendix C.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention_jax.core.checks import check_integer
from attention_jax.tasks.tokens import TokenTask, drawn, following

Array = jax.Array
_POWER = 0.01


@dataclasses.dataclass(frozen=True)
class Recall(TokenTask):
    """Recall the value of each of several keys.

    Keys are the tokens 1 to V / 2 - 1, values the tokens from V / 2 on. A sequence begins with
    pairs of a key and its value, all different. Each key occurs once more, at an even offset after
    the pairs, where its value is asked. Every other token is 0. Each key draws one of the offsets
    2 n - 2, n = 1, 2, 3, ..., that is still free, with probability proportional to n^(0.01 - 1).

    Published: V = 8,192 and (length, pairs) = (64, 4), (128, 8), (256, 16); 2 layers of attention
    with one head and without feed-forward layers: 99 % and more.

    Attributes:
        vocabulary_size: V.
        pairs: keys of a sequence.
    """

    name: ClassVar[str] = "recall"

    vocabulary_size: int = 64
    pairs: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("pairs", self.pairs, 1, self.length // 4)
        check_integer("vocabulary_size", self.vocabulary_size, 2 * self.pairs + 2)

    @property
    def most_asked(self) -> int:
        return self.pairs

    def tokens(self, rng: Array) -> Array:
        key_rng, value_rng, gap_rng = jax.random.split(rng, 3)
        half, start = self.vocabulary_size // 2, 2 * self.pairs
        keys = 1 + drawn(key_rng, jnp.ones(half - 1), self.pairs)
        values = half + drawn(value_rng, jnp.ones(self.vocabulary_size - half), self.pairs)
        gaps = 1 + jnp.arange((self.length - start) // 2)
        places = start + 2 * drawn(gap_rng, gaps.astype(jnp.float32) ** (_POWER - 1), self.pairs)
        tokens = jnp.zeros(self.length, jnp.int32)
        pairs = jnp.stack([keys, values], axis=1).ravel()
        return tokens.at[:start].set(pairs).at[places].set(keys)

    def targets(self, tokens: Array) -> Array:
        return jnp.where(tokens > 0, following(tokens), 0)
