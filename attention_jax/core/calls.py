"""Calls that JAX keeps whole: of a program, or of a linear map whose transpose the caller gives.

Both are one primitive, `kept_call`. `jax.custom_derivatives.linear_call` is the same idea for
linear maps, without batching and without derivatives with respect to the residuals.

A call of a program is computed by that program, which JAX can look into: for its side effects, and
for operations that need the devices while they are lowered (cuDNN's). A linear map is a function
until reverse mode transposes it; its transpose is traced then, and is a program too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.jet import jet_rules
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from attention_jax.core.arrays import NO_TAYLOR_MODE

Leaves = Sequence[Any]
Function = Callable[[Any, list[Any]], list[Any]]

NO_TRANSPOSE = (
    "jax.linear_transpose needs a function that is linear in its argument; attention is linear in"
    " its values alone, another custom_vjp in the arguments that its `linear` names"
)


def kept_call(
    function: Callable[..., list[Any]],
    arguments: Leaves,
    program: core.ClosedJaxpr,
    linear_in: frozenset[int] = frozenset(),
) -> list[Any]:
    """`function(*arguments)`, differentiated by the function's own rule, which is never lost.

    No transformation of JAX looks into the call. Partial evaluation of a loop, for example, loses
    the rule of a `jax.custom_jvp` that stands alone.

    Args:
        function: a function of arrays, which JAX can differentiate. It closes over no array.
        arguments: its arrays.
        program: that of the function, which computes the values.
        linear_in: the places of the arguments in which the function is linear together, so that
            `jax.linear_transpose` has a rule for them.
    """

    def evaluate(leaves: Any, _: Any) -> list[Any]:
        return function(*leaves)

    return _bind_kept_call(evaluate, None, arguments, [], program.out_avals, program, linear_in)


def linear_map(
    evaluate: Function, transpose: Function, residuals: Any, inputs: Leaves, types: Leaves
) -> list[Any]:
    """`evaluate(residuals, inputs)`; reverse mode transposes it by `transpose`.

    JAX keeps this call whole, too. The functions close over no array.

    Args:
        evaluate: (residuals, inputs) -> outputs, linear in the inputs. JAX differentiates it with
            respect to the residuals.
        transpose: (residuals, cotangents of the outputs) -> cotangents of the inputs; linear in
            the cotangents. JAX differentiates it with respect to the residuals.
        residuals: a pytree of arrays of any dtype.
        inputs: floating-point arrays.
        types: the types of the outputs.
    """
    leaves, structure = jax.tree.flatten(residuals)

    def on_leaves(function: Function) -> Function:
        # Inside of `jit`, JAX passes small constants as literals.
        return lambda leaves, x: function(
            jax.tree.unflatten(structure, map(jnp.asarray, leaves)), x
        )

    return _bind_kept_call(on_leaves(evaluate), on_leaves(transpose), leaves, inputs, types, None)


def function_of(
    function: Callable[..., Any], leaves: Leaves, indices: Sequence[int]
) -> Callable[..., Any]:
    """The function of the leaves with these indices; the others keep their values."""

    def of_some(*some: Any) -> Any:
        replacements = dict(zip(indices, some, strict=True))
        return function(*(replacements.get(i, leaf) for i, leaf in enumerate(leaves)))

    return of_some


# --- the primitive: residuals, then inputs (none in a `kept_call`) ---


class _KeptCall(core.Primitive):
    multiple_results = True

    def is_high(self, *_, **__):
        """JAX asks it of the programs among the parameters; lowering traces them once more."""
        return False


kept_call_p = _KeptCall("kept_call")


def _bind_kept_call(
    evaluate: Function,
    transpose: Function | None,
    residuals: Leaves,
    inputs: Leaves,
    types: Leaves,
    program: core.ClosedJaxpr | None,
    linear_in: frozenset[int] = frozenset(),
) -> list[Any]:
    """The outputs, of these types; by the program of `evaluate` if it is known."""
    return kept_call_p.bind(
        *residuals,
        *inputs,
        evaluate=evaluate,
        transpose=transpose,
        linear=len(inputs),
        types=tuple(types),
        program=program,
        linear_in=linear_in,
    )


def _split(operands: Leaves, linear: int) -> tuple[list[Any], list[Any]]:
    count = len(operands) - linear
    return list(operands[:count]), list(operands[count:])


def _impl(*operands, evaluate, linear, program, **_):
    if program is None:
        return evaluate(*_split(operands, linear))
    return core.jaxpr_as_fun(program)(*operands)


def _types_and_effects(*_, types, linear, program, **__):
    return list(types), set() if linear or program is None else set(program.effects)


def _jvp(primals, tangents, **params):
    evaluate, linear, types = params["evaluate"], params["linear"], params["types"]
    residuals, inputs = _split(primals, linear)
    dresiduals, dinputs = _split(tangents, linear)
    doutputs: list[Any] = [ad.Zero(each.to_tangent_aval()) for each in types]
    perturbed = [i for i, tangent in enumerate(dresiduals) if type(tangent) is not ad.Zero]
    if perturbed:
        outputs, by_residuals = jax.jvp(
            function_of(lambda *residuals: evaluate(list(residuals), inputs), residuals, perturbed),
            [residuals[i] for i in perturbed],
            [dresiduals[i] for i in perturbed],
        )
        doutputs = [
            zero if zero.aval.dtype == jax.dtypes.float0 else doutput
            for zero, doutput in zip(doutputs, by_residuals, strict=True)
        ]
    if inputs:
        outputs = kept_call_p.bind(*primals, **params)
    if any(type(tangent) is not ad.Zero for tangent in dinputs):
        filled = map(ad.instantiate_zeros, dinputs)
        by_inputs = kept_call_p.bind(*residuals, *filled, **params)
        doutputs = list(map(ad.add_tangents, doutputs, by_inputs))
    return outputs, doutputs


def _transpose(cotangents, *operands, evaluate, transpose, linear, linear_in, **_):
    residuals, inputs = _split(operands, linear)
    if unknown := [i for i, leaf in enumerate(residuals) if ad.is_undefined_primal(leaf)]:
        if not linear_in.issuperset(unknown):
            raise NotImplementedError(NO_TRANSPOSE)
        # A linear function is its own derivative, at 0 as everywhere.
        zeros = [ad.instantiate_zeros(ad.Zero(residuals[i].aval)) for i in unknown]
        of_unknown = function_of(lambda *leaves: evaluate([*leaves], inputs), residuals, unknown)
        _, pull_back = jax.vjp(of_unknown, *zeros)
        results = pull_back(list(map(ad.instantiate_zeros, cotangents)))
        return [dict(zip(unknown, results, strict=True)).get(i) for i in range(len(operands))]
    is_wanted = list(map(ad.is_undefined_primal, inputs))
    pairs = zip(inputs, is_wanted, strict=True)
    types = [each.aval if wanted else jax.typeof(each) for each, wanted in pairs]
    cotangents = list(map(ad.instantiate_zeros, cotangents))
    program = jax.make_jaxpr(lambda *arrays: transpose(*_split(arrays, len(cotangents))))(
        *residuals, *cotangents
    )
    if any(isinstance(const, jax.core.Tracer) for const in program.consts):
        raise ValueError("bwd must not close over a traced value: make it an argument")
    results = _bind_kept_call(transpose, evaluate, residuals, cotangents, types, program)
    pairs = zip(results, is_wanted, strict=True)
    return [None] * len(residuals) + [result if wanted else None for result, wanted in pairs]


def _batch(axis, operands, axes, **params):
    """All outputs and all inputs get a batch axis at the front."""
    size, mesh_axis = axis.size, axis.explicit_mesh_axis
    # Without batched operands, a function may still read its index on a named axis.
    if all(dim is None for dim in axes) and not isinstance(axis.name, str):
        outputs = kept_call_p.bind(*operands, **params)
        return outputs, [None] * len(outputs)
    residuals, inputs = _split(operands, params["linear"])
    residual_axes, input_axes = _split(axes, params["linear"])
    inputs = [
        batching.bdim_at_front(array, dim, size, mesh_axis)
        for array, dim in zip(inputs, input_axes, strict=True)
    ]

    def batched(function, *in_axes):
        return function and jax.vmap(
            function,
            in_axes=in_axes,
            axis_size=size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )

    program = params["program"]
    if program is not None:
        of_batch = batched(core.jaxpr_as_fun(program), *residual_axes, *[0] * len(inputs))
        program = jax.make_jaxpr(of_batch)(*residuals, *inputs)
    outputs = _bind_kept_call(
        batched(params["evaluate"], residual_axes, 0),
        batched(params["transpose"], residual_axes, 0),
        residuals,
        inputs,
        [core.unmapped_aval(size, 0, each, mesh_axis) for each in params["types"]],
        program,
        params["linear_in"],
    )
    return outputs, [0] * len(outputs)


def _refuse_taylor_mode(*_, **__):
    raise NotImplementedError(NO_TAYLOR_MODE)


kept_call_p.def_impl(_impl)
kept_call_p.def_effectful_abstract_eval(_types_and_effects)
mlir.register_lowering(kept_call_p, mlir.lower_fun(_impl, multiple_results=True))
ad.primitive_jvps[kept_call_p] = _jvp
ad.primitive_transposes[kept_call_p] = _transpose
batching.fancy_primitive_batchers[kept_call_p] = _batch
jet_rules[kept_call_p] = _refuse_taylor_mode
