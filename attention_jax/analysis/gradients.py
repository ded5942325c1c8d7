"""Gradients of attention: of its output, weights, logits and inputs.

With L the logits, A = softmax(L) and O = A V, a cotangent dO of the output gives

    dV    = A^T dO
    dA    = dO V^T
    dL_ij = A_ij (dA_ij - sum_k A_ik dA_ik)        the softmax's Jacobian, row by row
    dQ, dK, dparams = the score's vjp of dL;  for L = scale Q K^T,
                      dQ = scale dL K and dK = scale dL^T Q
    dbias = dL, summed over broadcast axes of the bias

`capture_gradients` computes dO, dA and dL for every attention in a loss; the other functions here
apply it to a single call.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention_jax.analysis.capture import named_attentions, traced_call
from attention_jax.analysis.capture_point import CapturedAttention
from attention_jax.analysis.jaxpr_evaluation import evaluate
from attention_jax.analysis.softmax_gradients import softmax_jacobian_norm, softmax_vjp
from attention_jax.analysis.statistics import weight_entropy
from attention_jax.core.arrays import cast_floats, float_array
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.core.serialization import exported
from attention_jax.functional.attention import attention_of
from attention_jax.functional.checks import checked_call, checked_floats
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import Params, Score
from attention_jax.tiles import Inputs, Options
from attention_jax.tiles.options import vmap_over_batch
from attention_jax.whole.masked_softmax import masked_softmax

Array = jax.Array


@exported
class OutputGradient(NamedTuple):
    """The gradients of a loss in one attention's output, weights and logits; axes as captured."""

    doutput: Array  # [*B, T, Dv]
    dweights: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax
    dlogits: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax


@exported
class CapturedGradients(NamedTuple):
    """A loss, its gradient, and every attention in it with the gradient that reaches it."""

    loss: Array  # float []
    auxiliary: Any  # the loss's second result; None if it returns only a float
    dparams: Any  # like the parameters
    attentions: dict[str, CapturedAttention]  # by name
    gradients: dict[str, OutputGradient]  # by the same names


@exported
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


class ScaleSweep(NamedTuple):
    """Means over the rows of all examples that have a key, for each scale."""

    scales: Array  # [n]  those of the call
    gradient_norm: Array  # [n]  mean_i |dlogits_i|, for the logits after scaling
    entropy: Array  # [n]  mean_i of the weights' entropy, in nats
    jacobian_norm: Array  # [n]  mean_i |d weights_i / d logits_i|_F


# --- every attention in a loss ---


