"""Captures every attention in a model: weights, logits, statistics, and their gradients.

The model is traced once with a point at each attention (`functional.capture_point`). The program is
then evaluated so that it also returns the arrays at its points. The model therefore stores no
arrays, and no tracer can leak, with any `jit`, `vmap`, `scan` or `checkpoint` inside of the model
or around the capture.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from attention_jax.analysis.gradients import gradient_of_weights
from attention_jax.analysis.interpretation import Captures, evaluate
from attention_jax.analysis.softmax_gradients import softmax_vjp
from attention_jax.core.arrays import float_array
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.functional.capture_point import CapturedAttention, capture_points

Array = jax.Array


class Captured(NamedTuple):
    """A function's output, and every attention in it by name.

    The names are in the order of computation. A `jit` around the capture sorts them, as it sorts
    every dict.
    """

    output: Any  # of the function
    attentions: dict[str, CapturedAttention]  # by name


class OutputGradient(NamedTuple):
    """The gradients of a loss in one attention's output, weights and logits; axes as captured."""

    doutput: Array  # [*B, T, Dv]
    dweights: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax
    dlogits: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax


class CapturedGradients(NamedTuple):
    """A loss, its gradient, and every attention in it with the gradient that reaches it."""

    loss: Array  # float []
    auxiliary: Any  # the loss's second result; None if it returns only a float
    dparams: Any  # like the parameters
    attentions: dict[str, CapturedAttention]  # by name
    gradients: dict[str, OutputGradient]  # by the same names


def capture(
    function: Callable[..., Any], /, *args: Any, matrices: bool = True, **kwargs: Any
) -> Captured:
    """Calls a function or Flax module, and returns its output with every attention in it.

    It captures all calls of `attention_jax.attention`, in any module: this library's modules, your
    own, or `flax.nnx.MultiHeadAttention` with `interop.flax_attention_fn`; and also local, coverage
    and monotonic attention. The name of an attention is its `jax.named_scope`, such as
    "decoder_0/cross_attention", or "attention" without a scope. Repeated names get the suffixes
    "#2", "#3" and so on.

    Arrays have the batch axes of the call, with heads as one axis in front of the positions. In
    front of the batch axes are the axes of each enclosing `scan` of the function, and then those of
    each enclosing `vmap`, outer before inner. The weights of local attention with a Gaussian are
    those before it, whose rows sum to 1; `damping` is the Gaussian that multiplies them. Coverage
    and monotonic attention have no softmax over all keys, and therefore no logits. The logits are
    those of the softmax, after the factor of a normaliser such as `LogScaled`.

    The function may compute gradients, of any order and in any mode; each call of attention is
    captured once, as it was computed. A module that the function transforms by Flax (`nnx.grad`)
    must be an argument, as under `jax.jit`.

    `capture` works inside of a `jit`, `vmap` or `grad`, and its results are differentiable. Outside
    of a `jit` it traces at every call: for many calls, jit the caller.

    Args:
        function: a pure function. For a `flax.nnx.Module`, a copy is called, and changes of its
            state (such as random streams) are lost.
        args: its arguments; each `flax.nnx.Module` among them is copied.
        matrices: whether to compute logits, weights and masks, which take memory T S per head.
            False returns only statistics, in the memory of the implementation that computes them.
        kwargs: its keyword arguments.

    Returns:
        `Captured`.

    Raises:
        ValueError: `function` is not callable, or calls no attention.
        NotImplementedError: attention is inside of a `while_loop`, a `cond` or a similar call.

    >>> from attention_jax import nn
    >>> attend = nn.Attention("additive", 4, 4, rngs=nnx.Rngs(0))
    >>> output, attentions = capture(attend, jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4)))
    >>> attentions["attention"].weights.shape
    (2, 3, 5)
    """
    call = _as_function(_checked_function("function", function))
    program, structure = _traced(_on_copies(call, args, kwargs), matrices)
    outputs, captures = evaluate(program, [])
    _check_captures("function", captures)
    return Captured(jax.tree.unflatten(structure, outputs), _named(captures))


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
    >>> captured = capture_gradients(loss, jnp.zeros((1, 2)))
    >>> captured.gradients["attention"].dlogits.tolist(), captured.dparams.tolist()
    ([[0.25, -0.25]], [[0.25, -0.25]])

    Source: Dao et al. 2022, appendix B.2, for the formulas.
    """
    call = _as_function(_checked_function("loss", loss))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        float_array(f"params {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
    program, structure = _traced(_on_copies(call, args, kwargs), matrices, params)

    names: list[str] = []

    def evaluate_loss(params: Any, added: list[Array] | None) -> Any:
        outputs, captures = evaluate(program, jax.tree.leaves(params), added)
        value, auxiliary = _loss_and_auxiliary(jax.tree.unflatten(structure, outputs))
        _check_captures("loss", captures)
        named = _named(captures)
        names[:] = named
        # A list, because JAX would sort a dict.
        return value, (auxiliary, list(named.values()))

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
        dweights = gradient_of_weights(value, mask, doutput, weights.dtype)
        if damping is not None:
            dweights = dweights * damping
        return dweights, softmax_vjp(weights, dweights)

    spec = PartitionSpec(*explicit_spec(doutput)[:-1])
    arrays = attention.value, attention.mask, attention.weights, attention.damping, doutput
    return OutputGradient(doutput, *on_automatic_axes(gradients, spec, *arrays))


# --- tracing and names ---


def _checked_function(name: str, function: Any) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, type):
        is_class = isinstance(function, type)
        described = f"the class {function.__name__}" if is_class else repr(function)
        raise ValueError(f"{name} must be a function, or an instance of a module; got {described}")
    return function


def _as_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A module, or a method of a module, as a function without side effects."""
    module = getattr(function, "__self__", function)
    if not isinstance(module, nnx.Module):
        return function
    definition, state = nnx.split(module)
    name = "__call__" if module is function else function.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        # Copied during tracing: Flax does not let a random stream of an outer trace advance.
        return getattr(nnx.merge(definition, state, copy=True), name)(*args, **kwargs)

    return call


