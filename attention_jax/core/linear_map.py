"""A linear map that carries its own transpose, and a call that carries its own rules.

Forward mode evaluates a linear map, and reverse mode transposes it. A JAX primitive may say how it
is transposed, so that a map given as a pair of functions, itself and its transpose, has both modes.
The transpose is such a map again, with the pair exchanged.

`jax.custom_derivatives.linear_call` is the same idea, without batching and without derivatives with
respect to the residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify  # the public module has no way to add a primitive
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attention_jax.core.jvp_of_moving import jvp_of_moving

Leaves = Sequence[Any]


def linear_map(
    evaluate: Callable[[Any, list[Any]], list[Any]],
    transpose: Callable[[Any, list[Any]], list[Any]],
    residuals: Any,
    inputs: list[Any],
    like: list[Any],
) -> list[Any]:
    """evaluate(residuals, inputs), which reverse mode transposes by `transpose`.

    Args:
        evaluate: (residuals, inputs) -> outputs, linear in the inputs. JAX differentiates it with
            respect to the residuals.
        transpose: (residuals, cotangents of the outputs) -> cotangents of the inputs; linear in
            the cotangents, and differentiated likewise.
        residuals: a pytree of arrays, of any dtype.
        inputs: floating-point arrays.
        like: arrays whose tangents have the types of the outputs.
    """
    leaves, structure = jax.tree.flatten(residuals)

    def on_leaves(function):
        def of_leaves(leaves, inputs):
            return function(jax.tree.unflatten(structure, _as_arrays(leaves)), inputs)

        return of_leaves

    return linear_map_p.bind(
        *leaves,
        *inputs,
        evaluate=on_leaves(evaluate),
        transpose=on_leaves(transpose),
        count=len(leaves),
        types=tuple(jax.typeof(leaf).to_tangent_aval() for leaf in like),
    )


def _moves(tangent: Any) -> bool:
    """Whether it is a tangent that may differ from 0; a Python number is one."""
    return type(tangent) is not ad.Zero and getattr(tangent, "dtype", None) != jax.dtypes.float0


def _as_arrays(leaves: Leaves) -> list[Any]:
    """Inside of `jit`, JAX hands over small constants as literals, which are no arrays."""
    return [leaf if hasattr(leaf, "ndim") else jnp.asarray(leaf) for leaf in leaves]


# Operands: `count` residuals, then the inputs. `types` are those of the outputs.
linear_map_p = core.Primitive("linear_map")
linear_map_p.multiple_results = True


def _evaluate(*operands, evaluate, transpose, count, types):
    del transpose, types
    return evaluate(list(operands[:count]), list(operands[count:]))


def _jvp(primals, tangents, *, evaluate, transpose, count, types):
    params = {"evaluate": evaluate, "transpose": transpose, "count": count, "types": types}
    outputs = linear_map_p.bind(*primals, **params)
    moved = [ad.Zero(kind) for kind in types]
    if any(type(tangent) is not ad.Zero for tangent in tangents[count:]):
        inputs = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
        moved = linear_map_p.bind(*primals[:count], *inputs, **params)
    # In the residuals: plain JAX, of those that have a tangent (integers and keys have none).
    if any(map(_moves, tangents[:count])):
        _, others = jvp_of_moving(
            lambda *residuals: evaluate(list(residuals), list(primals[count:])),
            tuple(primals[:count]),
            tuple(tangent if _moves(tangent) else None for tangent in tangents[:count]),
        )
        moved = list(map(ad.add_tangents, moved, others))
    return outputs, moved


def _transpose(cotangents, *operands, evaluate, transpose, count, types):
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
    )
    wanted = [ad.is_undefined_primal(leaf) for leaf in inputs]
    return [None] * count + [
        leaf if undefined else None for leaf, undefined in zip(results, wanted, strict=True)
    ]


def _type_of(operand: Any) -> Any:
    return operand.aval if ad.is_undefined_primal(operand) else jax.typeof(operand)


def _batch(axis, operands, axes, *, evaluate, transpose, count, types):
    """Residuals keep the axes they have; the inputs are batched all together."""
    params = {"evaluate": evaluate, "transpose": transpose, "count": count, "types": types}
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
        evaluate=batched(evaluate),
        transpose=batched(transpose),
        count=count,
        types=tuple(core.unmapped_aval(size, 0, kind, mesh_axis) for kind in types),
    )
    return outputs, [0] * len(outputs)


def _vmapped(function: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    """`jax.vmap` over the axis that a batching rule was given."""
    name = axis.name if isinstance(axis.name, str) else None  # JAX's "no name" is an object
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


# --- a call with rules of its own ---


def call_with_rules(
    function: Callable[..., Any],
    push: Callable[[Any, list[Any]], tuple[Any, list[Any]]],
    arrays: tuple[Any, ...],
    pull_back: Callable[..., list[Any]] | None = None,
    *,
    has_residuals: bool = False,
) -> Any:
    """function(*arrays), with a rule for its tangent and one for `jax.linear_transpose`.

    The rules belong to the call itself, so that no transformation of JAX can lose them. (Partial
    evaluation of a loop drops those of `jax.custom_jvp`.) Under `vmap` all results are batched
    along their first axis.

    Args:
        function: of pytrees of arrays, to a pytree of arrays.
        push: (arrays, tangents of their leaves) -> (the result, tangents of its leaves). A tangent
            of None is that of an array that does not move.
        arrays: the arguments.
        pull_back: (numbers of some leaves, arrays, cotangents of the result) -> the cotangents of
            these leaves, where the function is linear in them together; None if there is no rule.
        has_residuals: whether the result is (result, residuals). A residual that is one of the
            arguments then stays what it is, so that `vmap` need not batch it.
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

    def push_leaves(leaves, tangents):
        result, tangents = push(jax.tree.unflatten(structure, _as_arrays(leaves)), tangents)
        return jax.tree.leaves(result), tangents

    def pull_back_leaves(indices, leaves, cotangents):
        if pull_back is None:
            raise NotImplementedError(
                "jax.linear_transpose of a custom_vjp function that is differentiated with respect"
                " to other arguments at the same time: transpose first, and differentiate that"
            )
        cotangents = jax.tree.unflatten(result_structure, cotangents)
        return pull_back(indices, jax.tree.unflatten(structure, _as_arrays(leaves)), cotangents)

    outputs: list[Any] = call_p.bind(
        *program.consts,
        *leaves,
        program=program.jaxpr,
        push=push_leaves,
        pull_back=pull_back_leaves,
        count=len(program.consts),
    )
    if has_residuals:
        given = dict(zip(program.jaxpr.invars, leaves, strict=True))
        first = len(jax.tree.leaves(shapes[0]))
        for index, variable in enumerate(program.jaxpr.outvars[first:], start=first):
            if not isinstance(variable, core.Literal):
                outputs[index] = given.get(variable, outputs[index])
    return jax.tree.unflatten(result_structure, outputs)