def capture_gradients(
    loss: Callable[..., Any], params: Any, /, *args: Any, matrices: bool = True, **kwargs: Any
) -> CapturedGradients:
    """A loss, its gradient, and the gradients of each attention's output, weights and logits.

        doutput = d loss / d output,  dweights = doutput value^T,
        dlogits_ij = weights_ij (dweights_ij - sum_k weights_ik dweights_ik)

    for every call of attention, as `attention_gradients` computes them for one call. With dropout,
    dweights and dlogits are the gradients without dropout for the same doutput. With a Gaussian
    (local-p), dweights are the gradients of the weights before it.
    Inside of a function with its own gradient rule (`jax.custom_vjp`), the parameters' gradient
    follows the rule, and the attention's gradients follow the function itself.

    Args:
        loss: params, *args -> float [], or (float [], auxiliary arrays).
        params: a pytree of float arrays.
        args: further arguments.
        matrices: as in `capture`; False returns only `doutput`.
        kwargs: keyword arguments.

    Returns:
        `CapturedGradients`; `auxiliary` is None if the loss returns only a float.

    Raises:
        NotImplementedError: as in `capture`.
        ValueError: the loss is not one float, a parameter is not floating-point, or there is no
            attention in the loss.

    >>> from attention_jax import attention
    >>> def loss(query):
    ...     return attention(query, jnp.eye(2), jnp.eye(2), score="dot")[0, 0]
    >>> captured = jax.jit(lambda query: capture_gradients(loss, query))(jnp.zeros((1, 2)))
    >>> captured.gradients["attention"].dlogits.tolist(), captured.dparams.tolist()
    ([[0.25, -0.25]], [[0.25, -0.25]])

    Source: Dao et al. 2022, appendix B.2, for the formulas.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        float_array(f"params {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
    program, structure = traced_call("loss", loss, args, kwargs, matrices, params)

    names: list[str] = []

    def evaluate_loss(params: Any, added: list[Array] | None) -> Any:
        outputs, captures = evaluate(program, jax.tree.leaves(params), added)
        value, auxiliary = _loss_and_auxiliary(jax.tree.unflatten(structure, outputs))
        attentions = named_attentions("loss", captures)
        names[:] = attentions
        # A list, because JAX would sort a dict.
        return value, (auxiliary, list(attentions.values()))

    # The gradients of zeros that are added to the outputs are the outputs' gradients.
    _, (_, shapes) = jax.eval_shape(lambda params: evaluate_loss(params, None), params)
    outputs = [attention.output for attention in shapes]
    zeros = [jnp.zeros(out.shape, out.dtype, out_sharding=out.sharding) for out in outputs]
    gradient = jax.value_and_grad(evaluate_loss, argnums=(0, 1), has_aux=True)
    (value, (auxiliary, attentions)), (dparams, doutputs) = gradient(params, zeros)
    gradients = map(_output_gradient, attentions, doutputs)
    return CapturedGradients(
        value,
        auxiliary,
        dparams,
        attentions=dict(zip(names, attentions, strict=True)),
        gradients=dict(zip(names, gradients, strict=True)),
    )


def _output_gradient(attention: CapturedAttention, doutput: Array) -> OutputGradient:
    if attention.logits is None or attention.weights is None or attention.mask is None:
        return OutputGradient(doutput, None, None)

    def gradients(
        value: Array, mask: Array, weights: Array, damping: Array | None, doutput: Array
    ) -> Any:
        # Padding may be NaN, and its weight 0 would not remove NaN.
        value = jnp.where(jnp.any(mask, axis=-2)[..., None], value.astype(weights.dtype), 0)
        doutput = jnp.where(jnp.any(mask, axis=-1)[..., None], doutput.astype(weights.dtype), 0)
        dweights = jnp.matmul(doutput, jnp.swapaxes(value, -1, -2), precision="highest")
        dweights = jnp.where(mask, dweights if damping is None else dweights * damping, 0)
        return dweights, softmax_vjp(weights, dweights)

    spec = PartitionSpec(*explicit_spec(doutput)[:-1])
    arrays = attention.value, attention.mask, attention.weights, attention.damping, doutput
    return OutputGradient(doutput, *on_automatic_axes(gradients, spec, *arrays))


def _loss_and_auxiliary(result: Any) -> tuple[Array, Any]:
    value, auxiliary = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if (
        not jax.tree_util.all_leaves([value])
        or value.shape
        or not jnp.issubdtype(value.dtype, jnp.floating)
    ):
        got = jax.tree.map(lambda leaf: f"{leaf.dtype} {list(leaf.shape)}", result)
        raise ValueError(f"loss must be one float, or (one float, auxiliary arrays); got {got}")
    return value, auxiliary


# --- one call of attention ---


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
    captured = _gradients_of_call(*call, doutput)
    _, dweights, dlogits = captured.gradients["attention"]
    assert dweights is not None
    assert dlogits is not None
    dquery, dkey, dvalue, dparams, dbias = captured.dparams
    if bias is not None and not isinstance(bias, Bias):
        dbias = dbias.table
    return AttentionGradients(dvalue, dweights, dlogits, dquery, dkey, dparams, dbias)


def logit_scale_sweep(
    query: Array,
    key: Array,
    value: Array,
    doutput: Array,
    scales: Array,
    *,
    score: str | Score = "scaled",
    params: Params = None,
    mask: Mask | Array | None = None,
) -> ScaleSweep:
    """The gradient, entropy and softmax Jacobian of attention, as functions of the logits' scale.

        weights(c) = softmax(c logits),    dlogits(c) = the gradient of c logits for this doutput

    The score is computed once for all scales, and compiled once. The gradient of the unscaled
    logits is c times as large. All scales are in memory at once: several arrays [n, T, S] per
    example.

    With `value` the identity [S, S] and `doutput` 1 at each row's largest logit, the gradient is
    the gradient of the largest weight.

    Args:
        query, key, value, doutput, score, params, mask: as in `attention_gradients`.
        scales: float [n], finite.

    Returns:
        `ScaleSweep` in float32, or float64 if any of query, key, value and params is. The means
        are 0 if no row has a key.

    Raises:
        ValueError: an argument has the wrong shape, dtype or structure.

    >>> query, key, value = jnp.ones((1, 1)), jnp.array([[0.0], [1.0]]), jnp.eye(2)
    >>> doutput, scales = jnp.array([[0.0, 1.0]]), jnp.array([0.0, 9.0])
    >>> sweep = jax.jit(logit_scale_sweep)(query, key, value, doutput, scales)
    >>> sweep.entropy.round(3).tolist(), sweep.jacobian_norm.round(3).tolist()
    ([0.6930000185966492, 0.0010000000474974513], [0.5, 0.0])

    Source: "Attention Variants", §38.4, the gradient of the largest weight over the score's scale.
    """
    scales = float_array("scales", scales)
    if scales.ndim != 1:
        raise ValueError(f"scales must be [n]; got {list(scales.shape)}")
    call = checked_call(query, key, value, score=score, params=params, mask=mask)
    captured = _gradients_of_call(*call, doutput)
    attention, gradient = captured.attentions["attention"], captured.gradients["attention"]
    return sweep_of_captured(attention.logits, attention.mask, gradient.dweights, scales)


@jax.jit
def sweep_of_captured(logits: Array, mask: Array, dweights: Array, scales: Array) -> ScaleSweep:
    """`logit_scale_sweep` from captured logits, mask and dweights, [*B, T, S] each."""
    has_key = jnp.any(mask, axis=-1)
    count = jnp.maximum(jnp.sum(has_key), 1).astype(logits.dtype)
    logits, scales = jnp.where(mask, logits, 0), scales.astype(logits.dtype)

    def at_scale(scale: Array) -> tuple[Array, ...]:
        weights = masked_softmax(jnp.where(mask, scale * logits, -jnp.inf))
        dlogits = softmax_vjp(weights, dweights)
        norms = jnp.sqrt(jnp.sum(dlogits * dlogits, axis=-1))
        of_rows = (norms, weight_entropy(weights), softmax_jacobian_norm(weights))
        return tuple(jnp.sum(numbers) / count for numbers in of_rows)  # 0 in rows without a key

    return ScaleSweep(scales, *jax.vmap(at_scale)(scales))


def _gradients_of_call(options: Options, inputs: Inputs, doutput: Any) -> CapturedGradients:
    """<output, doutput> of each example and its gradients, by "reference"."""
    query, value = inputs.query, inputs.value
    core = query.shape[-2], value.shape[-1]
    doutput = checked_floats("doutput", doutput, core, query.shape[:-2])
    return _captured_by_reference(options, inputs, doutput)


@functools.partial(jax.jit, static_argnums=0)
def _captured_by_reference(options: Options, inputs: Inputs, doutput: Array) -> CapturedGradients:
    def one_example(inputs: Inputs, doutput: Array) -> CapturedGradients:
        bias, structure = jax.tree.flatten(inputs.bias)
        floats = [leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else None for leaf in bias]

        def loss(point: Any) -> Array:
            *tokens, params, floats = point
            leaves = [b if f is None else f for f, b in zip(floats, bias, strict=True)]
            moved = inputs._replace(params=params, bias=jax.tree.unflatten(structure, leaves))
            moved = moved._replace(**dict(zip(("query", "key", "value"), tokens, strict=True)))
            output = attention_of(options, moved, "reference")
            return jnp.sum(output * doutput.astype(output.dtype))

        # Cast before the gradient, so that none is rounded to a narrower dtype.
        point = (inputs.query, inputs.key, inputs.value, inputs.params, floats)
        captured = capture_gradients(loss, cast_floats(point, inputs.compute_dtype))
        *others, floats = captured.dparams
        return captured._replace(dparams=(*others, jax.tree.unflatten(structure, floats)))

    return vmap_over_batch(options, one_example, inputs, (doutput, 2))
