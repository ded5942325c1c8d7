"""Gradients of a whole model by group: how large they are, and how much of them is noise."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, float_array

Array = jax.Array


def gradient_norms(gradients: Any, *, depth: int | None = None) -> dict[str, Array]:
    """The norm of the gradient of each group of parameters.

        norm = sqrt(sum over the group's leaves and their entries of g^2)

    Args:
        gradients: a pytree of float arrays.
        depth: leaves whose paths share the first `depth` entries are one group: 1 for the top-level
            subtrees, 0 for everything at once (named ""); None for a group a leaf.

    Returns:
        {path: norm []} in the tree's order, paths as "encoder/kernel"; each in float32, or float64
        if any leaf of the group is.

    Raises:
        ValueError: a leaf is not floating-point, or `depth` is no integer of at least 0.

    >>> gradients = {"score": {"kernel": jnp.array([[3.0, 0.0]]), "v": jnp.array([4.0])}}
    >>> {name: float(norm) for name, norm in gradient_norms(gradients).items()}
    {'score/kernel': 3.0, 'score/v': 4.0}
    >>> gradient_norms(gradients, depth=1)
    {'score': Array(5., dtype=float32)}

    Source: the definition is the usual one; `optax.tree.norm` is that of `depth=0`.
    """
    groups = _groups(gradients, depth)
    return {
        name: jnp.sqrt(_total(jnp.sum(leaf * leaf) for leaf in leaves))
        for name, leaves in groups.items()
    }


def gradient_signal_to_noise(gradients: Any, *, depth: int | None = None) -> dict[str, Array]:
    """How large the true gradient of each group is next to what varies from batch to batch.

        ratio = (|mean|^2 - variance / n) / variance
        mean = sum_b g_b / n,    variance = sum_b |g_b - mean|^2 / (n - 1)

    over n batches b. Numerator and denominator are unbiased: |mean|^2 itself has variance / n of
    noise in it. So it is around 0, above or below, where there is nothing but noise. At 1 the
    noise of a batch is as large as the gradient itself; below, 1 / ratio batches have to be
    averaged to bring it down to that.

    Args:
        gradients: a pytree of float arrays with an axis of n batches in front, n >= 2, as
            `jax.vmap(jax.grad(loss), (None, 0))(params, batches)` makes it.
        depth: as in `gradient_norms`.

    Returns:
        {path: ratio []}, as in `gradient_norms`; inf where nothing varies, 0 where all is 0.

    Raises:
        ValueError: a leaf is not floating-point, leaves differ in n, n is less than 2, or `depth`
            is no integer of at least 0.

    >>> gradients = {"v": jnp.array([[1.0, 0.0], [1.0, 2.0]])}  # mean [1, 1], variance 2
    >>> gradient_signal_to_noise(gradients)
    {'v': Array(0.5, dtype=float32)}

    Source: McCandlish et al. 2018, equation 2.9 and appendix A.1, whose simple noise scale
    tr(Sigma) / |G|^2 this is one over, in batches (their B_small = 1, B_big = n).
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


def _signal_to_noise(leaves: list[Array]) -> Array:
    n = leaves[0].shape[0]
    means = [jnp.mean(leaf, axis=0, keepdims=True) for leaf in leaves]
    squared_mean = _total(jnp.sum(mean * mean) for mean in means)
    deviations = (leaf - mean for leaf, mean in zip(leaves, means, strict=True))
    variance = _total(jnp.sum(deviation * deviation) for deviation in deviations) / (n - 1)
    without_noise = jnp.where(squared_mean == 0, 0, jnp.asarray(jnp.inf, variance.dtype))
    ratio = (squared_mean - variance / n) / jnp.where(variance == 0, 1, variance)
    return jnp.where(variance == 0, without_noise, ratio)


def _groups(gradients: Any, depth: Any) -> dict[str, list[Array]]:
    """The leaves of each group, in one dtype that sums can be taken in."""
    depth = _checked_depth(depth)
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


def _checked_depth(depth: Any) -> int | None:
    if depth is None:
        return None
    try:
        number = operator.index(depth)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"depth must be None or an integer of at least 0; got {depth!r}")
    return number


def _total(numbers: Any) -> Array:
    return jnp.sum(jnp.stack(list(numbers)))
