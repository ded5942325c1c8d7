"""Attention as Flax NNX modules: they hold the score's parameters, and no mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from attention_jax.attention import attention, attention_weights
from attention_jax.biases import Bias
from attention_jax.checks import check_whole, checked_implementation, checked_rate
from attention_jax.float_array import float_array
from attention_jax.masks import Mask
from attention_jax.memory import Memory, remember, resolve
from attention_jax.nn.parameters import score_params, values_of
from attention_jax.scores import Additive, Dot, General, ScaledDot, Score, get_score

Array = jax.Array


class Attention(nnx.Module):
    """Attention with any score: `attention_jax.attention` with parameters of its own.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        query_dim: Dq.
        key_dim: Dk.
        dropout_rate: probability that a weight is dropped when a `dropout_rng` is given.
        implementation: as in `attention_jax.attention`.
        rngs: where the initial parameters come from.

    Raises:
        ValueError: there is no such score, or it cannot pair Dq with Dk.

    >>> import jax.numpy as jnp
    >>> attend = Attention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6))).shape
    (2, 5, 6)
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        dropout_rate: float = 0.0,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.score = get_score(score)
        for name, size in (("query_dim", query_dim), ("key_dim", key_dim)):
            check_whole(name, size)
        if self.score.needs_equal_dims and query_dim != key_dim:
            raise ValueError(
                f"key_dim must be {query_dim} to match score {self.score} with query_dim"
                f" {query_dim}; got {key_dim}"
            )
        self.query_dim, self.key_dim = query_dim, key_dim
        self.params = score_params(self.score.init(rngs.params(), query_dim, key_dim))
        self.dropout_rate = checked_rate(dropout_rate)
        self.implementation = checked_implementation(implementation)

    def __call__(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Attends.

        Args:
            query: float [*B, T, Dq].
            key: float [*B, S, Dk]; or a `Memory` that `remember` made.
            value: float [*B, S, Dv]; None for `key` (the use of Bahdanau 2014 and Luong 2015).
            mask: a `Mask`, or bool broadcastable to [*B, T, S]; True = may attend.
            bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.
            dropout_rng: one PRNG key; None for no dropout.
            return_weights: also return the weights [*B, T, S], before dropout.

        Returns:
            output [*B, T, Dv]; or (output, weights).

        Raises:
            ValueError: an argument has the wrong shape or dtype.
        """
        return self._attend(
            query, key, value, attend=attention, weigh=attention_weights,
            mask=mask, bias=bias, dropout_rng=dropout_rng, return_weights=return_weights,
        )  # fmt: skip

    def _attend(
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None,
        *,
        attend: Callable[..., Array],
        weigh: Callable[..., Array],
        dropout_rng: Array | None,
        return_weights: bool,
        **arguments: Any,
    ) -> Any:
        """`attend` with this module's score and settings; and the weights that `weigh` gives."""
        query, params = float_array("query", query), values_of(self.params)
        dtype = query.dtype
        score, query, key, value = resolve(self.score, params, query, key, value, self.key_dim)
        arguments |= {"score": score, "params": params}
        output = attend(
            query,
            key,
            value,
            **arguments,
            dropout_rate=0.0 if dropout_rng is None else self.dropout_rate,
            dropout_rng=dropout_rng,
            implementation=self.implementation,
        ).astype(dtype)
        if not return_weights:
            return output
        return output, weigh(query, key, **arguments).astype(dtype)

    def remember(self, key: Array, value: Array | None = None) -> Memory:
        """Projects what will be attended to again and again, once: give it as `key`.

        Args:
            key: float [*B, S, Dk].
            value: float [*B, S, Dv]; None for `key`.
        """
        params = values_of(self.params)
        return remember(self.score, params, key, value, query_dim=self.query_dim)


class AdditiveAttention(Attention):
    """`Attention` with `scores.Additive`: v . tanh(Wq q + Wk k), hidden size A (None for Dk)."""

    def __init__(
        self, query_dim: int, key_dim: int, *, hidden_dim: int | None = None, **options: Any
    ):
        super().__init__(Additive(hidden_dim), query_dim, key_dim, **options)


class DotAttention(Attention):
    """`Attention` with `scores.Dot`: q . k, for Dq = Dk."""

    def __init__(self, query_dim: int, key_dim: int, **options: Any):
        super().__init__(Dot(), query_dim, key_dim, **options)


class GeneralAttention(Attention):
    """`Attention` with `scores.General`: q . (W k)."""

    def __init__(self, query_dim: int, key_dim: int, **options: Any):
        super().__init__(General(), query_dim, key_dim, **options)


class ScaledDotAttention(Attention):
    """`Attention` with `scores.ScaledDot`: scale (q . k), for Dq = Dk; None for 1/sqrt(Dk)."""

    def __init__(self, query_dim: int, key_dim: int, *, scale: float | None = None, **options: Any):
        super().__init__(ScaledDot(scale), query_dim, key_dim, **options)