# Operands: `count` constants of the program, then its arguments.
call_p = core.Primitive("custom_vjp_call")
call_p.multiple_results = True


def _call(*operands, program, count, **_):
    return jax.core.eval_jaxpr(program, operands[:count], *operands[count:])


def _call_types(*operands, program, **_):
    return [variable.aval for variable in program.outvars], program.effects


def _call_jvp(primals, tangents, *, push, count, **_):
    tangents = [tangent if _moves(tangent) else None for tangent in tangents[count:]]
    outputs, moved = push(list(primals[count:]), tangents)
    zeros = (ad.Zero(jax.typeof(leaf).to_tangent_aval()) for leaf in outputs)
    return outputs, [
        zero if tangent is None else tangent for zero, tangent in zip(zeros, moved, strict=True)
    ]


def _call_transpose(cotangents, *operands, program, pull_back, count, **_):
    undefined = [i for i, leaf in enumerate(operands) if ad.is_undefined_primal(leaf)]
    known = [leaf for leaf in operands if not ad.is_undefined_primal(leaf)]
    kinds = [operands[index].aval for index in undefined]

    def filled(known, inputs):
        known, inputs = iter(known), iter(inputs)
        return [next(inputs if i in undefined else known) for i in range(len(operands))]

    def evaluate(known, inputs):
        return _call(*filled(known, inputs), program=program, count=count)

    def transpose(known, cotangents):
        zeros = [ad.instantiate_zeros(ad.Zero(kind)) for kind in kinds]
        leaves = filled(known, zeros)[count:]
        return pull_back(tuple(index - count for index in undefined), leaves, cotangents)

    results = linear_map_p.bind(
        *known,
        *(ad.instantiate_zeros(cotangent) for cotangent in cotangents),
        evaluate=transpose,
        transpose=evaluate,
        count=len(known),
        types=tuple(kind.to_tangent_aval() for kind in kinds),
    )
    of_operand = dict(zip(undefined, results, strict=True))
    return [of_operand.get(index) for index in range(len(operands))]


def _call_batch(axis, operands, axes, *, program, push, pull_back, count):
    if _is_shared(axis, axes):
        params = {"program": program, "push": push, "pull_back": pull_back, "count": count}
        outputs = call_p.bind(*operands, **params)
        return outputs, [None] * len(outputs)
    leaf_axes = list(axes[count:])

    def function(*operands):
        return _call(*operands, program=program, count=count)

    def push_batch(leaves, tangents):
        # A tangent that is None has no axis.
        tangent_axes = [
            None if tangent is None else dim
            for tangent, dim in zip(tangents, leaf_axes, strict=True)
        ]
        return _vmapped(push, axis, (leaf_axes, tangent_axes))(leaves, tangents)

    def pull_back_batch(indices, leaves, cotangents):
        function = functools.partial(pull_back, indices)
        return _vmapped(function, axis, (leaf_axes, 0))(leaves, cotangents)

    batched = jax.make_jaxpr(_vmapped(function, axis, tuple(axes)))(*operands)
    extra = len(batched.consts)
    outputs = call_p.bind(
        *batched.consts,
        *operands,
        program=batched.jaxpr,
        push=lambda leaves, tangents: push_batch(leaves[count:], tangents[count:]),
        pull_back=lambda indices, leaves, cotangents: pull_back_batch(
            tuple(index - count for index in indices), leaves[count:], cotangents
        ),
        count=extra,
    )
    return outputs, [0] * len(outputs)


def _is_shared(axis: Any, axes: Any) -> bool:
    """Whether nothing is batched; a function that asks for its index along the axis always is."""
    return all(dim is None for dim in axes) and not isinstance(axis.name, str)


call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(_call_types)
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=True))
ad.primitive_jvps[call_p] = _call_jvp
ad.primitive_transposes[call_p] = _call_transpose
batching.fancy_primitive_batchers[call_p] = _call_batch


# --- checkify: it looks into both ---


def _checked(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def rule(*arguments, **params):
        # (error, enabled errors, *operands), in newer versions of JAX with a context in front.
        place = next(
            i for i, argument in enumerate(arguments) if isinstance(argument, set | frozenset)
        )
        *context, error = arguments[:place]
        operands = arguments[place + 1 :]
        program = jax.make_jaxpr(lambda *operands: evaluate(*operands, **params))(*operands)
        return checkify.checkify_jaxpr(*context, program, arguments[place], error, *operands)

    return rule


checkify.error_checks[call_p] = _checked(_call)
checkify.error_checks[linear_map_p] = _checked(_evaluate)
