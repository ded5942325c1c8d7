"""Normalisers, which turn a row of logits into weights.

A `Normalizer` is a frozen dataclass, hashable by value, so that it can be a static argument, as a
`Score` is. Its parameters are an explicit pytree. README.md is the introduction.
"""

from attention_jax.normalizers.contract import Normalizer
from attention_jax.normalizers.entmax import Entmax
from attention_jax.normalizers.log_scaled import LogScaled
from attention_jax.normalizers.registry import (
    DEFAULT_NORMALIZER,
    NORMALIZERS,
    NormalizerLike,
    get_normalizer,
)
from attention_jax.normalizers.sigmoid import Sigmoid
from attention_jax.normalizers.softmax import Softmax
from attention_jax.normalizers.softmax_rows import AttentionStatistics

__all__ = [
    "DEFAULT_NORMALIZER",
    "NORMALIZERS",
    "AttentionStatistics",
    "Entmax",
    "LogScaled",
    "Normalizer",
    "NormalizerLike",
    "Sigmoid",
    "Softmax",
    "get_normalizer",
]
