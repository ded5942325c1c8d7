"""A laboratory for attention score functions: the public names, on one screen."""

from attention_jax import interop, nn
from attention_jax.attention import attention, attention_weights
from attention_jax.implementations import IMPLEMENTATIONS, BlockSizes
from attention_jax.masks import (
    Mask,
    causal_mask,
    local_mask,
    mask_dataclass,
    padding_mask,
    segment_mask,
)
from attention_jax.scores import SCORES, Additive, Dot, General, ScaledDot, Score, get_score
from attention_jax.softmax import AttentionStatistics, masked_softmax

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "SCORES",
    "Additive",
    "AttentionStatistics",
    "BlockSizes",
    "Dot",
    "General",
    "Mask",
    "ScaledDot",
    "Score",
    "attention",
    "attention_weights",
    "causal_mask",
    "get_score",
    "interop",
    "local_mask",
    "mask_dataclass",
    "masked_softmax",
    "nn",
    "padding_mask",
    "segment_mask",
]
