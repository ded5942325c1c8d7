"""What a function of a user gives on fixed numbers, and whether two such results are equal."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from attention_jax.core.arrays import cast_floats
from attention_jax.core.products import current_backend
from attention_jax.parts.digests import without_prints
from attention_jax.parts.user_code import UserCode

Numbers = list[float | None]  # as JSON holds them: None for NaN and infinities


def on_numbers(function: Callable[..., Any], *arguments: Any) -> Any:
    """NumPy arrays that a function gives of NumPy arrays, also in the middle of a trace.

    Nothing of it is seen: what the function prints is left out. NaN and infinities are the
    caller's to judge, also under `jax_debug_nans` and `jax_debug_infs`.
    """
    return program_and_results(function, *arguments)[1]


def program_and_results(function: Callable[..., Any], *arguments: Any) -> tuple[ClosedJaxpr, Any]:
    """The program of a function, and the result of `on_numbers`."""
    options: Any = {}  # the program runs once, so that LLVM need not optimise it
    if current_backend() == "cpu":
        options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with (
        jax.default_matmul_precision("highest"),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        trace = jax.make_jaxpr(lambda *arrays: function(*arrays), return_shape=True)
        program, shapes = trace(*arguments)
        compute = jax.jit(jaxpr_as_fun(without_prints(program)), compiler_options=options)
        with jax.ensure_compile_time_eval():
            results = map(np.asarray, compute(*jax.tree.leaves(arguments)))
        return program, jax.tree.unflatten(jax.tree.structure(shapes), results)


def close(left: Any, right: Any) -> bool:
    """Whether two arrays are equal up to rounding in float32, NaN included."""
    if left.shape != right.shape or left.dtype == jax.dtypes.float0:  # cotangents of integers
        return left.shape == right.shape
    largest = np.abs(right[np.isfinite(right)]).max(initial=1.0)
    return np.allclose(left, right, 1e-4, 1e-4 * largest, equal_nan=True)


def sample_numbers(
    function: Callable[..., jax.Array], init: Callable[[jax.Array], Any], *shapes: tuple[int, ...]
) -> Numbers:
    """Values and gradients of `function(params, *arrays)` on fixed numbers in float32.

    A function that is written in another way has the same up to rounding, on every device and with
    every version of JAX. They are those of initial params and of random ones. Of each param and of
    each gradient there is one number, a sum with random coefficients.

    Args:
        function: returns a float array.
        init: makes the params of a PRNG key.
        shapes: of the arrays.
    """
    random = np.random.default_rng(0)

    def drawn(like: Any) -> np.ndarray:
        numbers = random.standard_normal(np.shape(like))
        return (numbers + np.copysign(0.5, numbers)).astype(np.float32)  # none is near 0

    def numbers(*arguments: Any) -> tuple[jax.Array, ...]:
        values, pull_back = jax.vjp(function, *arguments)
        leaves = jax.tree.leaves((arguments, pull_back(jnp.asarray(drawn(values), values.dtype))))
        return jnp.ravel(values), jnp.stack([jnp.sum(leaf * drawn(leaf)) for leaf in leaves])

    with jax.numpy_dtype_promotion("standard"):
        key = jax.random.key(0, impl="threefry2x32")
        initial = on_numbers(lambda: cast_floats(init(key), jnp.dtype(jnp.float32)))
        others = jax.tree.map(lambda leaf: abs(0.3 * drawn(leaf)), initial)
        arrays = [drawn(np.empty(shape)) for shape in shapes]
        results = [on_numbers(numbers, params, *arrays) for params in (initial, others)]
    return numbers_in(results)


def numbers_in(results: Any) -> Numbers:
    """The numbers in a pytree, in one list."""
    flat = [number for leaf in jax.tree.leaves(results) for number in np.ravel(leaf).tolist()]
    return [float(f"{number:.8g}") if np.isfinite(number) else None for number in flat]


def same_numbers(left: Numbers, right: Numbers, within: float = 1e-4) -> bool:
    """Whether two lists are equal up to rounding, by default in float32."""
    arrays = np.array(left, float), np.array(right, float)
    return len(left) == len(right) and np.allclose(*arrays, within, within, equal_nan=True)


def check_differ(part: UserCode, method: str, draw: Callable[[Any], Any], drawn: Any) -> None:
    """Warns if keys give equal examples; raises ValueError if they must, because rng is not used.

    Args:
        part: a user's task.
        method: what draws an example, for the words.
        draw: takes a key, and returns an example.
        drawn: examples in NumPy, [B, ...] each, of other keys in every row.
    """
    leaves = jax.tree.leaves(drawn)
    if not all(np.array_equal(leaf, leaf[:1].repeat(len(leaf), 0)) for leaf in leaves):
        return
    jaxpr = jax.make_jaxpr(draw)(jax.random.key(0)).jaxpr
    is_used = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][0]
    part.require(is_used, f"{method} must draw with its rng; each key gives the same example")
    warnings.warn(
        f"{part.name}: {method} draws the same example with each of {len(leaves[0])} keys; either"
        " there is no other, or it does not draw with its rng",
        stacklevel=2,
    )
