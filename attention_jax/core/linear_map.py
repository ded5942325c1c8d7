"""Two JAX primitives: a linear map with its own transpose, and a call with its own rules.

Forward mode evaluates a linear map, and reverse mode transposes it. A JAX primitive can define its
transpose, so that a map given by two functions, itself and its transpose, has both modes. Its
transpose is the same primitive with the two functions exchanged.

`jax.custom_derivatives.linear_call` is the same idea, without batching and without derivatives with
respect to the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify  # the public module cannot add a primitive
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attention_jax.core.partial_jvp import partial_jvp

Leaves = Sequence[Any]


def linear_map(
    evaluate: Callable[[Any, list[Any]], list[Any]],
    transpose: Callable[[Any, list[Any]], list[Any]],
    residuals: Any,
    inputs: list[Any],
    like: list[Any],
    shown: tuple[Any, ...] = (),
) -> list[Any]:
    """`evaluate(residuals, inputs)`; reverse mode transposes it by `transpose`.

    Args:
        evaluate: (residuals, inputs) -> outputs, linear in the inputs. JAX differentiates it with
            respect to the residuals.
        transpose: (residuals, cotangents of the outputs) -> cotangents of the inputs; linear in
            the cotangents. JAX differentiates it with respect to the residuals.
        residuals: a pytree of arrays, of any dtype.
        inputs: floating-point arrays.
        like: arrays whose tangents have the types of the outputs.
        shown: programs (jaxprs) that are never run. JAX looks into them for primitives that need
            the devices while they are lowered, which it cannot find inside of functions.
    """
    leaves, structure = jax.tree.flatten(residuals)

    def on_leaves(function):
        return lambda leaves, inputs: function(
            jax.tree.unflatten(structure, _as_arrays(leaves)), inputs
        )

    return linear_map_p.bind(
        *leaves,
        *inputs,
        evaluate=on_leaves(evaluate),
        transpose=on_leaves(transpose),
        count=len(leaves),
        types=tuple(jax.typeof(leaf).to_tangent_aval() for leaf in like),
        shown=shown,
    )


def _or_none(tangent: Any) -> Any:
    """The tangent, or None if it is a symbolic zero or that of an integer or key."""
    is_zero = type(tangent) is ad.Zero or getattr(tangent, "dtype", None) == jax.dtypes.float0
    return None if is_zero else tangent


def _as_arrays(leaves: Leaves) -> list[Any]:
    """Converts literals to arrays: inside of `jit`, JAX passes small constants as literals."""
    return [leaf if hasattr(leaf, "ndim") else jnp.asarray(leaf) for leaf in leaves]


# Operands: `count` residuals, then the inputs. `types`: the types of the outputs.
linear_map_p = core.Primitive("linear_map")
linear_map_p.multiple_results = True


def _evaluate(*operands, evaluate, count, **_):
    return evaluate(list(operands[:count]), list(operands[count:]))


def _jvp(primals, tangents, **params):
    evaluate, count, types = (params[name] for name in ("evaluate", "count", "types"))
    outputs = linear_map_p.bind(*primals, **params)
    doutputs = [ad.Zero(output_type) for output_type in types]
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        inputs = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
        doutputs = linear_map_p.bind(*primals[:count], *inputs, **params)
    # Plain JAX differentiates with respect to the residuals.
    dresiduals = tuple(map(_or_none, tangents[:count]))
    if any(tangent is not None for tangent in dresiduals):
        _, by_residuals = partial_jvp(
            lambda *residuals: evaluate(list(residuals), list(primals[count:])),
            tuple(primals[:count]),
            dresiduals,
        )
        doutputs = list(map(ad.add_tangents, doutputs, by_residuals))
    return outputs, doutputs


def _transpose(cotangents, *operands, evaluate, transpose, count, types, shown):
    del types
    residuals, inputs = operands[:count], operands[count:]
    cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    results = linear_map_p.bind(
        *residuals,
        *cotangents,
        evaluate=transpose,
        transpose=evaluate,
        count=count,
        types=tuple(_type_of(leaf).to_tangent_aval() for leaf in inputs),
        shown=shown,
    )
    return [None] * count + [
        result if ad.is_undefined_primal(leaf) else None
        for leaf, result in zip(inputs, results, strict=True)
    ]


def _type_of(operand: Any) -> Any:
    return operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand)


def _batch(axis, operands, axes, **params):
    """Residuals keep their batch axes; all inputs get a batch axis at the front."""
    count, types = params["count"], params["types"]
    if _is_shared(axis, axes):
        outputs = linear_map_p.bind(*operands, **params)
        return outputs, [None] * len(outputs)
    size, mesh_axis = axis.size, axis.explicit_mesh_axis
    inputs = [
        batching.bdim_at_front(leaf, dim, size, mesh_axis)
        for leaf, dim in zip(operands[count:], axes[count:], strict=True)
    ]
    residual_axes = list(axes[:count])

    def batched(function):
        return _vmapped(function, axis, (residual_axes, 0))

    outputs = linear_map_p.bind(
        *operands[:count],
        *inputs,
        evaluate=batched(params["evaluate"]),
        transpose=batched(params["transpose"]),
        count=count,
        types=tuple(core.unmapped_aval(size, 0, output_type, mesh_axis) for output_type in types),
        shown=params["shown"],
    )
    return outputs, [0] * len(outputs)


def _vmapped(function: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    """`jax.vmap` over the axis of a batching rule."""
    name = axis.name if isinstance(axis.name, str) else None  # JAX's "no name" is another object
    return jax.vmap(
        function,
        in_axes=in_axes,
        axis_size=axis.size,
        axis_name=name,
        spmd_axis_name=axis.spmd_name,
    )


linear_map_p.def_impl(_evaluate)
linear_map_p.def_abstract_eval(lambda *operands, types, **_: types)
mlir.register_lowering(linear_map_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.fancy_primitive_batchers[linear_map_p] = _batch


# --- a call with its own rules ---


def call_with_rules(
    function: Callable[..., Any],
    jvp: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
    arrays: tuple[Any, ...],
    transpose: Callable[..., list[Any]] | None = None,
    *,
    has_residuals: bool = False,
) -> Any:
    """`function(*arrays)`, with a rule for its tangent and a rule for `jax.linear_transpose`.

    The rules belong to the call itself, so that no transformation of JAX can lose them. (Partial
    evaluation of a loop drops the rules of `jax.custom_jvp`.) Under `vmap` all results are batched
    along their first axis.

    Args:
        function: takes pytrees of arrays; returns a pytree of arrays.
        jvp: (arrays, tangents of their leaves) -> (the result, tangents of its leaves). A tangent
            is None where an array is not perturbed.
        arrays: the arguments.
        transpose: (indices of some leaves, arrays, cotangents of the result) -> the cotangents of
            these leaves, for a function that is linear in them jointly; None if there is no rule.
        has_residuals: whether the result is (result, residuals). A residual that is an argument
            is then returned as the argument itself, so that `vmap` need not batch it.
    """
    leaves, structure = jax.tree.flatten(arrays)
    program, shapes = jax.make_jaxpr(
        lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
    )(*leaves)
    if any(isinstance(const, jax.core.Tracer) for const in program.consts):
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"{name} of a custom_vjp must not close over a traced value: pass it as an argument"
        )
    result_structure = jax.tree.structure(shapes)

    def jvp_of_leaves(leaves, tangents):
        result, tangents = jvp(jax.tree.unflatten(structure, _as_arrays(leaves)), tangents)
        return jax.tree.leaves(result), tangents

    def transpose_of_leaves(indices, leaves, cotangents):
        if transpose is None:
            raise NotImplementedError(
                "jax.linear_transpose of a custom_vjp function that is differentiated with respect"
                " to other arguments at the same time: transpose first, then differentiate"
            )
        cotangents = jax.tree.unflatten(result_structure, cotangents)
        return transpose(indices, jax.tree.unflatten(structure, _as_arrays(leaves)), cotangents)

    outputs: list[Any] = call_p.bind(
        *program.consts,
        *leaves,
        program=program.jaxpr,
        jvp=jvp_of_leaves,
        transpose=transpose_of_leaves,
        count=len(program.consts),
    )
    if has_residuals:
        argument_of = dict(zip(program.jaxpr.invars, leaves, strict=True))
        first = len(jax.tree.leaves(shapes[0]))
        for index, variable in enumerate(program.jaxpr.outvars[first:], start=first):
            if not isinstance(variable, core.Literal):
                outputs[index] = argument_of.get(variable, outputs[index])
    return jax.tree.unflatten(result_structure, outputs)


# Operands: `count` constants of the program, then its arguments.
call_p = core.Primitive("custom_vjp_call")
call_p.multiple_results = True


def _call(*operands, program, count, **_):
    return jax.core.eval_jaxpr(program, operands[:count], *operands[count:])


def _call_types(*operands, program, **_):
    return [variable.aval for variable in program.outvars], program.effects


def _call_jvp(primals, tangents, *, jvp, count, **_):
    outputs, doutputs = jvp(list(primals[count:]), list(map(_or_none, tangents[count:])))
    return outputs, [
        ad.Zero(jax.typeof(output).to_tangent_aval()) if doutput is None else doutput
        for output, doutput in zip(outputs, doutputs, strict=True)
    ]


def _call_transpose(cotangents, *operands, program, transpose, count, **_):
    linear = [i for i, leaf in enumerate(operands) if ad.is_undefined_primal(leaf)]
    known = [leaf for leaf in operands if not ad.is_undefined_primal(leaf)]
    linear_types = [operands[index].aval for index in linear]

    def all_operands(known, inputs):
        known, inputs = iter(known), iter(inputs)
        return [next(inputs if i in linear else known) for i in range(len(operands))]

    def evaluate(known, inputs):
        return _call(*all_operands(known, inputs), program=program, count=count)

    def evaluate_transpose(known, cotangents):
        zeros = [ad.instantiate_zeros(ad.Zero(linear_type)) for linear_type in linear_types]
        leaves = all_operands(known, zeros)[count:]
        return transpose(tuple(index - count for index in linear), leaves, cotangents)

    results = linear_map_p.bind(
        *known,
        *(ad.instantiate_zeros(cotangent) for cotangent in cotangents),
        evaluate=evaluate_transpose,
        transpose=evaluate,
        count=len(known),
        types=tuple(linear_type.to_tangent_aval() for linear_type in linear_types),
        shown=(program,),
    )
    cotangent_of = dict(zip(linear, results, strict=True))
    return [cotangent_of.get(index) for index in range(len(operands))]


def _call_batch(axis, operands, axes, *, program, jvp, transpose, count):
    if _is_shared(axis, axes):
        params = {"program": program, "jvp": jvp, "transpose": transpose, "count": count}
        outputs = call_p.bind(*operands, **params)
        return outputs, [None] * len(outputs)
    leaf_axes = list(axes[count:])

    def function(*operands):
        return _call(*operands, program=program, count=count)

    # The operands of the batched program are its own constants, then all operands of this one:
    # its rules skip the first `count` of these, and shift indices accordingly.

    def batched_jvp(operands, tangents):
        leaves, tangents = operands[count:], tangents[count:]
        tangent_axes = [
            None if tangent is None else dim
            for tangent, dim in zip(tangents, leaf_axes, strict=True)
        ]
        return _vmapped(jvp, axis, (leaf_axes, tangent_axes))(leaves, tangents)

    def batched_transpose(indices, operands, cotangents):
        rule = functools.partial(transpose, tuple(index - count for index in indices))
        return _vmapped(rule, axis, (leaf_axes, 0))(operands[count:], cotangents)

    batched = jax.make_jaxpr(_vmapped(function, axis, tuple(axes)))(*operands)
    outputs = call_p.bind(
        *batched.consts,
        *operands,
        program=batched.jaxpr,
        jvp=batched_jvp,
        transpose=batched_transpose,
        count=len(batched.consts),
    )
    return outputs, [0] * len(outputs)


def _is_shared(axis: Any, axes: Any) -> bool:
    """Whether no operand is batched and the function cannot read its index along the axis."""
    return all(dim is None for dim in axes) and not isinstance(axis.name, str)


call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(_call_types)
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=True))
ad.primitive_jvps[call_p] = _call_jvp
ad.primitive_transposes[call_p] = _call_transpose
batching.fancy_primitive_batchers[call_p] = _call_batch


# --- checkify: its checks inside of both primitives ---


def _checked(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*arguments, **params):
        # (error, enabled errors, *operands); newer versions of JAX add a context in front.
        index = next(
            i for i, argument in enumerate(arguments) if isinstance(argument, set | frozenset)
        )
        *context, error = arguments[:index]
        enabled_errors, operands = arguments[index], arguments[index + 1 :]
        program = jax.make_jaxpr(lambda *operands: evaluate(*operands, **params))(*operands)
        return checkify.checkify_jaxpr(*context, program, enabled_errors, error, *operands)

    return rule


checkify.error_checks[call_p] = _checked(_call)
checkify.error_checks[linear_map_p] = _checked(_evaluate)
