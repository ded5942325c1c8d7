"""Computations that only one kind of device can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import batching, mlir

_NAMES_OF_DEVICES = {"cuda": "gpu"}  # platform of a program -> of its devices


def only_on(platform: str, refusal: str, array: jax.Array) -> jax.Array:
    """`array`; a program that needs it can be compiled for one platform alone.

    Args:
        platform: "tpu" or "cuda", as in `jax.jit(...).lower(lowering_platforms=...)`.
        refusal: the message of the NotImplementedError that compiling for another platform raises,
            with {platforms} in place of that platform's name.
        array: any.
    """
    result: jax.Array = only_on_p.bind(array, platform=platform, refusal=refusal)
    return result


def _check(platforms: Sequence[str], allowed: str, refusal: str) -> None:
    if any(platform != allowed for platform in platforms):
        raise NotImplementedError(refusal.format(platforms=", ".join(platforms)))


def _run(array: jax.Array, *, platform: str, refusal: str) -> jax.Array:
    """Without `jax.jit`."""
    devices = sorted({device.platform for device in array.devices()})
    _check(devices, _NAMES_OF_DEVICES.get(platform, platform), refusal)
    return array


def _lower(ctx: Any, array: Any, *, platform: str, refusal: str) -> list[Any]:
    _check(ctx.module_context.platforms, platform, refusal)
    return [array]


only_on_p = core.Primitive("only_on")  # the identity
only_on_p.def_impl(_run)
only_on_p.def_abstract_eval(lambda array, **_: array)
batching.defvectorized(only_on_p)
mlir.register_lowering(only_on_p, _lower)
