"""A laboratory for attention score functions; this file lists the public names."""

from attention_jax import analysis, nn
from attention_jax.core.custom_vjp import custom_vjp
from attention_jax.functional import interop
from attention_jax.functional.attention import attention, attention_weights
from attention_jax.functional.centers import monotonic_centers, predicted_centers, reversed_centers
from attention_jax.functional.coverage import (
    CoverageResult,
    coverage_attention,
    coverage_kernel_size,
    coverage_loss,
)
from attention_jax.functional.local import local_attention, local_attention_weights
from attention_jax.functional.memory import Memory, remember
from attention_jax.functional.monotonic import monotonic_attention
from attention_jax.functional.monotonic_walks import (
    hard_monotonic_positions,
    hard_monotonic_weights,
    monotonic_weights,
)
from attention_jax.functional.ring_attention import ring_attention
from attention_jax.functional.windows import gaussian_bias, window_mask
from attention_jax.implementations import IMPLEMENTATIONS, BlockSizes
from attention_jax.implementations.softmax import AttentionStatistics, masked_softmax
from attention_jax.nn.decoding import beam_search, greedy_search
from attention_jax.pairwise.biases import (
    Bias,
    alibi_bias,
    alibi_slopes,
    bias_dataclass,
    relative_bias,
    t5_bias,
)
from attention_jax.pairwise.masks import (
    Mask,
    causal_mask,
    local_mask,
    mask_dataclass,
    padding_mask,
    segment_mask,
    token_mask,
)
from attention_jax.pairwise.position_functions import array_field
from attention_jax.scores import (
    SCORES,
    Additive,
    Concat,
    Cosine,
    Dot,
    General,
    NegativeSquaredDistance,
    ScaledDot,
    Score,
    SoftCap,
    get_score,
)

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "SCORES",
    "Additive",
    "AttentionStatistics",
    "Bias",
    "BlockSizes",
    "Concat",
    "Cosine",
    "CoverageResult",
    "Dot",
    "General",
    "Mask",
    "Memory",
    "NegativeSquaredDistance",
    "ScaledDot",
    "Score",
    "SoftCap",
    "alibi_bias",
    "alibi_slopes",
    "analysis",
    "array_field",
    "attention",
    "attention_weights",
    "beam_search",
    "bias_dataclass",
    "causal_mask",
    "coverage_attention",
    "coverage_kernel_size",
    "coverage_loss",
    "custom_vjp",
    "gaussian_bias",
    "get_score",
    "greedy_search",
    "hard_monotonic_positions",
    "hard_monotonic_weights",
    "interop",
    "local_attention",
    "local_attention_weights",
    "local_mask",
    "mask_dataclass",
    "masked_softmax",
    "monotonic_attention",
    "monotonic_centers",
    "monotonic_weights",
    "nn",
    "padding_mask",
    "predicted_centers",
    "relative_bias",
    "remember",
    "reversed_centers",
    "ring_attention",
    "segment_mask",
    "t5_bias",
    "token_mask",
    "window_mask",
]
