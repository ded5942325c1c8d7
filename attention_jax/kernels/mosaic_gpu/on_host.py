"""A function of arrays that runs on the host, in a callback of the program that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.custom_batching import custom_vmap


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` in a callback; under `jax.vmap`, `jax.vmap` of it in a callback.

    JAX's interpreters of kernels have ordered effects, which derivatives and checkpoints refuse:
    in a callback nothing sees them.
    """

    def run(*args: Any) -> Any:
        return jax.tree.map(np.asarray, jax.jit(function)(*map(np.asarray, args)))

    @custom_vmap
    def call(*args: Any) -> Any:
        return jax.pure_callback(run, jax.eval_shape(function, *args), *args)

    @call.def_vmap
    def rule(axis_size: int, in_batched: Any, *args: Any) -> Any:
        del axis_size
        axes = tuple(0 if batched else None for batched in in_batched)
        results = on_host(jax.vmap(function, in_axes=axes))(*args)
        return results, jax.tree.map(lambda _: True, results)

    return call
