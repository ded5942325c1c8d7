"""Checks of single arguments: each raises a ValueError with the argument's name and its value."""

import functools
import importlib
import math
import numbers
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Function = TypeVar("Function", bound=Callable[..., Any])

_LEAST, _MOST = (float(limit) for limit in (np.finfo("f4").tiny, np.finfo("f4").max))


def with_hints(hints: Mapping[str, str]) -> Callable[[Function], Function]:
    """Decorates a function: an error about one of these arguments, of other libraries, has a hint.

    Args:
        hints: what to write in place of arguments that the function does not have.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def hinted(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in hints:
                    owner = function.__qualname__
                    raise TypeError(f"{owner} has no argument {name!r}: give {hints[name]}")
            return function(*args, **kwargs)

        return typing.cast(Function, hinted)

    return decorate


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raises ValueError unless `value` is one of the values of a `typing.Literal`."""
    if value not in get_args(choices):
        words = ", ".join(map(str, get_args(choices)))
        raise ValueError(f"{name} must be one of {words}; got {value!r}")


def check_integer(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """`value` as a Python int; raises ValueError unless it is an integer from `least` to `most`.

    Booleans, floats and arrays are no integers here: sizes are static options.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer; got {value!r}")
    integer = int(value)
    if integer < least:
        raise ValueError(f"{name} must be at least {least}; got {integer}")
    if most is not None and integer > most:
        raise ValueError(f"{name} must be at most {most}; got {integer}")
    return integer


def check_entries(name: str, array: Array | np.ndarray, least: int, most: int) -> None:
    """Raises ValueError unless all integers of an array are from `least` to `most`.

    Nothing is checked where the host does not have the values: those of a traced array, or of an
    array on an accelerator or in another process.
    """
    if isinstance(array, jax.core.Tracer):
        return
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable and next(iter(array.devices())).platform == "cpu"
    ):
        return
    entries = np.ravel(array)
    if entries.size > 64:  # for few entries NumPy takes longer than a loop
        entries = np.array([entries.min(), entries.max()])
    for entry in entries.tolist():
        if not least <= entry <= most:
            allowed = f"from {least} to {most}" if least < most else f"{least}"
            raise ValueError(f"{name} must be {allowed}; got {entry}")


def checked_number(name: str, value: Any) -> float:
    """A finite number as a Python float, for a static option."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} must be a finite Python number; got {value!r}")
    return number


def check_real(name: str, value: Any, above: float = -math.inf) -> None:
    """Raises ValueError unless `value` is a number above a bound, in the range of float32."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    least = max(above, -_MOST) if above else _LEAST  # XLA takes a smaller number for 0
    if not (number and least <= float(value) <= _MOST and value != above):
        bound = f" above {above:g}" if above > -math.inf else ""
        raise ValueError(
            f"{name} must be a Python number in the range of float32{bound}; got {value!r}"
        )


def checked_fraction(name: str, value: Any) -> float:
    """A number in [0, 1) as a Python float, for a static option."""
    number = checked_number(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be a number in [0, 1); got {value!r}")
    return number


def checked_rng(rng: Any, *, name: str = "dropout_rng", batch_shape: tuple[int, ...] = ()) -> Array:
    """A typed PRNG key, or several that broadcast to `batch_shape`.

    Raw uint32 keys, as `jax.random.PRNGKey` makes them, are wrapped. A key of XLA's generator
    ("rbg") is replaced by a counter-based one.
    """
    if not (isinstance(rng, jax.Array) and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)):
        try:
            array = jnp.asarray(rng)
            if array.dtype != jnp.uint32:
                raise TypeError("raw keys are uint32")
            rng = jax.random.wrap_key_data(array)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{name} must be one PRNG key, as jax.random.key makes; got {rng!r}"
            ) from error
    axes = zip(reversed(rng.shape), reversed(batch_shape), strict=False)
    if rng.ndim > len(batch_shape) or any(size not in (1, full) for size, full in axes):
        keys = f", or keys that broadcast to {list(batch_shape)}" if batch_shape else ""
        raise ValueError(f"{name} must be one PRNG key{keys}; got {list(rng.shape)} of them")
    return counter_based(rng)


def counter_based(rng: Array) -> Array:
    """The PRNG keys, where those of XLA's generator ("rbg") are replaced by Threefry's.

    Under `jax.vmap` XLA's generator draws the numbers of all examples from the key of the first, so
    that they depend on who shares the batch. Its keys are two of Threefry's, which are equal unless
    a user made them otherwise.
    """
    if rng.dtype.name not in ("key<rbg>", "key<urbg>"):
        return rng
    words = jax.random.key_data(rng)
    left, right = words[..., :2], words[..., 2:]
    words = left + (left ^ right) * jnp.uint32(0x9E3779B9)
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def optional_package(module: str, purpose: str, *, extra: str) -> Any:
    """A module that this purpose needs; ValueError unless its package is installed.

    Args:
        module: its name.
        purpose: what needs it, for the error.
        extra: the extra of this project that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{purpose} needs the package {module.partition('.')[0]}:"
            f' {sys.executable} -m pip install -e ".[{extra}]"'
        ) from error
