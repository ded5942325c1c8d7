"""A linear map that carries its own transpose, and a call that can be transposed.

Forward mode evaluates a linear map, and reverse mode transposes it. A JAX primitive may say how it
is transposed, so that a map given as a pair of functions, itself and its transpose, has both modes.
The transpose is such a map again, with the pair exchanged.

`jax.custom_derivatives.linear_call` is the same idea, without batching and without derivatives with
respect to the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

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
    moving = [
        index
        for index, tangent in enumerate(tangents[:count])
        if type(tangent) is not ad.Zero and tangent.dtype != jax.dtypes.float0
    ]
    if moving:

        def of_moving(*leaves):
            residuals = list(primals[:count])
            for index, leaf in zip(moving, leaves, strict=True):
                residuals[index] = leaf
            return evaluate(residuals, list(primals[count:]))

        _, others = jax.jvp(
            of_moving, [primals[index] for index in moving], [tangents[index] for index in moving]
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
    if all(dim is None for dim in axes):  # JAX asks in any case
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


# --- a call that is an ordinary function, but for `jax.linear_transpose` ---


def call_with_transpose(
    function: Callable[..., Any], pull_back: Callable[..., list[Any]], arrays: tuple[Any, ...]
) -> Any:
    """function(*arrays), transposed by `pull_back` where it is linear in some of them.

    Under `vmap` all its results are batched along their first axis.

    Args:
        function: of pytrees of arrays, to a pytree of arrays.
        pull_back: (numbers of some leaves, arrays, cotangents of the result) -> the cotangents of
            these leaves, where the function is linear in them together.
        arrays: the arguments.
    """
    leaves, structure = jax.tree.flatten(arrays)
    program, result = _program_of(function, arrays)

    def pull_back_leaves(indices, leaves, cotangents):
        cotangents = jax.tree.unflatten(result, cotangents)
        return pull_back(indices, jax.tree.unflatten(structure, _as_arrays(leaves)), cotangents)

    outputs = call_p.bind(
        *program.consts,
        *leaves,
        program=program.jaxpr,
        pull_back=pull_back_leaves,
        count=len(program.consts),
    )
    return jax.tree.unflatten(result, outputs)


def call_with_residuals(function: Callable[..., tuple[Any, Any]], arrays: tuple[Any, ...]) -> Any:
    """function(*arrays), a result and residuals; results are batched as in `call_with_transpose`.

    A residual that is one of the arguments stays what it is, so that `vmap` need not batch it.
    """
    leaves = jax.tree.leaves(arrays)
    program, structure = _program_of(function, arrays)
    outputs = call_p.bind(
        *program.consts,
        *leaves,
        program=program.jaxpr,
        pull_back=_no_pull_back,
        count=len(program.consts),
    )
    given = dict(zip(program.jaxpr.invars, leaves, strict=True))
    variables = jax.tree.unflatten(structure, program.jaxpr.outvars)
    result, residuals = jax.tree.unflatten(structure, outputs)
    residuals = jax.tree.map(
        lambda leaf, variable: (
            leaf if isinstance(variable, core.Literal) else given.get(variable, leaf)
        ),
        residuals,
        variables[1],
    )
    return result, residuals


def _program_of(function: Callable[..., Any], arrays: tuple[Any, ...]) -> tuple[Any, Any]:
    """The function as a program of the arrays' leaves, and the structure of its result."""
    leaves, structure = jax.tree.flatten(arrays)
    program, result = jax.make_jaxpr(
        lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
    )(*leaves)
    return program, jax.tree.structure(result)


def _no_pull_back(*_: Any) -> Any:
    raise NotImplementedError(
        "jax.linear_transpose of a custom_vjp function that is differentiated in other arguments at"
        " the same time is not supported: transpose first, and differentiate the result"
    )


# Operands: `count` constants of the program, then its arguments.
call_p = core.Primitive("call_with_transpose")
call_p.multiple_results = True


def _call(*operands, program, pull_back, count):
    del pull_back
    return jax.core.eval_jaxpr(program, operands[:count], *operands[count:])


def _call_types(*operands, program, pull_back, count):
    del operands, pull_back, count
    return [variable.aval for variable in program.outvars], program.effects


def _call_transpose(cotangents, *operands, program, pull_back, count):
    undefined = [i for i, leaf in enumerate(operands) if ad.is_undefined_primal(leaf)]
    known = [leaf for leaf in operands if not ad.is_undefined_primal(leaf)]
    kinds = [operands[index].aval for index in undefined]

    def filled(known, inputs):
        known, inputs = iter(known), iter(inputs)
        return [next(inputs if i in undefined else known) for i in range(len(operands))]

    def evaluate(known, inputs):
        return _call(*filled(known, inputs), program=program, pull_back=None, count=count)

    def transpose(known, cotangents):
        zeros = [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]
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


def _call_batch(axis, operands, axes, *, program, pull_back, count):
    if all(dim is None for dim in axes):
        outputs = call_p.bind(*operands, program=program, pull_back=pull_back, count=count)
        return outputs, [None] * len(outputs)

    def function(*operands):
        return _call(*operands, program=program, pull_back=None, count=count)

    def pull_back_batch(indices, leaves, cotangents):
        one = lambda leaves, cotangents: pull_back(indices, leaves, cotangents)  # noqa: E731
        return _vmapped(one, axis, (list(axes[count:]), 0))(leaves, cotangents)

    batched = jax.make_jaxpr(_vmapped(function, axis, tuple(axes)))(*operands)
    outputs = call_p.bind(
        *batched.consts,
        *operands,
        program=batched.jaxpr,
        pull_back=lambda i, leaves, cotangents: pull_back_batch(i, leaves[count:], cotangents),
        count=len(batched.consts),
    )
    return outputs, [0] * len(outputs)


call_p.def_impl(_call)
call_p.def_effectful_abstract_eval(_call_types)
mlir.register_lowering(call_p, mlir.lower_fun(_call, multiple_results=True))
ad.primitive_transposes[call_p] = _call_transpose
batching.fancy_primitive_batchers[call_p] = _call_batch
