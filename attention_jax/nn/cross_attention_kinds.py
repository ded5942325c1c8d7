"""The kinds of cross attention: how each is made, and what of the common arguments it needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.nn.attention import Attention
from attention_jax.nn.coverage import CoverageAttention
from attention_jax.nn.local import LocalMAttention, LocalPAttention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.nn.multi_head import MultiHeadAttention

Array = jax.Array
Carry = Any


class Global:
    """No carry; neither lengths nor positions matter."""

    drops = True  # whether it has weights to drop
    has_noise = False

    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        columns = dim + (config.sharpen_from is not None)  # the last is the factor of the row
        return Attention(score, columns, memory_dim, **settings)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        del lengths, first
        found = attention(query, memory, mask=mask, return_weights=weigh, **_dropping(rng))
        return *_output_and_weights(found, weigh), carry

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return None


class MultiHead(Global):
    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        return MultiHeadAttention(
            score, dim, num_heads=config.heads, key_dim=memory_dim,
            rotary_wavelength=config.rotary_wavelength, position_ends=config.position_ends,
            **settings,
        )  # fmt: skip

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        del lengths, first
        query, positions = query if isinstance(query, tuple) else (query, None)
        found = attention(
            query, memory, mask=mask, positions=positions, return_weights=weigh, **_dropping(rng)
        )
        output, weights = _output_and_weights(found, weigh)
        return output, None if weights is None else jnp.mean(weights, axis=-3), carry


class LocalM(Global):
    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        return LocalMAttention(
            score, dim, memory_dim, radius=config.radius, alignment=config.alignment, **settings
        )

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        found = attention(
            query, memory, source_lengths=lengths, first=first, mask=mask, return_weights=weigh,
            **_dropping(rng),
        )  # fmt: skip
        return *_output_and_weights(found, weigh), carry


class LocalP(Global):
    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        return LocalPAttention(score, dim, memory_dim, radius=config.radius, **settings)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        del first
        found = attention(
            query, memory, source_lengths=lengths, mask=mask, return_weights=weigh, **_dropping(rng)
        )
        return *_output_and_weights(found, weigh), carry


class Coverage(Global):
    """The carry is the coverage, the sum of the weights so far."""

    drops = False

    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        return CoverageAttention(score, dim, memory_dim, **settings)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        del lengths, first, rng
        result = attention(query, memory, mask=mask, coverage=carry, return_weights=weigh)
        return result.output, result.weights, result.coverage

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype)


class Monotonic(Global):
    """The carry is the weights of the last query."""

    drops, has_noise = False, True

    @staticmethod
    def make(score, dim, memory_dim, config, **settings) -> Any:
        return MonotonicAttention(score, dim, memory_dim, **settings)

    @staticmethod
    def attend(attention, query, memory, lengths, mask, first, carry, rng, weigh) -> Any:
        del lengths, first
        output, weights = attention(
            query, memory, mask=mask, initial=carry, noise_rng=rng,
            return_weights=True if weigh else "last",
        )  # fmt: skip
        if not weigh:
            return output, None, weights
        return output, weights, weights[..., -1, :].astype(accumulator_dtype(weights))

    @staticmethod
    def first_carry(shape: tuple[int, ...], dtype: Any) -> Carry:
        return jnp.zeros(shape, dtype).at[..., 0].set(1.0)


KINDS: dict[str, type[Global]] = {
    "global": Global,
    "multi-head": MultiHead,
    "local-m": LocalM,
    "local-p": LocalP,
    "coverage": Coverage,
    "monotonic": Monotonic,
}


def _dropping(rng: Array | None) -> dict[str, Any]:
    return {"dropout_rng": rng, "deterministic": rng is None}


def _output_and_weights(found: Any, has_weights: bool) -> tuple[Array, Array | None]:
    return found if has_weights else (found, None)