def _on_copies(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """`call` with `args` and `kwargs` after further arguments; modules are copied when traced."""

    def is_module(value: Any) -> bool:
        return isinstance(value, nnx.Module)

    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_module)
    split = {id(leaf): nnx.split(leaf) for leaf in leaves if is_module(leaf)}

    def on_copies(*first: Any) -> Any:
        copies = {name: nnx.merge(*parts, copy=True) for name, parts in split.items()}
        copied_args, copied_kwargs = jax.tree.unflatten(
            structure, [copies.get(id(leaf), leaf) for leaf in leaves]
        )
        return call(*first, *copied_args, **copied_kwargs)

    return on_copies


def _check_captures(name: str, captures: Captures) -> None:
    if captures:
        return
    raise ValueError(
        f"{name} must call attention that can be captured: attention_jax.attention,"
        " local_attention, coverage_attention or monotonic_attention, a module of"
        " attention_jax.nn, or attention_jax.interop in a model of another library; it calls none"
        " (attention_weights and ring_attention cannot be captured)"
    )


def _traced(
    function: Callable[..., Any], matrices: bool, *args: Any
) -> tuple[ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """The program with its points, and the structure of its result."""
    with capture_points(matrices):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return program, jax.tree.structure(shapes)


def _named(captures: Captures) -> dict[str, CapturedAttention]:
    named: dict[str, CapturedAttention] = {}
    counts: collections.Counter[str] = collections.Counter()
    for scope, attention in captures:
        name = _without_transformations(scope) or "attention"
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}#{counts[name]}"] = attention
    return named


def _without_transformations(scope: str) -> str:
    """The scope without the names of transformations: `vmap(decoder_0)/x` as `decoder_0/x`."""
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", scope)) != scope:
        scope = plain
    return "/".join(filter(None, scope.split("/")))


def _loss_and_auxiliary(result: Any) -> tuple[Array, Any]:
    pair = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    value = pair[0]
    if not hasattr(value, "dtype"):
        described = f"a {type(result).__name__}"
    elif value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return pair
    else:
        described = f"{value.dtype} {list(value.shape)}"
    raise ValueError(f"loss must be one float, or (one float, auxiliary arrays); got {described}")
