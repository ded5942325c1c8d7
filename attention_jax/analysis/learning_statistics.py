"""Statistics to log during training: gradient norms, and entropy and saturation of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.analysis.capture import OutputGradient, capture_gradients
from attention_jax.analysis.gradient_norms import gradient_norms
from attention_jax.analysis.pairs_and_rows import has_keys, mean_over_rows
from attention_jax.analysis.softmax_gradients import softmax_jacobian_norm
from attention_jax.analysis.statistics import attention_summary, logit_variance
from attention_jax.functional.capture_point import CapturedAttention

Array = jax.Array


def learning_statistics(
    loss: Callable[..., Any], params: Any, /, *args: Any, depth: int | None = 3, **kwargs: Any
) -> dict[str, Array]:
    """A batch's loss, the norms of its gradient, and statistics of every attention in it.

        loss
        gradient_norm/<group>       norm of the gradient of a group of parameters
        <attention>/entropy         mean over queries of the weights' entropy, nats
        <attention>/largest_weight  mean over queries
        <attention>/saturation      share of queries whose largest weight exceeds 0.99
        <attention>/logit_sd        root of the mean over queries of their logits' variance
        <attention>/jacobian_norm   mean over queries of |d weights / d logits|_F
        <attention>/dlogits_norm    mean over queries of |d loss / d logits|

    A query counts if the loss depends on its output (it does not for padding), and if it may attend
    to at least two keys. An attention without softmax has only the first three statistics. Names
    are as in `capture` and `gradient_norms`.

    Args:
        loss: params, *args -> float [], or (float [], auxiliary arrays), as in `capture_gradients`.
        params: a pytree of float arrays.
        args: further arguments: a batch, a PRNG key.
        depth: as in `gradient_norms`: parameters whose paths share the first `depth` entries form a
            group.
        kwargs: keyword arguments.

    Returns:
        {name: float []}; pure, so that `jax.vmap` serves stacked seeds.

    Raises:
        ValueError, NotImplementedError: as in `capture_gradients` and `gradient_norms`.

    >>> from attention_jax import attention
    >>> def loss(params):
    ...     return attention(params["query"], jnp.eye(2), jnp.eye(2))[0, 0]
    >>> statistics = learning_statistics(loss, {"query": jnp.zeros((1, 2))})
    >>> statistics["gradient_norm/query"].round(4), statistics["attention/largest_weight"]
    (Array(0.25, dtype=float32), Array(0.5, dtype=float32))
    """
    captured = capture_gradients(loss, params, *args, matrices=True, **kwargs)
    statistics = {"loss": captured.loss}
    for group, norm in gradient_norms(captured.dparams, depth=depth).items():
        statistics[f"gradient_norm/{group}"] = norm
    for name, attention in captured.attentions.items():
        means = _attention_statistics(attention, captured.gradients[name])
        statistics |= {f"{name}/{statistic}": mean for statistic, mean in means.items()}
    return statistics


def _attention_statistics(
    attention: CapturedAttention, gradient: OutputGradient
) -> dict[str, Array]:
    """Means over the queries of all examples."""
    weights, mask = _as_rows(attention.weights), _as_rows(attention.mask)
    rows = jnp.any(gradient.doutput != 0, axis=-1).reshape(-1) & has_keys(weights)
    rows &= jnp.sum(mask, axis=-1) >= 2
    summary = attention_summary(weights, mask=mask, rows=rows)
    statistics = {
        "entropy": summary.entropy,
        "largest_weight": summary.largest_weight,
        "saturation": summary.saturation,
    }
    if attention.logits is None:
        return statistics
    variance = logit_variance(_as_rows(attention.logits), mask, per_row=True)
    dlogits = _as_rows(gradient.dlogits)
    return {
        **statistics,
        "logit_sd": jnp.sqrt(mean_over_rows(variance, rows)),
        "jacobian_norm": mean_over_rows(softmax_jacobian_norm(weights), rows),
        "dlogits_norm": mean_over_rows(jnp.sqrt(jnp.sum(dlogits * dlogits, axis=-1)), rows),
    }


def _as_rows(pairs: Any) -> Array:
    """[*B, T, S] -> [all rows, S]."""
    return pairs.reshape(-1, pairs.shape[-1])
