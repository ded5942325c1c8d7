"""Where a computation runs: the default device, the GPU at hand, and kernels for one platform."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax._src import config  # no public function tells whether kernels are interpreted
from jax.extend import core
from jax.interpreters import batching, mlir


def current_backend() -> str:
    """The platform of `jax.default_device` if it is set, otherwise `jax.default_backend()`.

    One of "cpu", "gpu" and "tpu". Arrays that were put on another device, and programs that
    `jax.export` makes for another platform, are not seen.

    >>> with jax.default_device(jax.devices("cpu")[0]):
    ...     current_backend()
    'cpu'
    """
    settings: Any = jax.config  # they are made while JAX is imported
    device = settings.jax_default_device
    if device is None:
        return jax.default_backend()
    platform: str = device if isinstance(device, str) else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def nvidia_generation() -> float | None:
    """The compute capability of the first GPU: 9.0 for Hopper, and 0 for another maker's GPU.

    None if JAX sees no GPU: a program is then compiled for one that is not there.
    """
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    if jax.default_backend() != "gpu" or not gpus:
        return None
    try:
        return float(gpus[0].compute_capability)
    except (AttributeError, ValueError):  # AMD's are names, such as gfx942
        return 0.0


def interpret_params() -> Any:
    """What `force_tpu_interpret_mode` or `force_gpu_interpret_mode` was given; None outside."""
    return config.pallas_tpu_interpret_mode_context_manager.value


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
