"""Every attention in a model, seen in one call: weights, logits, statistics, and their gradients.

The model is traced once with a point at each attention (`functional.capture_point`), and the
program evaluated so that what is seen there comes out as values that it returns. So nothing has to
be stored in the model and nothing can leak, whatever `jit`, `vmap`, `scan` or `checkpoint` is in
it or around the capture.
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
from attention_jax.analysis.interpretation import Found, evaluate
from attention_jax.analysis.softmax_gradients import softmax_vjp
from attention_jax.core.arrays import float_array
from attention_jax.core.explicit_axes import explicit_spec, on_automatic_axes
from attention_jax.functional.capture_point import CapturedAttention, capture_points

Array = jax.Array


class Captured(NamedTuple):
    """What a function gave, and every attention in it by name.

    The names are in the order of computation, which a `jit` around the capture changes to that of
    the alphabet, as of every dict.
    """

    output: Any
    attentions: dict[str, CapturedAttention]


class OutputGradient(NamedTuple):
    """How a loss's gradient comes back to one attention's weights; axes as in its capture."""

    doutput: Array  # [*B, T, Dv]
    dweights: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax
    dlogits: Array | None  # [*B, T, S], 0 where masked; None if there is no softmax


class CapturedGradients(NamedTuple):
    """A loss, its gradient, and every attention in it with what of the gradient reaches it."""

    loss: Array
    auxiliary: Any
    dparams: Any
    attentions: dict[str, CapturedAttention]
    gradients: dict[str, OutputGradient]


def capture(
    function: Callable[..., Any], /, *args: Any, matrices: bool = True, **kwargs: Any
) -> Captured:
    """Calls a function or Flax module, and gives with its output all attention in it.

    Seen is all that goes through `attention_jax.attention`, in whatever module: this library's,
    yours, `flax.nnx.MultiHeadAttention` through `interop.flax_attention_fn`; local attention,
    coverage and monotonic attention too. A name is the `jax.named_scope` that the attention stands
    in, such as "decoder_0/cross_attention", or "attention" where there is none; from the second of
    a name on, "#2", "#3" follow.

    Arrays have the batch axes of the call, heads being one axis in front of the positions. In front
    of them stand the axes of each `scan`, and then of each `vmap`, that the call is inside of in
    the function, those of the outer before those of the inner. Local
    attention with a Gaussian is seen before the Gaussian takes weight away: its rows sum to 1.
    Coverage and monotonic attention have no softmax over all keys, and so no logits here.

    The function may take gradients inside, of any order and in any mode; each call of attention is
    seen once, as it was computed. A module that Flax transforms inside (`nnx.grad`) has to be an
    argument, as under `jax.jit`.

    It may be inside a `jit`, `vmap` or `grad`, and what it gives is differentiable. Outside a `jit`
    it traces at every call: to call it often, jit what calls it.

    Args:
        function: what to call, pure; of a `flax.nnx.Module` a copy is called, whose changes (of
            a random stream, say) are lost.
        args: its arguments; of each `flax.nnx.Module` among them a copy is given.
        matrices: whether to make logits, weights and masks, which take memory T S a head. Without,
            statistics remain, in the memory of whatever implementation computes them.
        kwargs: its keyword arguments.

    Returns:
        `Captured`.

    Raises:
        ValueError: there is nothing to call, or there is no attention in it.
        NotImplementedError: attention is inside a `while_loop`, a `cond` or the like.

    >>> from attention_jax import nn
    >>> attend = nn.Attention("additive", 4, 4, rngs=nnx.Rngs(0))
    >>> output, attentions = capture(attend, jnp.ones((2, 3, 4)), jnp.ones((2, 5, 4)))
    >>> attentions["attention"].weights.shape
    (2, 3, 5)
    """
    call = _as_function(_checked_function("function", function))
    program, structure = _traced(_on_copies(call, args, kwargs), matrices)
    outputs, found = evaluate(program, [])
    _check_found("function", found)
    return Captured(jax.tree.unflatten(structure, outputs), _named(found))


def capture_gradients(
    loss: Callable[..., Any], params: Any, /, *args: Any, matrices: bool = True, **kwargs: Any
) -> CapturedGradients:
    """A loss and its gradient, and how the gradient comes to the weights of each attention in it.

        doutput = d loss / d output,  dweights = doutput value^T,
        dlogits_ij = weights_ij (dweights_ij - sum_k weights_ik dweights_ik)

    of every call of attention, as `attention_gradients` has it of one. With dropout, dweights and
    dlogits are those of the weights as if none had been dropped. With a Gaussian (local-p), dlogits
    lacks what comes through the weight that the Gaussian takes away. Inside a function with a
    gradient rule of its own, `jax.custom_vjp`, parameters get what the rule says, and the attention
    what the function as it is computed would send it.

    Args:
        loss: params, *args -> float [], or (float [], auxiliary arrays).
        params: a pytree of float arrays.
        args: further arguments.
        matrices: as in `capture`; without, only `doutput` is given.
        kwargs: keyword arguments.

    Returns:
        `CapturedGradients`; `auxiliary` is None if the loss gives none.

    Raises:
        NotImplementedError: as in `capture`.
        ValueError: the loss is not one float, a parameter is not floating-point, or there is no
            attention in the loss.

    >>> from attention_jax import attention
    >>> def loss(query):
    ...     return attention(query, jnp.eye(2), jnp.eye(2), score="dot")[0, 0]
    >>> found = capture_gradients(loss, jnp.zeros((1, 2)))
    >>> found.gradients["attention"].dlogits.tolist(), found.dparams.tolist()
    ([[0.25, -0.25]], [[0.25, -0.25]])

    Source: Dao et al. 2022, appendix B.2, for the formulas.
    """
    call = _as_function(_checked_function("loss", loss))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        float_array(f"params {jax.tree_util.keystr(path, simple=True, separator='/')}", leaf)
    program, structure = _traced(_on_copies(call, args, kwargs), matrices, params)

    names: list[str] = []

    def evaluated(params: Any, added: list[Array] | None) -> Any:
        outputs, found = evaluate(program, jax.tree.leaves(params), added)
        value, auxiliary = _loss_and_auxiliary(jax.tree.unflatten(structure, outputs))
        _check_found("loss", found)
        named = _named(found)
        names[:] = named
        # A list, since JAX would sort a dict.
        return value, (auxiliary, list(named.values()))

    # Zeros added to each output: their gradients are the outputs'.
    _, (_, shapes) = jax.eval_shape(lambda params: evaluated(params, None), params)
    zeros = [
        jnp.zeros(seen.output.shape, seen.output.dtype, out_sharding=seen.output.sharding)
        for seen in shapes
    ]
    gradient = jax.value_and_grad(evaluated, argnums=(0, 1), has_aux=True)
    (value, (auxiliary, seen)), (dparams, doutputs) = gradient(params, zeros)
    gradients = map(_output_gradient, seen, doutputs)
    return CapturedGradients(
        value,
        auxiliary,
        dparams,
        attentions=dict(zip(names, seen, strict=True)),
        gradients=dict(zip(names, gradients, strict=True)),
    )


def _output_gradient(seen: CapturedAttention, doutput: Array) -> OutputGradient:
    if seen.logits is None or seen.weights is None or seen.mask is None:
        return OutputGradient(doutput, None, None)

    def of_weights(value: Array, mask: Array, weights: Array, doutput: Array) -> Any:
        dweights = gradient_of_weights(value, mask, doutput, weights.dtype)
        return dweights, softmax_vjp(weights, dweights)

    spec = explicit_spec(doutput)[:-1]
    seen_arrays = seen.value, seen.mask, seen.weights, doutput
    return OutputGradient(
        doutput, *on_automatic_axes(of_weights, PartitionSpec(*spec), *seen_arrays)
    )


# --- tracing, and naming what was found ---


def _checked_function(name: str, function: Any) -> Callable[..., Any]:
    if not callable(function) or isinstance(function, type):
        what = f"the class {function.__name__}" if isinstance(function, type) else repr(function)
        raise ValueError(f"{name} must be a function, or a module that has been made; got {what}")
    return function


def _as_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A module, or a method of one, as a function that changes nothing outside of it."""
    module = getattr(function, "__self__", function)
    if not isinstance(module, nnx.Module):
        return function
    definition, state = nnx.split(module)
    name = "__call__" if module is function else function.__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        # A copy made while tracing, or Flax would not let random streams go on in it.
        return getattr(nnx.merge(definition, state, copy=True), name)(*args, **kwargs)

    return call


