"""A JAX primitive that calls a function, with a derivative and a transpose that the caller gives.

`jax.custom_jvp` gives a function a derivative, too, but partial evaluation of a loop loses it, and
it cannot be transposed. Here the rules are parameters of the primitive, so that no transformation
loses them.

- `traced_call` is a function with its own derivative.
- `linear_map` is a linear function with its own transpose. Forward mode evaluates the map, and
  reverse mode transposes it. (`jax.custom_derivatives.linear_call` is the same idea, without
  batching and without derivatives with respect to the residuals.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

Leaves = Sequence[Any]
Function = Callable[[list[Any], list[Any]], list[Any]]


def traced_call(
    function: Callable[..., Any],
    leaves: list[Any],
    jvp: Callable[[list[Any], list[Any]], tuple[Any, list[Any]]],
) -> tuple[Any, core.Jaxpr]:
    """(`function(*leaves)`, its program), with a rule for the tangent.

    Args:
        function: takes arrays; returns a pytree of arrays.
        leaves: the arrays.
        jvp: (leaves, their tangents) -> (the result, tangents of its leaves). A tangent is None
            where an array is not perturbed.

    Raises:
        ValueError: the function closes over a traced value.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*leaves)
    program, consts = closed.jaxpr, closed.consts
    if any(isinstance(const, jax.core.Tracer) for const in consts):
        raise ValueError(
            "a function of a custom_vjp must not close over a traced value: pass it as an argument"
        )

    def jvp_of_leaves(leaves, tangents):
        result, dresult = jvp(leaves, tangents)
        return jax.tree.leaves(result), dresult

    outputs = call_p.bind(
        *leaves,
        function=lambda *leaves: jax.core.eval_jaxpr(program, consts, *leaves),
        jvp=jvp_of_leaves,
        transpose=None,
        linear=0,
        types=tuple(variable.aval for variable in program.outvars),
        effect_types=frozenset(program.effects),
        shown=program,
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), outputs), program


def linear_map(
    evaluate: Function,
    transpose: Function,
    residuals: list[Any],
    inputs: list[Any],
    types: Leaves,
    shown: core.Jaxpr,
) -> list[Any]:
    """`evaluate(residuals, inputs)`; reverse mode transposes it by `transpose`.

    Args:
        evaluate: (residuals, inputs) -> outputs, linear in the inputs. JAX differentiates it with
            respect to the residuals.
        transpose: (residuals, cotangents of the outputs) -> cotangents of the inputs; linear in
            the cotangents. JAX differentiates it with respect to the residuals.
        residuals: arrays of any dtype.
        inputs: floating-point arrays.
        types: the types of the outputs.
        shown: a program that is never run. JAX looks into it for primitives that need the devices
            while they are lowered (cuDNN's), because it cannot find these inside of functions.
    """
    count = len(residuals)
    input_types = [jax.typeof(leaf).to_tangent_aval() for leaf in inputs]

    def jvp(operands, tangents):
        residuals, inputs = operands[:count], operands[count:]
        dresiduals, dinputs = tangents[:count], tangents[count:]
        outputs = linear_map(evaluate, transpose, residuals, inputs, types, shown)
        doutputs = [None] * len(outputs)
        if any(tangent is not None for tangent in dinputs):
            filled = [
                ad.instantiate_zeros(ad.Zero(input_type)) if tangent is None else tangent
                for tangent, input_type in zip(dinputs, input_types, strict=True)
            ]
            doutputs = linear_map(evaluate, transpose, residuals, filled, types, shown)
        perturbed = [i for i, tangent in enumerate(dresiduals) if tangent is not None]
        if perturbed:
            of_perturbed = function_of(
                lambda *residuals: evaluate(list(residuals), inputs), residuals, perturbed
            )
            by_residuals = jax.jvp(
                of_perturbed,
                [residuals[i] for i in perturbed],
                [dresiduals[i] for i in perturbed],
            )[1]
            pairs = zip(doutputs, by_residuals, strict=True)
            doutputs = [other if one is None else one + other for one, other in pairs]
        return outputs, doutputs

    def transposed(residuals, cotangents):
        return linear_map(transpose, evaluate, residuals, cotangents, input_types, shown)

    return call_p.bind(
        *residuals,
        *inputs,
        function=lambda *operands: evaluate(list(operands[:count]), list(operands[count:])),
        jvp=jvp,
        transpose=transposed,
        linear=len(inputs),
        types=tuple(types),
        effect_types=frozenset(),
        shown=shown,
    )


