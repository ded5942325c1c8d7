"""Flax NNX modules: they hold parameters, the mathematics is elsewhere."""

from attention_jax.nn.attention import (
    AdditiveAttention,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)
from attention_jax.nn.cache import KeyValueCache
from attention_jax.nn.coverage import CoverageAttention
from attention_jax.nn.cross_attention import CrossAttention, CrossAttentionConfig
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.local import LocalMAttention, LocalPAttention
from attention_jax.nn.monotonic import MonotonicAttention
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.placement import ANY_LENGTH, Placement, PositionConfig
from attention_jax.nn.positions import (
    anchored_places,
    learned_codes,
    random_positions,
    random_window_positions,
    rotary,
    sinusoidal_codes,
    sinusoidal_positions,
)
from attention_jax.nn.seq2seq import Decoded, Seq2Seq
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.nn.transformer import BlockConfig, DecoderBlock, EncoderBlock

__all__ = [
    "ANY_LENGTH",
    "AdditiveAttention",
    "Attention",
    "BlockConfig",
    "CoverageAttention",
    "CrossAttention",
    "CrossAttentionConfig",
    "Decoded",
    "DecoderBlock",
    "DotAttention",
    "EncoderBlock",
    "FeedForward",
    "GeneralAttention",
    "KeyValueCache",
    "LocalMAttention",
    "LocalPAttention",
    "MonotonicAttention",
    "MultiHeadAttention",
    "Placement",
    "PositionConfig",
    "ScaledDotAttention",
    "Seq2Seq",
    "Seq2SeqConfig",
    "anchored_places",
    "learned_codes",
    "random_positions",
    "random_window_positions",
    "rotary",
    "sinusoidal_codes",
    "sinusoidal_positions",
]
