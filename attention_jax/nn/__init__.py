"""Flax NNX modules, which hold parameters; the mathematics is in `functional` and below."""

from attention_jax.nn.attention import (
    AdditiveAttention,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)
from attention_jax.nn.cache import KeyValueCache
from attention_jax.nn.config import ANY_LENGTH, ModelConfig
from attention_jax.nn.coverage import CoverageAttention
from attention_jax.nn.cross_attention import CrossAttention
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.local import LocalMAttention, LocalPAttention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.position_encoding import PositionEncoding, PositionIds
from attention_jax.nn.positions import (
    anchored_positions,
    learned_encoding,
    random_position_ids,
    random_window_position_ids,
    rotary,
    sinusoidal_encoding,
)
from attention_jax.nn.seq2seq import Decoded, Seq2Seq
from attention_jax.nn.transformer import DecoderBlock, EncoderBlock

__all__ = [
    "ANY_LENGTH",
    "AdditiveAttention",
    "Attention",
    "CoverageAttention",
    "CrossAttention",
    "Decoded",
    "DecoderBlock",
    "DotAttention",
    "EncoderBlock",
    "FeedForward",
    "GeneralAttention",
    "KeyValueCache",
    "LocalMAttention",
    "LocalPAttention",
    "ModelConfig",
    "MonotonicAttention",
    "MultiHeadAttention",
    "PositionEncoding",
    "PositionIds",
    "ScaledDotAttention",
    "Seq2Seq",
    "anchored_positions",
    "learned_encoding",
    "random_position_ids",
    "random_window_position_ids",
    "rotary",
    "sinusoidal_encoding",
]
