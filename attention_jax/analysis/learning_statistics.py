"""Statistics to log during training: norms and noise of gradients, and every attention's rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.analysis.capture_point import CapturedAttention
from attention_jax.analysis.gradients import OutputGradient, capture_gradients
from attention_jax.analysis.softmax_gradients import softmax_jacobian_norm
from attention_jax.analysis.statistics import attention_summary, logit_variance, mean_over_rows
from attention_jax.core.arrays import accumulator_dtype, float_array
from attention_jax.core.checks import check_integer

Array = jax.Array


def gradient_norms(gradients: Any, *, depth: int | None = None) -> dict[str, Array]:
    """The norm of the gradient of each group of parameters.

        norm = sqrt(sum over the group's leaves and their entries of g^2)

    Args:
        gradients: a pytree of float arrays.
        depth: leaves whose paths share the first `depth` entries form a group: 1 for the top-level
            subtrees, 0 for all leaves together (named ""), None for a group per leaf.

    Returns:
        {path: norm []} in the tree's order, with paths such as "encoder/kernel"; each norm in
        float32, or float64 if any leaf of the group is.

    Raises:
        ValueError: a leaf is not floating-point, or `depth` is not None or an integer >= 0.

    >>> gradients = {"score": {"kernel": jnp.array([[3.0, 0.0]]), "v": jnp.array([4.0])}}
    >>> {name: float(norm) for name, norm in gradient_norms(gradients).items()}
    {'score/kernel': 3.0, 'score/v': 4.0}
    >>> gradient_norms(gradients, depth=1)
    {'score': Array(5., dtype=float32)}

    Source: the usual definition; `optax.tree.norm` is the norm for `depth=0`.
    """
    groups = _groups(gradients, depth)
    return {
        name: jnp.sqrt(_sum_of(jnp.sum(leaf * leaf) for leaf in leaves))
        for name, leaves in groups.items()
    }


def gradient_signal_to_noise(gradients: Any, *, depth: int | None = None) -> dict[str, Array]:
    """The squared norm of each group's true gradient, divided by its variance between batches.

        ratio = (|mean|^2 - variance / n) / variance
        mean = sum_b g_b / n,    variance = sum_b |g_b - mean|^2 / (n - 1)

    over n batches b. Numerator and denominator are unbiased: the noise contributes variance / n to
    |mean|^2. The ratio therefore scatters around 0 if the gradients are only noise. At 1, the noise
    of a batch is as large as the gradient itself; below 1, this is so for the mean of 1 / ratio
    batches.

    Args:
        gradients: a pytree of float arrays with a leading axis of n batches, n >= 2, as
            `jax.vmap(jax.grad(loss), (None, 0))(params, batches)` returns it.
        depth: as in `gradient_norms`.

    Returns:
        {path: ratio []}, as in `gradient_norms`; inf where the variance is 0, and 0 where the
        gradients are all 0.

    Raises:
        ValueError: a leaf is not floating-point, leaves differ in n, n is less than 2, or `depth`
            is not None or an integer >= 0.

    >>> gradients = {"v": jnp.array([[1.0, 0.0], [1.0, 2.0]])}  # mean [1, 1], variance 2
    >>> gradient_signal_to_noise(gradients)
    {'v': Array(0.5, dtype=float32)}

    Source: McCandlish et al. 2018, equation 2.9 and appendix A.1: the inverse of their simple noise
    scale tr(Sigma) / |G|^2, in batches (their B_small = 1, B_big = n).
    """
    groups = _groups(gradients, depth)
    counts = {leaf.shape[:1] for leaves in groups.values() for leaf in leaves}
    if len(counts) > 1 or any(count < (2,) for count in counts):
        described = ", ".join(str(list(count)) for count in sorted(counts))
        raise ValueError(
            "gradients must have one axis of at least 2 batches in front, the same for all leaves;"
            f" got {described}"
        )
    return {name: _signal_to_noise(leaves) for name, leaves in groups.items()}


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
    >>> statistics = jax.jit(lambda params: learning_statistics(loss, params))(
    ...     {"query": jnp.zeros((1, 2))}
    ... )
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
    rows = jnp.any(gradient.doutput != 0, axis=-1).reshape(-1)
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


def _signal_to_noise(leaves: list[Array]) -> Array:
    n = leaves[0].shape[0]
    means = [jnp.mean(leaf, axis=0, keepdims=True) for leaf in leaves]
    squared_mean = _sum_of(jnp.sum(mean * mean) for mean in means)
    deviations = (leaf - mean for leaf, mean in zip(leaves, means, strict=True))
    variance = _sum_of(jnp.sum(deviation * deviation) for deviation in deviations) / (n - 1)
    without_noise = jnp.where(squared_mean == 0, 0, jnp.asarray(jnp.inf, variance.dtype))
    ratio = (squared_mean - variance / n) / jnp.where(variance == 0, 1, variance)
    return jnp.where(variance == 0, without_noise, ratio)


def _groups(gradients: Any, depth: Any) -> dict[str, list[Array]]:
    """The leaves of each group, in one dtype for sums over the group."""
    depth = None if depth is None else check_integer("depth", depth, 0)
    groups: dict[str, list[Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        array = float_array(f"gradients {name}", leaf)
        group = jax.tree_util.keystr(path[:depth], simple=True, separator="/")
        groups.setdefault(group, []).append(array)
    return {
        name: [leaf.astype(accumulator_dtype(*leaves)) for leaf in leaves]
        for name, leaves in groups.items()
    }


def _sum_of(numbers: Any) -> Array:
    return jnp.sum(jnp.stack(list(numbers)))
