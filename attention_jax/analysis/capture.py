"""Captures every attention in a model: weights, logits and statistics.

The model is traced once with a point at each attention (`capture_point`). The program is
then evaluated so that it also returns the arrays at its points. The model therefore stores no
arrays, and no tracer can leak, with any `jit`, `vmap`, `scan` or `checkpoint` inside of the model
or around the capture.
"""

import collections
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr

from attention_jax.analysis.capture_point import CapturedAttention, CapturePoint
from attention_jax.analysis.jaxpr_evaluation import Captures, evaluate
from attention_jax.core.serialization import exported
from attention_jax.functional.attention import capturing

Array = jax.Array


@exported
class Captured(NamedTuple):
    """A function's output, and every attention in it by name.

    The names are in the order of computation. A `jit` around the capture sorts them, as it sorts
    every dict.
    """

    output: Any  # of the function
    attentions: dict[str, CapturedAttention]  # by name


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

    >>> import jax.numpy as jnp
    >>> from attention_jax import nn
    >>> attend = nn.Attention("additive", 4, 4, rngs=nnx.Rngs(0))
    >>> output, attentions = capture(attend, jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4)))
    >>> attentions["attention"].weights.shape
    (2, 3, 5)
    """
    program, structure = traced_call("function", function, args, kwargs, matrices)
    outputs, captures = evaluate(program, [])
    return Captured(jax.tree.unflatten(structure, outputs), named_attentions("function", captures))


# --- tracing and names ---


def traced_call(
    name: str,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    matrices: bool,
    *first: Any,
) -> tuple[ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """Traces `function(*first, *args, **kwargs)` with a point at each attention.

    Args:
        name: the name of the function in error messages.
        function, args, kwargs, matrices: as in `capture`.
        first: the arguments that become the arguments of the program.

    Returns:
        The program, and the structure of its result.
    """
    if not callable(function) or isinstance(function, type):
        is_class = isinstance(function, type)
        described = f"the class {function.__name__}" if is_class else repr(function)
        raise ValueError(f"{name} must be a function, or an instance of a module; got {described}")
    is_method = _is_module(getattr(function, "__self__", None))
    callee = function.__self__ if is_method else function
    leaves, structure = jax.tree.flatten((callee, args, kwargs), is_leaf=_is_module)
    modules = {id(leaf): nnx.split(leaf) for leaf in leaves if _is_module(leaf)}

    def call(*first: Any) -> Any:
        # Copied during tracing: Flax does not let a random stream of an outer trace advance.
        copies = {index: nnx.merge(*parts, copy=True) for index, parts in modules.items()}
        copied = [copies.get(id(leaf), leaf) for leaf in leaves]
        callee, args, kwargs = jax.tree.unflatten(structure, copied)
        if is_method:
            callee = getattr(callee, function.__name__)
        return callee(*first, *args, **kwargs)

    with capturing(CapturePoint(matrices)):
        program, shapes = jax.make_jaxpr(call, return_shape=True)(*first)
    return program, jax.tree.structure(shapes)


def _is_module(value: Any) -> bool:
    return isinstance(value, nnx.Module)


def named_attentions(function: str, captures: Captures) -> dict[str, CapturedAttention]:
    """The captured attentions by name; ValueError if there are none."""
    if not captures:
        raise ValueError(
            f"{function} must call attention that can be captured: attention_jax.attention,"
            " local_attention, coverage_attention or monotonic_attention, a module of"
            " attention_jax.nn, or attention_jax.interop in a model of another library; it calls"
            " none (attention_weights and ring_attention cannot be captured)"
        )
    attentions: dict[str, CapturedAttention] = {}
    counts: collections.Counter[str] = collections.Counter()
    for scope, attention in captures:
        name = _without_transformations(scope) or "attention"
        counts[name] += 1
        attentions[name if counts[name] == 1 else f"{name}#{counts[name]}"] = attention
    return attentions


def _without_transformations(scope: str) -> str:
    """The scope without the names of transformations: `vmap(decoder_0)/x` as `decoder_0/x`."""
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", scope)) != scope:
        scope = plain
    return "/".join(filter(None, scope.split("/")))


def computation_order(attention: str) -> tuple[bool, list[str], bool]:
    """A sort key: encoder before decoder, layer by layer, self before cross attention."""
    numbers = [number.zfill(4) for number in re.findall(r"\d+", attention)]
    return (not attention.startswith("encoder"), numbers, "cross_attention" in attention)
