"""Flax NNX modules: they hold parameters, the mathematics is elsewhere."""

from attention_jax.nn.attention import (
    AdditiveAttention,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)
from attention_jax.nn.positions import sinusoidal_positions
from attention_jax.nn.seq2seq import Decoded, Seq2Seq, Seq2SeqConfig
from attention_jax.nn.transformer import (
    DecoderBlock,
    EncoderBlock,
    FeedForward,
    SelfAttention,
)

__all__ = [
    "AdditiveAttention",
    "Attention",
    "Decoded",
    "DecoderBlock",
    "DotAttention",
    "EncoderBlock",
    "FeedForward",
    "GeneralAttention",
    "ScaledDotAttention",
    "SelfAttention",
    "Seq2Seq",
    "Seq2SeqConfig",
    "sinusoidal_positions",
]
