"""The kinds of cross attention: each makes its attention module, and calls it for a decoder."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attention
from attention_jax.nn.coverage import CoverageAttention
from attention_jax.nn.local import Alignment, LocalMAttention, LocalPAttention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.position_encoding import PositionIds, Rotation
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Score

Array = jax.Array
Carry = Array | None  # [*B, S], what one call hands to the next; None if the kind carries nothing


class Inputs(NamedTuple):
    """The arguments of one call of `CrossAttention`; each kind reads those that it needs."""

    query: Array  # [*B, T, Dq]
    memory: Array | Memory  # [*B, S, Dk]
    mask: Mask | Array | None
    source_lengths: Array | None  # int [*B]
    first: Array | int  # position of the first query
    position_ids: PositionIds | None  # of the queries
    carry: Carry
    rng: Array | None  # of dropout or noise; None for neither
    return_weights: bool


class Outputs(NamedTuple):
    """The result of one call."""

    output: Array  # [*B, T, ...]
    weights: Array | None  # [*B, T, S], averaged over heads
    carry: Carry


class Kind(abc.ABC):
    """One kind of cross attention and its settings; a frozen dataclass, hashable by value."""

    has_dropout: ClassVar[bool] = True  # of attention weights
    has_noise: ClassVar[bool] = False  # in training
    has_projections: ClassVar[bool] = False  # of query, key, value and output

    @abc.abstractmethod
    def make(self, score: str | Score, query_dim: int, key_dim: int, **options: Any) -> Any:
        """The attention module, which holds the parameters."""

    @abc.abstractmethod
    def attend(self, attention: Any, inputs: Inputs) -> Outputs:
        """Calls the module that `make` made."""

    def first_carry(self, shape: tuple[int, ...], dtype: Any) -> Carry:
        """The carry before the first query, for a memory of shape [*B, S]."""
        return None


@dataclasses.dataclass(frozen=True)
class Global(Kind):
    """Attends to the whole memory, with one head and no projections."""

    def make(self, score: str | Score, query_dim: int, key_dim: int, **options: Any) -> Attention:
        return Attention(score, query_dim, key_dim, **options)

    def attend(self, attention: Attention, inputs: Inputs) -> Outputs:
        result = attention(inputs.query, inputs.memory, mask=inputs.mask, **_shared(inputs))
        return _outputs(result, inputs)


@dataclasses.dataclass(frozen=True)
class MultiHead(Kind):
    """Attends to the whole memory, with several heads between projections."""

    num_heads: int
    rotation: Rotation | None
    has_projections = True

    def make(
        self, score: str | Score, query_dim: int, key_dim: int, **options: Any
    ) -> MultiHeadAttention:
        if self.rotation is not None:
            options["rotary_wavelength"] = self.rotation.max_wavelength
            options["num_position_ids"] = self.rotation.num_position_ids
        return MultiHeadAttention(
            score, query_dim, num_heads=self.num_heads, key_dim=key_dim, **options
        )

    def attend(self, attention: MultiHeadAttention, inputs: Inputs) -> Outputs:
        result = attention(
            inputs.query,
            inputs.memory,
            mask=inputs.mask,
            position_ids=inputs.position_ids,
            **_shared(inputs),
        )
        outputs = _outputs(result, inputs)
        if outputs.weights is None:
            return outputs
        return outputs._replace(weights=jnp.mean(outputs.weights, axis=-3))


@dataclasses.dataclass(frozen=True)
class LocalM(Kind):
    """Attends through a window around a known alignment."""

    radius: int
    alignment: Alignment

    def make(
        self, score: str | Score, query_dim: int, key_dim: int, **options: Any
    ) -> LocalMAttention:
        window: Any = {"radius": self.radius, "alignment": self.alignment}
        return LocalMAttention(score, query_dim, key_dim, **window, **options)

    def attend(self, attention: LocalMAttention, inputs: Inputs) -> Outputs:
        result = attention(
            inputs.query,
            inputs.memory,
            source_lengths=inputs.source_lengths,
            first=inputs.first,
            mask=inputs.mask,
            **_shared(inputs),
        )
        return _outputs(result, inputs)


@dataclasses.dataclass(frozen=True)
class LocalP(Kind):
    """Attends through a window around an alignment that each query predicts."""

    radius: int

    def make(
        self, score: str | Score, query_dim: int, key_dim: int, **options: Any
    ) -> LocalPAttention:
        return LocalPAttention(score, query_dim, key_dim, radius=self.radius, **options)

    def attend(self, attention: LocalPAttention, inputs: Inputs) -> Outputs:
        result = attention(
            inputs.query,
            inputs.memory,
            source_lengths=inputs.source_lengths,
            mask=inputs.mask,
            **_shared(inputs),
        )
        return _outputs(result, inputs)


@dataclasses.dataclass(frozen=True)
class Coverage(Kind):
    """Remembers its weights; the carry is the coverage, the sum of the weights so far."""

    has_dropout = False

    def make(
        self, score: str | Score, query_dim: int, key_dim: int, **options: Any
    ) -> CoverageAttention:
        return CoverageAttention(score, query_dim, key_dim, **options)

    def attend(self, attention: CoverageAttention, inputs: Inputs) -> Outputs:
        result = attention(
            inputs.query,
            inputs.memory,
            mask=inputs.mask,
            coverage=inputs.carry,
            return_weights=inputs.return_weights,
        )
        return Outputs(result.output, result.weights, result.coverage)

    def first_carry(self, shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Monotonic(Kind):
    """Never goes back; the carry is the weights of the last query."""

    has_dropout = False
    has_noise = True

    def make(
        self, score: str | Score, query_dim: int, key_dim: int, **options: Any
    ) -> MonotonicAttention:
        return MonotonicAttention(score, query_dim, key_dim, **options)

    def attend(self, attention: MonotonicAttention, inputs: Inputs) -> Outputs:
        output, weights = attention(
            inputs.query,
            inputs.memory,
            mask=inputs.mask,
            initial=inputs.carry,
            noise_rng=inputs.rng,
            return_weights=True if inputs.return_weights else "last",
        )
        if not inputs.return_weights:
            return Outputs(output, None, weights)
        last = weights[..., -1, :].astype(accumulator_dtype(weights))
        return Outputs(output, weights, last)

    def first_carry(self, shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype).at[..., 0].set(1.0)


def _shared(inputs: Inputs) -> dict[str, Any]:
    """The arguments that every kind with dropout passes on."""
    return {
        "dropout_rng": inputs.rng,
        "deterministic": inputs.rng is None,
        "return_weights": inputs.return_weights,
    }


def _outputs(result: Any, inputs: Inputs) -> Outputs:
    """The outputs of a kind that carries nothing."""
    output, weights = result if inputs.return_weights else (result, None)
    return Outputs(output, weights, inputs.carry)
