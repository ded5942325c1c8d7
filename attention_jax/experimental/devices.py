"""Where kernels run: in Pallas's interpreter, or on one platform alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend import core
from jax.interpreters import batching, mlir

from attention_jax.core.meshes import varying_axes


def interpret_params() -> Any:
    """The parameters of the open `force_tpu_interpret_mode` or `force_gpu_interpret_mode`, or None.

    JAX has no function that returns them, so they are read from the program of an empty kernel.
    """
    nothing = varying_type(jax.ShapeDtypeStruct((1,), jnp.float32))
    program = jax.make_jaxpr(pl.pallas_call(lambda ref: None, out_shape=nothing))()
    return program.eqns[0].params["interpret"] or None


def varying_type(like: jax.ShapeDtypeStruct, *references: object) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over all mesh axes that `references` vary over.

    `pallas_call` asks for it inside `jax.shard_map`; elsewhere it is `like`.
    """
    manual = jax.sharding.ManualAxisType(varying=varying_axes(references))
    return jax.ShapeDtypeStruct(like.shape, like.dtype, manual_axis_type=manual)


def only_on(platform: str, refusal: str, array: jax.Array) -> jax.Array:
    """`array`; a program that needs it can be compiled for one platform alone.

    Args:
        platform: "tpu" or "cuda", as in `jax.jit(...).lower(lowering_platforms=...)`.
        refusal: the message of the NotImplementedError that compiling for another platform raises,
            with {platforms} in place of that platform's name.
        array: any.
    """
    return only_on_p.bind(array, platform=platform, refusal=refusal)


def _lower(ctx: Any, array: Any, *, platform: str, refusal: str) -> list[Any]:
    platforms = ctx.module_context.platforms
    if any(each != platform for each in platforms):
        raise NotImplementedError(refusal.format(platforms=", ".join(platforms)))
    return [array]


only_on_p = core.Primitive("only_on")  # the identity
# Without `jax.jit` it is compiled on its own.
only_on_p.def_impl(
    lambda array, **options: jax.jit(functools.partial(only_on_p.bind, **options))(array)
)
only_on_p.def_abstract_eval(lambda array, **_: array)
batching.defvectorized(only_on_p)
mlir.register_lowering(only_on_p, _lower)
