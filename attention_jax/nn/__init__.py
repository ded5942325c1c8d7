"""Flax NNX modules, which hold parameters; the mathematics is in `functional` and below."""

from attention_jax.nn.attention import (
    AdditiveAttention,
    Attended,
    Attention,
    DotAttention,
    GeneralAttention,
    ScaledDotAttention,
)
from attention_jax.nn.block import Block, Source
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.cross_attention import CrossAttention
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.generation import Decoded
from attention_jax.nn.local import LocalMAttention, LocalPAttention
from attention_jax.nn.model import Model
from attention_jax.nn.multi_head import KeyValueCache, MultiHeadAttention
from attention_jax.nn.ordered import CoverageAttention, MonotonicAttention
from attention_jax.nn.position_encoding import PositionEncoding
from attention_jax.nn.positions import (
    ANY_LENGTH,
    anchored_positions,
    random_position_ids,
    random_window_position_ids,
    rotary,
    sinusoidal_encoding,
)
from attention_jax.nn.pure import bind, initial_params

__all__ = [
    "ANY_LENGTH",
    "AdditiveAttention",
    "Attended",
    "Attention",
    "Block",
    "CoverageAttention",
    "CrossAttention",
    "Decoded",
    "DotAttention",
    "FeedForward",
    "GeneralAttention",
    "KeyValueCache",
    "LocalMAttention",
    "LocalPAttention",
    "Model",
    "ModelConfig",
    "MonotonicAttention",
    "MultiHeadAttention",
    "PositionEncoding",
    "ScaledDotAttention",
    "Source",
    "anchored_positions",
    "bind",
    "initial_params",
    "random_position_ids",
    "random_window_position_ids",
    "rotary",
    "sinusoidal_encoding",
]
