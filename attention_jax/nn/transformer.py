"""Encoder and decoder blocks of attention: pre-norm, residual, one head, any score."""

from __future__ import annotations

import jax
from flax import nnx

from attention_jax.masks import Mask
from attention_jax.nn.attention import Attention
from attention_jax.scores import Score

Array = jax.Array


class SelfAttention(nnx.Module):
    """x attends to itself through learned projections: W_o attention(W_q x, W_k x, W_v x).

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        dim: size of x and of everything between.
        rngs: where the initial parameters come from.

    Source: Vaswani et al. 2017, section 3.2.2, with one head.
    """

    def __init__(self, score: str | Score, dim: int, *, rngs: nnx.Rngs):
        self.query = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.key = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.value = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.attention = Attention(score, dim, dim, rngs=rngs)
        self.output = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, x: Array, mask: Mask | None) -> Array:
        """x [*B, T, dim] -> the same shape."""
        return self.output(self.attention(self.query(x), self.key(x), self.value(x), mask=mask))


class FeedForward(nnx.Module):
    """FFN(x) = relu(x W_1 + b_1) W_2 + b_2, the same for every position.

    Args:
        dim: size of x.
        hidden_dim: size of the hidden layer.
        rngs: where the initial parameters come from.

    Source: Vaswani et al. 2017, equation 2.
    """

    def __init__(self, dim: int, hidden_dim: int, *, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(dim, hidden_dim, rngs=rngs)
        self.output = nnx.Linear(hidden_dim, dim, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        """x [..., dim] -> [..., dim]."""
        return self.output(nnx.relu(self.hidden(x)))


class EncoderBlock(nnx.Module):
    """x + self_attention(norm x), then x + FFN(norm x).

    Args:
        score: the score of the self attention.
        dim: size of x.
        hidden_dim: hidden size of the feed-forward layer.
        rngs: where the initial parameters come from.
    """

    def __init__(self, score: str | Score, dim: int, hidden_dim: int, *, rngs: nnx.Rngs):
        self.self_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.self_attention = SelfAttention(score, dim, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.feed_forward = FeedForward(dim, hidden_dim, rngs=rngs)

    def __call__(self, x: Array, mask: Mask | None) -> Array:
        """x [*B, S, dim] -> the same shape."""
        x = x + self.self_attention(self.self_norm(x), mask)
        return x + self.feed_forward(self.feed_forward_norm(x))


class DecoderBlock(nnx.Module):
    """x + self_attention(norm x), then x + cross_attention(norm x, memory), then x + FFN(norm x).

    The cross attention is that of Bahdanau 2014 and Luong 2015: the score sees the decoder's state
    and the memory as they are, without projections that could do part of its work, and the memory
    is key and value at once.

    Args:
        self_score: the score of the self attention.
        cross_score: the score between decoder and memory.
        dim: size of x and of the memory.
        hidden_dim: hidden size of the feed-forward layer.
        rngs: where the initial parameters come from.
    """

    def __init__(
        self,
        self_score: str | Score,
        cross_score: str | Score,
        dim: int,
        hidden_dim: int,
        *,
        rngs: nnx.Rngs,
    ):
        self.self_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.self_attention = SelfAttention(self_score, dim, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.cross_attention = Attention(cross_score, dim, dim, rngs=rngs)
        self.cross_output = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.feed_forward = FeedForward(dim, hidden_dim, rngs=rngs)

    def __call__(
        self, x: Array, memory: Array, self_mask: Mask, memory_mask: Mask | None
    ) -> tuple[Array, Array]:
        """x [*B, T, dim], memory [*B, S, dim] -> (like x, cross-attention weights [*B, T, S])."""
        x = x + self.self_attention(self.self_norm(x), self_mask)
        context, weights = self.cross_attention(
            self.cross_norm(x), memory, mask=memory_mask, return_weights=True
        )
        x = x + self.cross_output(context)
        return x + self.feed_forward(self.feed_forward_norm(x)), weights
