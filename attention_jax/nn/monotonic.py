"""Monotonic attention as a Flax NNX module, which holds the parameters."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.functional.memory import Memory
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.nn.attention import Attention
from attention_jax.nn.parameters import Dtype
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Score

Array = jax.Array


class MonotonicAttention(Attention):
    """Monotonic attention with any score, and a learned offset: `monotonic.monotonic_attention`.

        p_ij = sigmoid(score(query_i, key_j) + offset)

    Noise needs a `noise_rng` in the call; the module keeps no stream. A call without `noise_rng` is
    the paper's form after training.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        query_dim: Dq.
        key_dim: Dk.
        initial_offset: initial value of the offset. Before training, 0 moves on by one key per
            query; -log(S / T) moves on by S / T keys, and so spreads T queries over S keys.
        noise_scale: standard deviation of the noise on the logits when a `noise_rng` is given.
        dtype, param_dtype: as in `Attention`.
        rngs: the stream of the score's initial parameters.

    Raises:
        ValueError: there is no such score, or it cannot pair Dq with Dk.

    >>> attend = MonotonicAttention("additive", 4, 6, rngs=nnx.Rngs(0))
    >>> attend(jnp.ones((2, 5, 4)), jnp.ones((2, 7, 6))).shape
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
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        super().__init__(score, query_dim, key_dim, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.offset = nnx.Param(jnp.asarray(initial_offset, param_dtype))
        self.noise_scale = noise_scale

    def __call__(  # type: ignore[override]  # noise in place of dropout
        self,
        query: Array,
        key: Array | Memory,
        value: Array | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        noise_rng: Array | None = None,
        hard: bool = False,
        initial: Array | None = None,
        return_weights: bool | Literal["last"] = False,
    ) -> Any:
        """Attends.

        Args:
            query: float [*B, T, Dq].
            key: float [*B, S, Dk]; or a `Memory` that `remember` made.
            value: float [*B, S, Dv]; None for `key`.
            mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
            bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.
            noise_rng: one PRNG key, for training; None for no noise.
            hard: use the hard form, for decoding.
            initial: float broadcastable to [*B, S], the weights of the query before the first; None
                for all the weight on the first key.
            return_weights: True to return the weights [*B, T, S] too; "last" for those of the last
                query alone, [*B, S] in the compute dtype, the `initial` of a later call.

        Returns:
            output [*B, T, Dv]; or (output, weights).

        Raises:
            ValueError: an argument has the wrong shape or dtype.
        """
        own, (query, key, value), dtype = self._resolved(query, key, value)
        result = monotonic_attention(
            query,
            key,
            value,
            **own,
            offset=self._cast(self.offset[...]),
            mask=mask,
            bias=bias,
            noise_rng=noise_rng,
            noise_scale=self.noise_scale,
            hard=hard,
            initial=initial,
            return_weights=return_weights,
        )
        if not return_weights:
            return result.astype(dtype)
        output, weights = result
        return output.astype(dtype), weights if return_weights == "last" else weights.astype(dtype)
