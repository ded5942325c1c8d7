"""Monotonic attention as a Flax NNX module, which holds the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn.attention import Attended, CallOptions, ScoreModule
from attention_jax.nn.parameters import Dtype
from attention_jax.scores import Score

Array = jax.Array


class MonotonicAttention(ScoreModule):
    """Monotonic attention with any score, and a learned offset: `monotonic.monotonic_attention`.

        p_ij = sigmoid(score(query_i, key_j) + offset)

    A call with an `rng` adds noise to the logits, for training; a call without one is the paper's
    form after training. A call with `hard=True` uses the hard form, for decoding. The carry is the
    weights of the last query.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        initial_offset: initial value of the offset. Before training, 0 moves on by one key per
            query; -log(S / T) moves on by S / T keys, and so spreads T queries over S keys.
        noise_scale: standard deviation of the noise on the logits.
        options: `rngs`, `dtype` and `param_dtype`, as in `Attention`.

    Raises:
        ValueError: there is no such score, or it cannot pair Dq with Dk.

    >>> layer = MonotonicAttention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> layer.attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6))).output.shape
    (2, 5, 6)

    Source: Raffel et al. 2017, section 2.4 (their r is the offset).
    """

    def __init__(
        self,
        score: str | Score,
        query_dim: int,
        key_dim: int,
        *,
        initial_offset: float = 0.0,
        noise_scale: float = 1.0,
        **options: Any,
    ):
        super().__init__(score, query_dim, key_dim, **options)
        self.offset = nnx.Param(jnp.asarray(initial_offset, self.param_dtype))
        self.noise_scale = noise_scale

    def _attend(
        self, arguments: dict[str, Any], options: CallOptions, *, hard: bool = False
    ) -> Attended:
        output, weights = monotonic_attention(
            **arguments,
            offset=self._cast(self.offset[...]),
            noise_rng=options.rng,
            noise_scale=self.noise_scale,
            hard=hard,
            initial=options.carry,
            return_weights=True if options.return_weights else "last",
        )
        if not options.return_weights:
            return Attended(output, None, weights)
        weights = weights.astype(arguments["query"].dtype)
        return Attended(output, weights, weights[..., -1, :].astype(accumulator_dtype(weights)))

    def first_carry(self, shape: tuple[int, ...], dtype: Dtype) -> Array:
        """All the weight on the first key, [*B, S]."""
        return jnp.zeros(shape, dtype).at[..., 0].set(1.0)
