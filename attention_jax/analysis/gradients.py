"""The gradient of attention by hand, with every intermediate gradient.

With L the logits, A = softmax(L) and O = A V, a cotangent dO of the output gives

    dV    = A^T dO
    dA    = dO V^T
    dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik)        the softmax's Jacobian, row by row
    dQ, dK, dparams = the score's vjp of dL;  for L = scale Q K^T,
                      dQ = scale dL K and dK = scale dL^T Q
    dbias = dL, summed over broadcast axes of the bias

`jax.vjp` of `attention` returns only the gradients of the inputs, in tiles where [T, S] is too
large. The functions here also return the gradients of weights and logits, materialised.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention_jax.analysis.softmax_gradients import softmax_vjp
from attention_jax.core.arrays import cast_floats, float_array
from attention_jax.functional.checks import checked_call
from attention_jax.implementations import BlockSizes, Inputs, Options
from attention_jax.implementations.batching import vmap_over_batch
from attention_jax.implementations.reference import logits_and_mask, without_padding
from attention_jax.implementations.softmax import masked_softmax
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Params, Score

Array = jax.Array


class AttentionGradients(NamedTuple):
    """Gradients in the order of their computation, in the compute dtype.

    Each example has its own gradients: all have the batch axes *B in front, even where an input is
    shared over some of them. The sum over these axes is the gradient of `jax.vjp`.
    """

    dvalue: Array  # [*B, S, Dv]
    dweights: Array  # [*B, T, S]  0 where masked
    dlogits: Array  # [*B, T, S]  0 where masked
    dquery: Array  # [*B, T, Dq]
    dkey: Array  # [*B, S, Dk]
    dparams: Params  # leaves [*B, *shape of the parameter]
    dbias: Any  # [*B, T or 1, S or 1] for an array; for a `Bias`, a `Bias` of its floats' gradients


def attention_gradients(
    query: Array,
    key: Array,
    value: Array,
    doutput: Array,
    *,
    score: str | Score = "scaled",
    params: Params = None,
    mask: Mask | Array | None = None,
    bias: Bias | Array | None = None,
) -> AttentionGradients:
    """The gradients of attention's weights, logits and inputs, from the gradient of its output.

        dvalue = weights^T doutput,    dweights = doutput value^T,
        dlogits_ij = weights_ij (dweights_ij - sum_k weights_ik dweights_ik),

    and the gradients of query, key, parameters and bias from `dlogits`. It stores several arrays
    [T, S] for every example.

    A query that may attend to no key sends gradient 0, whatever its `doutput` is. A key or query
    without an allowed pair (padding) may have any value, including NaN, and gets gradient 0.

    Args:
        query: float [*B, T, Dq]. Heads, if any, are another batch axis.
        key: float [*B, S, Dk]; batch axes that are missing or of size 1 are shared.
        value: float [*B, S, Dv]; the same.
        doutput: float [*B, T, Dv], the gradient of a loss in the output of `attention`.
        score: a name in `SCORES`, "module:Name", or a `Score`.
        params: the score's parameters, as its `init` returns them; leaves may have leading axes
            that broadcast to *B. None for a score without parameters.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
        bias: a `Bias`, or float broadcastable to [*B, T, S]; added to the logits.

    Returns:
        `AttentionGradients` in float32, or float64 if any of query, key, value, params and bias is.
        `dbias` is None without a bias; for a `Bias`, its integer leaves are None.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((1, 1)), jnp.zeros((2, 1)), jnp.array([[1.0], [3.0]])
    >>> gradients = attention_gradients(query, key, value, jnp.ones((1, 1)))
    >>> gradients.dvalue.tolist(), gradients.dweights.tolist(), gradients.dlogits.tolist()
    ([[0.5], [0.5]], [[1.0, 3.0]], [[-0.5, 0.5]])

    Source: Dao et al. 2022, appendix B.2, for scaled dot: their dV, dP, dS, dQ, dK are dvalue,
    dweights, dlogits, dquery, dkey.
    """
    call = checked_call(query, key, value, score=score, params=params, mask=mask, bias=bias)
    score, inputs = call.options.score, call.inputs
    gradients = _gradients(score, inputs, checked_doutput(inputs, doutput))
    if bias is not None and not isinstance(bias, Bias):
        return gradients._replace(dbias=gradients.dbias.table)
    return gradients


def checked_doutput(inputs: Inputs, doutput: Any) -> Array:
    """`doutput` as a float array; raises ValueError unless it has the output's shape."""
    array = float_array("doutput", doutput)
    expected = (*inputs.query.shape[:-1], inputs.value.shape[-1])
    if array.shape != expected:
        raise ValueError(
            f"doutput must be {list(expected)}, as the output of attention is;"
            f" got {list(array.shape)}"
        )
    return array


def gradient_of_weights(
    value: Array, mask: Array | None, doutput: Array, dtype: jnp.dtype
) -> Array:
    """dweights [*B, T, S] in the compute dtype, 0 where masked; all have the batch axes *B."""
    value, doutput = value.astype(dtype), doutput.astype(dtype)
    if mask is not None:  # padding may be NaN, and its weight 0 would not remove NaN
        value = jnp.where(jnp.any(mask, axis=-2)[..., None], value, 0)
        doutput = jnp.where(jnp.any(mask, axis=-1)[..., None], doutput, 0)
    dweights = jnp.matmul(doutput, jnp.swapaxes(value, -1, -2), precision="highest")
    return dweights if mask is None else jnp.where(mask, dweights, 0)


@functools.partial(jax.jit, static_argnums=0)
def _gradients(score: Score, inputs: Inputs, doutput: Array) -> AttentionGradients:
    return vmap_over_batch(
        score, functools.partial(_one_example, Options(score, BlockSizes())), inputs, (doutput, 2)
    )


def _one_example(options: Options, inputs: Inputs, doutput: Array) -> AttentionGradients:
    dtype = inputs.compute_dtype
    floats = (inputs.query, inputs.key, inputs.params, _floats_of(inputs.bias))

    def logits_of(query: Array, key: Array, params: Params, bias: Any) -> Any:
        bias = _with_integers(bias, inputs.bias)
        moved = inputs._replace(query=query, key=key, params=params, bias=bias)
        return logits_and_mask(options, moved)

    # The inputs are cast before `jax.vjp`, so that no gradient is rounded to a narrower dtype.
    logits, pull_back, mask = jax.vjp(logits_of, *cast_floats(floats, dtype), has_aux=True)
    weights = masked_softmax(logits, mask)
    dweights = gradient_of_weights(inputs.value, mask, doutput, dtype)
    dlogits = softmax_vjp(weights, dweights)
    doutput = without_padding(doutput.astype(dtype), mask, of="queries", filler=0)
    dvalue = jnp.matmul(weights.T, doutput, precision="highest")
    return AttentionGradients(dvalue, dweights, dlogits, *pull_back(dlogits))


def _floats_of(bias: Bias | None) -> Any:
    """The bias with None in place of integers, which have no gradient."""
    return jax.tree.map(
        lambda leaf: leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None, bias
    )


def _with_integers(floats: Any, bias: Bias | None) -> Any:
    return jax.tree.map(
        lambda leaf, original: original if leaf is None else leaf,
        floats,
        bias,
        is_leaf=lambda leaf: leaf is None,
    )
