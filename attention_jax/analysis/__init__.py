"""What one can say about attention that has been computed."""

from attention_jax.analysis.rollout import attention_rollout, cross_rollout

__all__ = ["attention_rollout", "cross_rollout"]
