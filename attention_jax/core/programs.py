"""A part that a user writes (a score, a mask, a bias, a normaliser) is known by its program.

Compiled programs are cached by their static arguments. An object of a user may compute something
else although it is equal to what it was: a global, an attribute or the function's source has
changed. So such a part is traced at each call, on shapes, and its place is taken by a `Known`,
which is equal to another only if the two programs are equal, the numbers in them included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

Array = jax.Array

_LIBRARY = os.path.dirname(os.path.dirname(__file__))
_INSTALLED = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_OF_A_USER = ("<frozen ", *(os.path.join(folder, "") for folder in (_LIBRARY, *_INSTALLED)))
_NO_MESH = jax.sharding.AbstractMesh((), ())
_NOT_IN_PROGRAMS = ("init", "param_shapes", "visits")  # methods without numbers of `pair`, `weight`
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CURES: list[tuple[type[Exception], str]] = [
    (jax.errors.TracerArrayConversionError, "use jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "use jnp.where in place of a branch on an array"),
    (jax.errors.ConcretizationTypeError, "use jnp functions of the array, not its Python value"),
]


class Part(NamedTuple):
    """The words in which errors name a part of a user."""

    name: str  # "score Mine(size=3)"
    remedy: str  # how a traced array reaches the part: "pass it in params"


class PartError(Exception):
    """A mistake in a part of a user, found while it is traced; becomes a ValueError."""


def trace(part: Part, function: Callable[..., Any], *arguments: Any) -> str:
    """Traces a function of a user on shapes; nothing is computed and nothing is compiled.

    Returns the digest of its operations and of all numbers in them, which holds for one version of
    JAX.

    Args:
        part: what the function belongs to.
        function: takes pytrees of arrays, returns one. It calls the user's code in `users_errors`,
            and may raise a `PartError` about its results.
        arguments: pytrees of `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: in one line: the user's code fails, or uses a traced array of its enclosing
            scope.
    """

    def call(*arrays: Any) -> Any:  # a new function, because JAX remembers traces by function
        return function(*arrays)

    try:
        with jax.sharding.use_abstract_mesh(_NO_MESH):  # the digest is that of any mesh
            closed = jax.make_jaxpr(call)(*arguments)
    except PartError as error:
        raise ValueError(f"{part.name}: {error}") from error.__cause__
    # A function that fills a cache leaves operations without effect where it is first traced.
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    digest = hashlib.sha256(_ADDRESS.sub("", str(jaxpr)).encode())
    for constant in _constants(closed):
        if isinstance(constant, jax.core.Tracer):
            raise ValueError(
                f"{part.name} must not use the traced array {constant.aval.str_short()} of its"
                f" enclosing scope, which would get no gradient: {part.remedy}"
            )
        if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
            constant = jax.random.key_data(constant)
        digest.update(np.asarray(constant).tobytes())
    return digest.hexdigest()


@contextlib.contextmanager
def users_errors(part: Part, method: str, contract: str = "") -> Iterator[None]:
    """Names the part, the method, the line and the cure in an error that the user's code raises.

    An error that only this library raises stays as it is.

    Args:
        part: what the method belongs to.
        method: its name, with what it is called with.
        contract: what it must give, for errors without a cure of their own.
    """
    try:
        yield
    except PartError:
        raise
    except Exception as error:
        line = users_line(error)
        if line is None:
            raise
        cures = (text for kind, text in _CURES if isinstance(error, kind))
        cure = next(cures, contract if isinstance(error, TypeError | ValueError) else "")
        raise PartError(
            f"{method} raised {type(error).__name__}: {one_line(error)} ({line})"
            + (f": {cure}" if cure else "")
        ) from error


def users_line(error: BaseException) -> str | None:
    """The deepest line of the user's code in the traceback, as "my_scores.py, line 12".

    The user's code is neither this library nor an installed package. None if it is not there.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_NOT_OF_A_USER):
            return f"{os.path.basename(frame.filename)}, line {frame.lineno}"
    return None


def one_line(error: Exception) -> str:
    """The first line of the message, at most 300 characters; the error's class if it is empty.

    A line that ends with a colon is continued by the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return line.partition(" See full ")[0][:300].rstrip(".") or type(error).__name__


def checked_array(result: Any, what: str) -> Any:
    """The result of a user's method; a `PartError` unless it is one array."""
    if isinstance(result, jax.Array | np.ndarray | np.generic):
        return result
    if result is None:
        got = "None, as of a function without return"
    elif jax.tree_util.all_leaves([result]):
        got = f"a {type(result).__name__}"
    else:
        got = f"a {type(result).__name__} of {len(jax.tree.leaves(result))} arrays"
    raise PartError(f"{what}; got {got}")


class Known:
    """Stands in for a part of a user; equal to another if the parts and their programs are equal.

    It has all attributes and methods of the part, and is an instance of the part's class for
    `isinstance`. JAX may trace a method again later, for a derivative: from the object that the
    call was given, which is why the parts are compared too, and which must not have changed.
    """

    def __init__(self, part: Any, digest: str, trace_again: Callable[[], str]):
        self.part, self.digest, self._trace_again = part, digest, trace_again

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if callable(value) and name not in _NOT_IN_PROGRAMS:
            check_unchanged(repr(self.part), self.digest, self._trace_again())
        return self if value is self.part else value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.part)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.part(*arguments, **keywords)

    def __repr__(self) -> str:
        return repr(self.part)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        return type(other) is Known and self.digest == other.digest and _same(self.part, other.part)


def check_unchanged(name: str, before: str, now: str) -> None:
    """Raises ValueError if a part of a user is another program than when it was called."""
    if before != now:
        raise ValueError(
            f"{' '.join(name.split())} must not change between a call of attention and its"
            " derivative, which would mix old and new numbers; call the function again, or compile"
            " it again, after a change"
        )


def is_of_library(part: Any) -> bool:
    """Whether a part and all parts in its fields are classes of this library, equal by value."""
    if type(part) is Known or not is_of_this_package(type(part)):
        return False
    if not dataclasses.is_dataclass(part):
        return True
    values = (getattr(part, field.name) for field in dataclasses.fields(part))
    return all(
        is_of_library(value)
        for value in values
        if callable(value) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    )


def is_of_this_package(cls: type) -> bool:
    """Whether a class is defined in this library."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def named(kind: str, part: Any) -> str:
    """A part in one line of an error, at most 100 characters of it."""
    text = " ".join(repr(part).split())
    return f"{kind} {text if len(text) <= 100 else text[:97] + '...'}"


def on_numbers(function: Callable[..., Any], *arguments: Any) -> Any:
    """NumPy arrays that a function gives of NumPy arrays, also in the middle of a trace."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(np.asarray, jax.jit(function)(*arguments))


def close(left: Any, right: Any) -> bool:
    """Whether two arrays are equal up to rounding in float32, NaN included."""
    if left.dtype == jax.dtypes.float0:  # the cotangent of an integer
        return left.shape == right.shape
    left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
    finite = np.abs(right[np.isfinite(right)])
    tolerance = 1e-4 * max(1.0, finite.max(initial=0.0))
    return left.shape == right.shape and np.allclose(left, right, 1e-4, tolerance, equal_nan=True)


def _same(left: Any, right: Any) -> bool:
    """Whether two parts are one object, or are hashable and equal."""
    if left is right:
        return True
    try:
        return hash(left) == hash(right) and bool(left == right)
    except (TypeError, ValueError):  # a field holds an array
        return False


def _constants(closed: ClosedJaxpr) -> Iterator[Any]:
    """The arrays in a program, in the order of its operations."""
    yield from closed.consts
    for equation in closed.jaxpr.eqns:
        for value in equation.params.values():
            for program in value if isinstance(value, tuple | list) else (value,):
                if isinstance(program, ClosedJaxpr):
                    yield from _constants(program)
                elif isinstance(program, Jaxpr):
                    yield from _constants(ClosedJaxpr(program, ()))