def _on_copies(
    call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[..., Any]:
    """`call` of what comes and then of these arguments, modules among them copied when traced."""

    def is_module(value: Any) -> bool:
        return isinstance(value, nnx.Module)

    leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=is_module)
    split = {id(leaf): nnx.split(leaf) for leaf in leaves if is_module(leaf)}

    def on_copies(*first: Any) -> Any:
        copies = {name: nnx.merge(*parts, copy=True) for name, parts in split.items()}
        own_args, own_kwargs = jax.tree.unflatten(
            structure, [copies.get(id(leaf), leaf) for leaf in leaves]
        )
        return call(*first, *own_args, **own_kwargs)

    return on_copies


def _check_found(name: str, found: Found) -> None:
    if found:
        return
    raise ValueError(
        f"{name} must call attention that can be seen: attention_jax.attention, local_attention,"
        " coverage_attention or monotonic_attention, a module of attention_jax.nn, or"
        " attention_jax.interop in a model of another library; found none (attention_weights and"
        " ring_attention are not seen)"
    )


def _traced(
    function: Callable[..., Any], matrices: bool, *args: Any
) -> tuple[ClosedJaxpr, jax.tree_util.PyTreeDef]:
    """The program with its points, and the structure of what it gives."""
    with capture_points(matrices):
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return program, jax.tree.structure(shapes)


def _named(found: Found) -> dict[str, CapturedAttention]:
    named: dict[str, CapturedAttention] = {}
    counts: collections.Counter[str] = collections.Counter()
    for scope, seen in found:
        name = _without_transformations(scope) or "attention"
        counts[name] += 1
        named[name if counts[name] == 1 else f"{name}#{counts[name]}"] = seen
    return named


def _without_transformations(scope: str) -> str:
    """Without what JAX writes around a scope: `vmap(decoder_0)/x` as `decoder_0/x`."""
    while (plain := re.sub(r"\w+\(([^()]*)\)", r"\1", scope)) != scope:
        scope = plain
    return "/".join(filter(None, scope.split("/")))


def _loss_and_auxiliary(given: Any) -> tuple[Array, Any]:
    pair = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    value = pair[0]
    if not hasattr(value, "dtype"):
        kind = f"a {type(given).__name__}"
    elif value.shape == () and jnp.issubdtype(value.dtype, jnp.floating):
        return pair
    else:
        kind = f"{value.dtype} {list(value.shape)}"
    raise ValueError(f"loss must give one float, or (one float, auxiliary arrays); got {kind}")
