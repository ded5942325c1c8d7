"""Calls that JAX keeps whole: of a function, or of a linear map whose transpose the caller gives.

Both are one primitive, `kept_call`. `jax.custom_derivatives.linear_call` is the same idea for
linear maps, without batching and without derivatives with respect to the residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

Leaves = Sequence[Any]
Function = Callable[[Any, list[Any]], list[Any]]


def kept_call(
    function: Callable[..., list[Any]], arguments: Leaves, types: Leaves, program: core.Jaxpr
) -> list[Any]:
    """`function(*arguments)`, differentiated by the function's own rule, which is never lost.

    No transformation of JAX looks into the call. Partial evaluation of a loop, for example, loses
    the rule of a `jax.custom_jvp` that stands alone.

    Args:
        function: a function of arrays, which JAX can differentiate.
        arguments: its arrays.
        types: the types of its outputs.
        program: that of the function; the call has its side effects. See `shown` in `linear_map`.
    """
    return linear_map(lambda leaves, _: function(*leaves), None, arguments, [], types, program)


def linear_map(
    evaluate: Function,
    transpose: Function | None,
    residuals: Any,
    inputs: Leaves,
    types: Leaves,
    shown: core.Jaxpr | None = None,
) -> list[Any]:
    """`evaluate(residuals, inputs)`; reverse mode transposes it by `transpose`.

    JAX keeps this call whole, too.

    Args:
        evaluate: (residuals, inputs) -> outputs, linear in the inputs. JAX differentiates it with
            respect to the residuals.
        transpose: (residuals, cotangents of the outputs) -> cotangents of the inputs; linear in
            the cotangents. JAX differentiates it with respect to the residuals.
        residuals: a pytree of arrays of any dtype.
        inputs: floating-point arrays; none in a `kept_call`.
        types: the types of the outputs.
        shown: a program that is never run. JAX looks into it for primitives that need the devices
            while they are lowered (cuDNN's), because it cannot see into `evaluate`.
    """
    leaves, structure = jax.tree.flatten(residuals)

    def on_leaves(function: Function | None) -> Function | None:
        # Inside of `jit`, JAX passes small constants as literals.
        return function and (
            lambda leaves, x: function(jax.tree.unflatten(structure, map(jnp.asarray, leaves)), x)
        )

    return kept_call_p.bind(
        *leaves,
        *inputs,
        evaluate=on_leaves(evaluate),
        transpose=on_leaves(transpose),
        linear=len(inputs),
        types=tuple(types),
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


# --- the primitive: residuals, then inputs (none in a `kept_call`) ---

kept_call_p = core.Primitive("kept_call")
kept_call_p.multiple_results = True


def _split(operands: Leaves, linear: int) -> tuple[list[Any], list[Any]]:
    count = len(operands) - linear
    return list(operands[:count]), list(operands[count:])


def _evaluate(*operands, evaluate, linear, **_):
    return evaluate(*_split(operands, linear))


def _types_and_effects(*_, types, linear, shown, **__):
    return list(types), set() if linear or shown is None else set(shown.effects)


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


def _transpose(cotangents, *operands, evaluate, transpose, linear, types, shown):
    residuals, inputs = _split(operands, linear)
    is_wanted = list(map(ad.is_undefined_primal, inputs))
    pairs = zip(inputs, is_wanted, strict=True)
    input_types = [each.aval if wanted else jax.typeof(each) for each, wanted in pairs]
    cotangents = map(ad.instantiate_zeros, cotangents)
    results = linear_map(transpose, evaluate, residuals, list(cotangents), input_types, shown)
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

    def batched(function):
        return function and jax.vmap(
            function,
            in_axes=(residual_axes, 0),
            axis_size=size,
            axis_name=axis.name,
            spmd_axis_name=axis.spmd_name,
        )

    outputs = linear_map(
        batched(params["evaluate"]),
        batched(params["transpose"]),
        residuals,
        [
            batching.bdim_at_front(array, dim, size, mesh_axis)
            for array, dim in zip(inputs, input_axes, strict=True)
        ],
        [core.unmapped_aval(size, 0, each, mesh_axis) for each in params["types"]],
        params["shown"],
    )
    return outputs, [0] * len(outputs)


kept_call_p.def_impl(_evaluate)
kept_call_p.def_effectful_abstract_eval(_types_and_effects)
mlir.register_lowering(kept_call_p, mlir.lower_fun(_evaluate, multiple_results=True))
ad.primitive_jvps[kept_call_p] = _jvp
ad.primitive_transposes[kept_call_p] = _transpose
batching.fancy_primitive_batchers[kept_call_p] = _batch
