"""Attention with coverage as a Flax NNX module, which holds the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.functional.coverage import (
    CoverageResult,
    coverage_attention,
    coverage_kernel_size,
)
from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attention
from attention_jax.nn.parameters import Dtype
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Score

Array = jax.Array


class CoverageAttention(Attention):
    """`attention_jax.functional.coverage.coverage_attention` with parameters of its own.

    `coverage_kernel` starts at 0, where a layer is `Attention` with the same score and `rngs`. Its
    gradient there is not 0, so it learns from the first step on.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score` whose `project_key` gives one array
            [S, Fk].
        query_dim: Dq.
        key_dim: Dk.
        dtype, param_dtype: as in `Attention`.
        rngs: the stream of the initial parameters.

    Raises:
        ValueError: there is no such score, it cannot pair Dq with Dk, or its features of keys are
            not one array [S, Fk].

    >>> attend = CoverageAttention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> result = attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6)))
    >>> result.output.shape, result.weights.shape, result.coverage.shape, result.loss.shape
    ((2, 5, 6), (2, 5, 7), (2, 7), (2, 5))
    >>> result = attend(jnp.ones((2, 1, 4)), jnp.ones((2, 7, 6)), coverage=result.coverage)

    Source: See, Liu and Manning 2017, equations 10-13 (their w_c is `coverage_kernel`).
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(score, query_dim, key_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        size = coverage_kernel_size(self.score, query_dim, key_dim)
        self.coverage_kernel = nnx.Param(jnp.zeros(size, param_dtype))

    def __call__(  # type: ignore[override]  # no dropout, and another result
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        coverage: Array | None = None,
        return_weights: bool = True,
    ) -> CoverageResult:
        """Attends, query by query.

        Args:
            query: float [*B, T, Dq], in the order in which they attend.
            key: float [*B, S, Dk]; or a `Memory` that `remember` made.
            value: float [*B, S, Dv]; None for `key`, as in the paper.
            mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
            bias: a `Bias`, or float broadcastable to [*B, T, S], added to the logits.
            coverage: float [*B, S], the `coverage` that an earlier call returned; None for 0.
            return_weights: whether to return the weights [*B, T, S] too.

        Returns:
            `CoverageResult(output, weights, coverage, loss)`, its weights None with
            `return_weights=False`.

        Raises:
            ValueError: an argument has the wrong shape or dtype.
        """
        own, (query, key, value), dtype = self._resolved(query, key, value)
        result = coverage_attention(
            query,
            key,
            value,
            **own,
            coverage_kernel=self._cast(self.coverage_kernel[...]),
            mask=mask,
            bias=bias,
            coverage=coverage,
            return_weights=return_weights,
        )
        weights = None if result.weights is None else result.weights.astype(dtype)
        return result._replace(output=result.output.astype(dtype), weights=weights)
