"""Analysis of attention: captured weights, gradients, curvature, statistics, rollout and cost."""

from attention_jax.analysis.attention_page.view import AttentionView, view
from attention_jax.analysis.capture import Captured, capture
from attention_jax.analysis.capture_point import CapturedAttention
from attention_jax.analysis.curvature import (
    Estimate,
    SpectrumEdges,
    hessian_spectrum_edges,
    hessian_trace,
    hessian_vector_product,
)
from attention_jax.analysis.gradients import (
    AttentionGradients,
    CapturedGradients,
    OutputGradient,
    ScaleSweep,
    attention_gradients,
    capture_gradients,
    logit_scale_sweep,
)
from attention_jax.analysis.learning_statistics import (
    gradient_norms,
    gradient_signal_to_noise,
    learning_statistics,
)
from attention_jax.analysis.ledger import (
    Operations,
    ProgramMemory,
    ScoreCost,
    attention_memory,
    growth_exponent,
    operation_count,
    program_memory,
    score_cost,
)
from attention_jax.analysis.logit_size import LogitSize, logit_factor, logit_size
from attention_jax.analysis.rollout import attention_rollout, cross_rollout
from attention_jax.analysis.softmax_gradients import (
    softmax_jacobian,
    softmax_jacobian_norm,
    softmax_vjp,
)
from attention_jax.analysis.statistics import (
    AttentionSummary,
    alignment_error,
    attention_summary,
    effective_keys,
    expected_distance,
    jensen_shannon,
    logit_variance,
    normalized_entropy,
    saturation,
    weight_entropy,
)

__all__ = [
    "AttentionGradients",
    "AttentionSummary",
    "AttentionView",
    "Captured",
    "CapturedAttention",
    "CapturedGradients",
    "Estimate",
    "LogitSize",
    "Operations",
    "OutputGradient",
    "ProgramMemory",
    "ScaleSweep",
    "ScoreCost",
    "SpectrumEdges",
    "alignment_error",
    "attention_gradients",
    "attention_memory",
    "attention_rollout",
    "attention_summary",
    "capture",
    "capture_gradients",
    "cross_rollout",
    "effective_keys",
    "expected_distance",
    "gradient_norms",
    "gradient_signal_to_noise",
    "growth_exponent",
    "hessian_spectrum_edges",
    "hessian_trace",
    "hessian_vector_product",
    "jensen_shannon",
    "learning_statistics",
    "logit_factor",
    "logit_scale_sweep",
    "logit_size",
    "logit_variance",
    "normalized_entropy",
    "operation_count",
    "program_memory",
    "saturation",
    "score_cost",
    "softmax_jacobian",
    "softmax_jacobian_norm",
    "softmax_vjp",
    "view",
    "weight_entropy",
]
