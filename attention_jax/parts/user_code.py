"""Calls of the methods of a part that a user wrote, and the words of the errors about it."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.errors import one_line, users_line
from attention_jax.core.names import is_of_this_package, nested_parts

_CURES: list[tuple[type[Exception], str]] = [
    (jax.errors.TracerArrayConversionError, "use jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "use jnp.where in place of a branch on an array"),
    (jax.errors.ConcretizationTypeError, "use jnp functions of the array, not its Python value"),
]


class UserCode:
    """Calls the methods of a part that a user wrote, and words the errors about it.

    Attributes:
        part: the part, or its name.
        name: one line for errors, such as "score Mine(size=3)".
        remedy: how a traced array reaches the part, such as "give attention params=".
    """

    def __init__(self, kind: str, part: Any, remedy: str):
        text, self.part = " ".join(str(part).split()), part
        self.name = f"{kind} {text if len(text) <= 100 else text[:97] + '...'}"
        self.remedy = remedy

    def check_signatures(self, part: Any) -> None:
        """Raises ValueError unless each of the user's methods takes the arguments that it gets.

        These are the arguments of the library's method that it overrides; those with a default may
        be missing.
        """
        mro = type(part).__mro__
        own = {name for cls in mro if not is_of_this_package(cls) for name in vars(cls)}
        of_library: dict[str, Any] = {}
        for cls in filter(is_of_this_package, reversed(mro)):
            of_library |= vars(cls)
        # Of a mask or bias, `at` is another name of the user's `allowed` or `values`.
        for name in sorted(own & of_library.keys() - {"at"}):
            method = getattr(part, name) if inspect.isfunction(of_library[name]) else None
            if name.startswith("_") or not callable(method):
                continue
            _, *parameters = inspect.signature(of_library[name]).parameters.values()
            required = [each for each in parameters if each.default is each.empty]
            by_name = {each.name: None for each in required if each.kind is each.KEYWORD_ONLY}
            in_order = [each.name for each in required if each.name not in by_name]
            try:
                inspect.signature(method).bind(*in_order, **by_name)
            except TypeError as error:
                words = ", ".join([*in_order, *(["*", *by_name] if by_name else [])])
                self.require(False, f"{name} must take ({words}): {error}")

    def call(
        self, name: str, method: Callable[..., Any], *arguments: Any, of: Any = (), cure: str = ""
    ) -> Any:
        """The result of a method that the user wrote.

        Args:
            name: the method's name, for errors.
            method: the method.
            arguments: its arguments.
            of: the arguments whose shapes an error shows.
            cure: how to mend a TypeError or ValueError of the user's code.

        Raises:
            ValueError: the user's code fails; the message is one line. Errors in which no line of
                the user's code is involved are raised unchanged.
        """
        try:
            return method(*arguments)
        except Exception as error:
            line = users_line(error)
            if line is None:
                raise
            usual = cure if isinstance(error, TypeError | ValueError) else ""
            cure = next((text for kind, text in _CURES if isinstance(error, kind)), usual)
            shapes = f" of {shapes_in_words(tuple(of))}" if of else ""
            text = f"{name}{shapes} raised {type(error).__name__}: {one_line(error)} ({line})"
            raise ValueError(f"{self.name}: {text}{cure and f': {cure}'}") from error

    def require(self, holds: bool, contract: str, *got: Any) -> None:
        """Raises ValueError unless a contract holds, in words such as "pair must return ..."."""
        if not holds:
            result = f"; got {shapes_in_words(*got)}" if got else ""
            raise ValueError(f"{self.name}: {contract}{result}")


def shapes_in_words(tree: Any) -> str:
    """The dtype and shape of each array in a pytree: "float32 [3, 8] and float32 [5, 8]"."""
    leaves = jax.tree.leaves(tree)
    dtypes = (getattr(leaf, "dtype", type(leaf).__name__) for leaf in leaves)
    words = (f"{dtype} {list(np.shape(leaf))}" for dtype, leaf in zip(dtypes, leaves, strict=True))
    of_list = "a list of " if isinstance(tree, list) and leaves else ""
    return of_list + " and ".join(words) or repr(tree)


# --- a user's methods, and their results ---


def is_array(result: Any, kind: Any, dtype: Any) -> bool:
    """Whether a result is an array of a kind, such as `jnp.floating`, and `is_wide`."""
    is_kind = isinstance(result, jax.Array | np.ndarray) and jnp.issubdtype(result.dtype, kind)
    return is_kind and is_wide(result, dtype)


def is_wide(array: Any, dtype: Any) -> bool:
    """Whether an array has no float that is narrower than a dtype."""
    own = jnp.result_type(array)
    return not jnp.issubdtype(own, jnp.floating) or jnp.finfo(own).bits >= jnp.finfo(dtype).bits


def is_users(part: Any, method: str) -> bool:
    """Whether a user wrote a method of a part, or of a part in its fields."""
    mros = [type(each).__mro__ for each in nested_parts(part)]
    of_kind = [mro for mro in mros if any(map(is_of_this_package, mro))]  # no functions
    owners = [next((cls for cls in mro if method in vars(cls)), UserCode) for mro in of_kind]
    return not all(map(is_of_this_package, owners))