def function_of(
    function: Callable[..., Any], leaves: Leaves, indices: Sequence[int]
) -> Callable[..., Any]:
    """The function of the leaves with these indices; the others keep their values."""

    def of_some(*some: Any) -> Any:
        replacements = dict(zip(indices, some, strict=True))
        return function(*(replacements.get(i, leaf) for i, leaf in enumerate(leaves)))

    return of_some


# Parameters:
#     function: operands -> a list of outputs
#     jvp: (operands, tangents) -> (outputs, tangents); None for a tangent that is 0
#     transpose: (operands that are not linear, cotangents) -> cotangents of the others; or None
#     linear: the number of the last operands in which the function is linear
#     types, effect_types: those of the outputs, and of the side effects
#     shown: see `linear_map`
call_p = core.Primitive("custom_vjp_call")
call_p.multiple_results = True


def _call(*operands, function, **_):
    return function(*operands)


def _jvp(primals, tangents, *, jvp, types, **_):
    outputs, doutputs = jvp(_as_arrays(primals), list(map(_or_none, tangents)))
    return outputs, [
        ad.Zero(jax.typeof(output).to_tangent_aval()) if doutput is None else doutput
        for output, doutput in zip(outputs, doutputs, strict=True)
    ]


def _transpose(cotangents, *operands, transpose, linear, **_):
    if transpose is None:
        raise NotImplementedError(
            "a custom_vjp function has no linear_transpose: transpose its jax.linearize, or use"
            " jax.vjp"
        )
    count = len(operands) - linear
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    results = transpose(_as_arrays(operands[:count]), cotangents)
    return [None] * count + [
        result if ad.is_undefined_primal(operand) else None
        for operand, result in zip(operands[count:], results, strict=True)
    ]


def _batch(axis, operands, axes, **params):
    """All outputs and all linear operands get a batch axis at the front."""
    size, name, mesh_axis = axis.size, axis.name, axis.explicit_mesh_axis
    name = name if isinstance(name, str) else None  # JAX's "no name" is another object
    if name is None and all(dim is None for dim in axes):
        outputs = call_p.bind(*operands, **params)
        return outputs, [None] * len(outputs)
    jvp, transpose, count = params["jvp"], params["transpose"], len(operands) - params["linear"]
    linear = [
        batching.bdim_at_front(operand, dim, size, mesh_axis)
        for operand, dim in zip(operands[count:], axes[count:], strict=True)
    ]
    axes = [*axes[:count], *[0] * len(linear)]

    def batched(rule, in_axes):
        return jax.vmap(
            rule, in_axes=in_axes, axis_size=size, axis_name=name, spmd_axis_name=axis.spmd_name
        )

    def batched_jvp(operands, tangents):
        pairs = zip(tangents, axes, strict=True)
        tangent_axes = [None if tangent is None else dim for tangent, dim in pairs]
        return batched(jvp, (axes, tangent_axes))(operands, tangents)

    params |= {
        "function": batched(params["function"], tuple(axes)),
        "jvp": batched_jvp,
        "transpose": transpose and batched(transpose, (axes[:count], 0)),
        "types": tuple(core.unmapped_aval(size, 0, each, mesh_axis) for each in params["types"]),
    }
    outputs = call_p.bind(*operands[:count], *linear, **params)
    return outputs, [0] * len(outputs)


def _or_none(tangent: Any) -> Any:
    """The tangent, or None if it is a symbolic zero or that of an integer or key."""
    is_zero = type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0
    return None if is_zero else tangent


def _as_arrays(leaves: Leaves) -> list[Any]:
    """Converts literals to arrays: inside of `jit`, JAX passes small constants as literals."""
    return [leaf if hasattr(leaf, "ndim") else jnp.asarray(leaf) for leaf in leaves]


call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(
    lambda *_, types, effect_types, **__: (list(types), set(effect_types))
)
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=True))
ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
batching.fancy_primitive_batchers[call_p] = _batch
