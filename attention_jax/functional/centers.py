"""Window centers of local attention: for each query the key position that it is aligned with.

    local-m    a known alignment: p_i = i, or p_i = S - 1 - i for a reversed sequence
    local-p    a predicted alignment: p_i = S sigmoid(v . tanh(W q_i))

Source: Luong, Pham and Manning 2015, section 3.2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, integer_array, same_rank
from attention_jax.core.checks import check_integer
from attention_jax.functional.checks import check_axes
from attention_jax.positions.function import check_batch_axes
from attention_jax.scores import Params

Array = jax.Array


def monotonic_centers(target_length: int) -> Array:
    """p_i = i, the alignment of local-m: source and target advance together.

    Args:
        target_length: T, at least 0.

    Returns:
        int32 [T].

    >>> monotonic_centers(3).tolist()
    [0, 1, 2]

    Source: Luong et al. 2015, section 3.2, "monotonic alignment".
    """
    return jnp.arange(target_length)


def reversed_centers(target_length: int, source_lengths: Array) -> Array:
    """p_i = S - 1 - i, the alignment of a reversed sequence.

    Args:
        target_length: T, at least 0.
        source_lengths: int [*B], the S of each example.

    Returns:
        int [*B, T]; negative from query S on.

    >>> reversed_centers(3, jnp.array([3, 2])).tolist()
    [[2, 1, 0], [1, 0, -1]]
    """
    check_integer("target_length", target_length, 0)
    lengths = checked_lengths(source_lengths, None).astype(int)
    lengths, steps = same_rank(lengths[..., None], jnp.arange(target_length))
    return lengths - 1 - steps


def predicted_centers(query: Array, params: Params, source_lengths: Array) -> Array:
    """p_i = S sigmoid(v . tanh(W q_i)), the alignment that local-p predicts from the query

    Args:
        query: float [*B, T, Dq].
        params: {"kernel": W, [Dq, A]; "v": [A]}.
        source_lengths: int, [*B] (size 1 where shared) or [], the S of each example.

    Returns:
        float [*B, T] in [0, S], in at least float32. A query that is not finite gets the center
        NaN, and sends no gradient through it: padding must not change those of the parameters.

    Raises:
        ValueError: the parameters do not fit the query.

    >>> params = {"kernel": jnp.eye(2), "v": jnp.zeros(2)}
    >>> predicted_centers(jnp.ones((3, 2)), params, jnp.array(8)).tolist()
    [4.0, 4.0, 4.0]

    Source: Luong et al. 2015, equation 9 (their W_p, v_p are W, v).
    """
    source_lengths = checked_lengths(source_lengths, query.shape[:-2])
    shapes = jax.tree.map(jnp.shape, params)
    hidden_dim = shapes["kernel"][-1:] if isinstance(params, dict) and "kernel" in params else (1,)
    if shapes != {"kernel": (query.shape[-1], *hidden_dim), "v": hidden_dim}:
        raise ValueError(
            f"params must be {{'kernel': [{query.shape[-1]}, A], 'v': [A]}} for query"
            f" {list(query.shape)}; got the shapes {shapes}"
        )
    kernel, v = params["kernel"], params["v"]
    dtype = accumulator_dtype(query, kernel, v)
    query, kernel, v = (array.astype(dtype) for array in (query, kernel, v))
    finite = jnp.all(jnp.isfinite(query), axis=-1)
    query = jnp.where(finite[..., None], query, 0)
    hidden = jnp.tanh(jnp.matmul(query, kernel, precision="highest"))
    fraction = jax.nn.sigmoid(jnp.matmul(hidden, v, precision="highest"))
    fraction = jnp.where(finite, fraction, jnp.nan)
    lengths, fraction = same_rank(source_lengths[..., None], fraction)
    return lengths.astype(dtype) * fraction


def checked_lengths(lengths: Any, batch_shape: tuple[int, ...] | None) -> Array:
    """`lengths` as an int array; ValueError unless it broadcasts to a given `batch_shape`."""
    array = integer_array("source_lengths", lengths)
    if batch_shape is not None:
        check_axes("source_lengths", array, (), batch_shape)
        check_batch_axes("source_lengths", array.shape, 0, batch_shape)
    return array
