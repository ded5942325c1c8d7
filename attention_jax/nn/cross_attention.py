"""How a decoder looks at its memory: one interface for every kind of attention, by name.

Each kind can be asked for all queries at once (training) or for one after another (decoding): what
passes from query to query is a carry, what does not depend on queries is made once, a `Memory`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.checks import check_choice
from attention_jax.masks import Mask
from attention_jax.memory import Memory
from attention_jax.nn.attention import Attention
from attention_jax.nn.coverage import CoverageAttention
from attention_jax.nn.local import Alignment, LocalMAttention, LocalPAttention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.scores import Score
from attention_jax.softmax import accumulator_dtype

Array = jax.Array
Carry = Any
AttentionKind = Literal["global", "local-m", "local-p", "coverage", "monotonic"]


@dataclasses.dataclass(frozen=True)
class CrossAttentionConfig:
    """How a decoder looks at its memory.

    Attributes:
        attention: "global" sees the whole memory; "local-m" a window around a known alignment,
            "local-p" around a predicted one; "coverage" remembers what it has attended to;
            "monotonic" never goes back.
        heads: of "global": 1 has no projections, as Bahdanau 2014 and Luong 2015; more are
            multi-head attention, between projections.
        radius: of the local kinds, keys on either side of the window's center, at least 0; at least
            1 for "local-p".
        alignment: of "local-m": "monotonic", p_i = i, or "reversed", p_i = S - 1 - i.

    Raises:
        ValueError: there is no such kind or alignment, or a number is below 1.
    """

    attention: AttentionKind = "global"
    heads: int = 1
    radius: int = 2
    alignment: Alignment = "reversed"

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, AttentionKind)
        check_choice("alignment", self.alignment, Alignment)
        # The Gaussian of local-p has half the radius for its deviation.
        for name, least in (("heads", 1), ("radius", int(self.attention == "local-p"))):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.heads > 1 and self.attention != "global":
            raise ValueError(f"heads must be 1 with attention {self.attention!r}; got {self.heads}")


class CrossAttention(nnx.Module):
    """Attention of a decoder to a memory, and a projection of what it found to the decoder's size.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        dim: size of the decoder's tokens.
        memory_dim: size of the memory's.
        config: the kind and its settings.
        dropout_rate: probability that a weight is dropped, where the kind has weights to drop
            ("global" and the local kinds), when a `dropout_rng` is given.
        rngs: where the initial parameters come from.

    Raises:
        ValueError: there is no such score, or it cannot pair the two sizes.
    """

    def __init__(
        self,
        score: str | Score,
        dim: int,
        memory_dim: int,
        config: CrossAttentionConfig,
        *,
        dropout_rate: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.kind: Any = _KINDS["multi-head" if _is_multi_head(config) else config.attention]
        self.attention: Any = self.kind.make(score, dim, memory_dim, config, dropout_rate, rngs)
        self.output = (
            None if _is_multi_head(config)
            else nnx.Linear(memory_dim, dim, use_bias=False, rngs=rngs)
        )  # fmt: skip

    def __call__(
        self,
        query: Array,
        memory: Array | Memory,
        *,
        source_lengths: Array | None = None,
        mask: Mask | Array | None = None,
        first: Array | int = 0,
        carry: Carry = None,
        dropout_rng: Array | None = None,
    ) -> tuple[Array, Array, Carry]:
        """Attends.

        Args:
            query: float [*B, T, dim].
            memory: float [*B, S, memory_dim]; or what `remember` made of it.
            source_lengths: int [*B], how many memory tokens are real; None for all.
            mask: which of them each query may attend to; padding is for it to leave out.
            first: the position of the first query, where earlier ones have attended before.
            carry: what the call with those left; None for none before.
            dropout_rng: one PRNG key; None for no dropout and no noise.

        Returns:
            (output [*B, T, dim], weights [*B, T, S], averaged over heads, carry).
        """
        found, weights, new = self.kind.attend(
            self.attention, query, memory, source_lengths, mask, first, carry, dropout_rng
        )
        if carry is not None:  # loops want the dtype they began with, whatever parameters have
            new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, carry)
        return found if self.output is None else self.output(found), weights, new

    def remember(self, memory: Array) -> Memory:
        """What does not depend on the queries, made once: give it as `memory`."""
        return self.attention.remember(memory)

    def first_carry(
        self, batch_shape: tuple[int, ...], source_length: int, dtype: Any = jnp.float32
    ) -> Carry:
        """The carry before the first query, as an array; None if this kind carries nothing.

        Every later carry has its dtype: float64 for tokens of that `dtype`, else float32.
        """
        wide = accumulator_dtype(jnp.zeros((), dtype))
        return self.kind.first_carry((*batch_shape, source_length), wide)


# --- the kinds: how each is made, and what of the common arguments it needs ---


class _Global:
    """No carry; neither lengths nor positions matter."""

    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return Attention(score, dim, memory_dim, dropout_rate=dropout_rate, rngs=rngs)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        del lengths, first
        output, weights = attention(query, memory, mask=mask, dropout_rng=rng, return_weights=True)
        return output, weights, carry

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return None


class _MultiHead(_Global):
    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return MultiHeadAttention(
            score, dim, num_heads=config.heads, key_dim=memory_dim, dropout_rate=dropout_rate,
            rngs=rngs,
        )  # fmt: skip

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        output, weights, carry = _Global.attend(
            attention, query, memory, lengths, mask, first, carry, rng
        )
        return output, jnp.mean(weights, axis=-3), carry


class _LocalM(_Global):
    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return LocalMAttention(
            score, dim, memory_dim, radius=config.radius, alignment=config.alignment,
            dropout_rate=dropout_rate, rngs=rngs,
        )  # fmt: skip

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        output, weights = attention(
            query, memory, source_lengths=lengths, first=first, mask=mask, dropout_rng=rng,
            return_weights=True,
        )  # fmt: skip
        return output, weights, carry


class _LocalP(_Global):
    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return LocalPAttention(
            score, dim, memory_dim, radius=config.radius, dropout_rate=dropout_rate, rngs=rngs
        )

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        del first
        output, weights = attention(
            query, memory, source_lengths=lengths, mask=mask, dropout_rng=rng, return_weights=True
        )
        return output, weights, carry


class _Coverage(_Global):
    """The carry is the coverage."""

    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return CoverageAttention(score, dim, memory_dim, rngs=rngs)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        del lengths, first, rng
        result = attention(query, memory, mask=mask, coverage=carry)
        return result.output, result.weights, result.coverage

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype)


class _Monotonic(_Global):
    """The carry is the weights of the last query."""

    @staticmethod
    def make(score, dim, memory_dim, config, dropout_rate, rngs) -> Any:
        return MonotonicAttention(score, dim, memory_dim, rngs=rngs)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng) -> Any:
        del lengths, first
        output, weights = attention(
            query, memory, mask=mask, initial=carry, noise_rng=rng, return_weights=True
        )
        return output, weights, weights[..., -1, :].astype(accumulator_dtype(weights))

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype).at[..., 0].set(1.0)


_KINDS: dict[str, type[_Global]] = {
    "global": _Global,
    "multi-head": _MultiHead,
    "local-m": _LocalM,
    "local-p": _LocalP,
    "coverage": _Coverage,
    "monotonic": _Monotonic,
}


def _is_multi_head(config: CrossAttentionConfig) -> bool:
    return config.attention == "global" and config.heads > 1
