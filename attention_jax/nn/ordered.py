"""Kinds of attention that carry a state from query to query, as Flax NNX modules."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.functional.coverage import coverage_attention, coverage_kernel_size
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn.attention import Attended, Carry, ScoreModule
from attention_jax.nn.parameters import Dtype
from attention_jax.scores import Score

Array = jax.Array


class CoverageAttention(ScoreModule):
    """`attention_jax.functional.coverage.coverage_attention` with parameters of its own.

    `coverage_kernel` starts at 0, where the layer equals `Attention` with the same score and
    `rngs`. Its gradient there is not 0, so it learns from the first step on. The loss of the paper
    is `coverage_loss` of the weights. Queries attend one after another, and the carry is the
    coverage, the sum of the weights so far.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score` whose `project_key` gives one array
            [S, Fk].
        query_dim: Dq.
        key_dim: Dk.
        options: `rngs`, `dtype` and `param_dtype`, as in `Attention`.

    Raises:
        ValueError: there is no such score, it cannot pair Dq with Dk, or its features of keys are
            not one array [S, Fk].

    >>> layer = CoverageAttention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> attend, memory = jax.jit(layer.attend), jnp.ones((2, 7, 6))
    >>> attended = attend(jnp.ones((2, 5, 4)), memory)
    >>> attended.output.shape, attended.carry.shape
    ((2, 5, 6), (2, 7))
    >>> attended = attend(jnp.ones((2, 1, 4)), memory, carry=attended.carry)

    Source: See, Liu and Manning 2017, equations 10-13 (their w_c is `coverage_kernel`).
    """

    def __init__(self, score: str | Score, query_dim: int, key_dim: int, **options: Any):
        super().__init__(score, query_dim, key_dim, **options)
        size = coverage_kernel_size(self.score, query_dim, key_dim)
        self.coverage_kernel = nnx.Param(jnp.zeros(size, self.param_dtype))

    def _attend(
        self, arguments: dict[str, Any], *, carry: Carry, return_weights: bool, **others: Any
    ) -> Attended:
        result = coverage_attention(
            **arguments,
            coverage_kernel=self._cast(self.coverage_kernel[...]),
            coverage=carry,
            return_weights=return_weights,
        )
        return Attended(result.output, result.weights, result.coverage)

    def first_carry(self, shape: tuple[int, ...], dtype: Dtype) -> Array:
        """No coverage, [*B, S]."""
        return jnp.zeros(shape, dtype)


class MonotonicAttention(ScoreModule):
    """Monotonic attention with any score, and a learned offset: `monotonic.monotonic_attention`.

        p_ij = sigmoid(score(query_i, key_j) + offset)

    A call with an `rng` adds noise to the logits, for training. A call without one has the same
    soft weights without noise; the paper's hard form is `monotonic_attention(..., hard=True)`. The
    carry is the weights of the last query. The offset starts at 0, with which attention moves on by
    one key per query if the score is 0; with -log(S / T) it would be S / T keys.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        options: `rngs`, `dtype` and `param_dtype`, as in `Attention`.

    Raises:
        ValueError: there is no such score, or it cannot pair Dq with Dk.

    >>> layer = MonotonicAttention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> layer.attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6))).output.shape
    (2, 5, 6)

    Source: Raffel et al. 2017, section 2.4 (their r is the offset).
    """

    is_random = True

    def __init__(self, score: str | Score, query_dim: int, key_dim: int, **options: Any):
        super().__init__(score, query_dim, key_dim, **options)
        self.offset = nnx.Param(jnp.zeros((), self.param_dtype))

    def _attend(
        self,
        arguments: dict[str, Any],
        *,
        carry: Carry,
        rng: Array | None,
        return_weights: bool,
        **others: Any,
    ) -> Attended:
        output, weights = monotonic_attention(
            **arguments,
            offset=self._cast(self.offset[...]),
            noise_rng=rng,
            initial=carry,
            return_weights=True if return_weights else "last",
        )
        if not return_weights:
            return Attended(output, None, weights)
        return Attended(output, weights, weights[..., -1, :].astype(accumulator_dtype(weights)))

    def first_carry(self, shape: tuple[int, ...], dtype: Dtype) -> Array:
        """All the weight on the first key, [*B, S]."""
        return jnp.zeros(shape, dtype).at[..., 0].set(1.0)
