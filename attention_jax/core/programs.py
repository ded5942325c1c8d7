"""A part that a user writes (a score, a mask, a bias, a normaliser) is known by its program.

Compiled programs are cached by their static arguments. But a user's object may compute something
else and still be equal to what it was: a global, an attribute or the source of a function has
changed. So each call traces such a part, on shapes, and replaces it by a `Known`. Two of these are
equal only if their programs are, including the numbers in them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in its repr; differs between processes

_LIBRARY = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_INSTALLED = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_OF_A_USER = ("<frozen ", _LIBRARY, *(os.path.join(folder, "") for folder in _INSTALLED))
_NO_MESH = jax.sharding.AbstractMesh((), ())
_CURES: list[tuple[type[Exception], str]] = [
    (jax.errors.TracerArrayConversionError, "use jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "use jnp.where in place of a branch on an array"),
    (jax.errors.ConcretizationTypeError, "use jnp functions of the array, not its Python value"),
]


class Part:
    """Calls and traces the methods of a part that a user wrote, and words the errors about it.

    Attributes:
        name: one line for errors, such as "score Mine(size=3)".
        remedy: how a traced array reaches the part, such as "give attention params=".
    """

    def __init__(self, kind: str, part: Any, remedy: str):
        text = " ".join(str(part).split())
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
        for name in sorted(own & of_library.keys()):
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
            shapes = f" of {shapes_in_words(of)}" if of else ""
            text = f"{name}{shapes} raised {type(error).__name__}: {one_line(error)} ({line})"
            raise ValueError(f"{self.name}: {text}{cure and f': {cure}'}") from error

    def require(self, holds: bool, contract: str, *got: Any) -> None:
        """Raises ValueError unless a contract holds, in words such as "pair must return ..."."""
        if not holds:
            result = f"; got {shapes_in_words(*got)}" if got else ""
            if got and isinstance(got[0], list):
                result = f"; got a list of {shapes_in_words(*got)}"
            raise ValueError(f"{self.name}: {contract}{result}")

    def trace(self, program: Callable[..., Any], *arguments: Any) -> str:
        """Traces a function on shapes; nothing is computed and nothing is compiled.

        Returns the digest of its operations and of all numbers in them. Where the user's code has
        a rule for derivatives (`jax.custom_jvp`, `jax.custom_vjp`), the programs of the first and
        second derivative count too. The digest holds for one version of JAX.

        Args:
            program: takes pytrees of arrays, returns one, and calls the user's code.
            arguments: pytrees of `jax.ShapeDtypeStruct`.

        Raises:
            ValueError: the program uses a traced array of its enclosing scope.
        """
        # JAX remembers traces by function, so the lambda is a new function. Without a mesh, the
        # digest is that of any mesh.
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            closed = jax.make_jaxpr(lambda *arrays: program(*arrays))(*arguments)
            programs = [closed, *_derivatives(closed, orders=2)]
        digest = hashlib.sha256()
        for closed in programs:
            # The first trace of a function that fills a cache has operations without effect.
            jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
            digest.update(ADDRESS.sub("", str(jaxpr)).encode())
            inner = _with_inner(closed)
            for constant in (array for each in inner for array in getattr(each, "consts", ())):
                if isinstance(constant, jax.core.Tracer):
                    raise ValueError(
                        f"{self.name} must not use the traced array {constant.aval.str_short()} of"
                        f" its enclosing scope, which would get no gradient: {self.remedy}"
                    )
                if jnp.issubdtype(constant.dtype, jax.dtypes.prng_key):
                    constant = jax.random.key_data(constant)
                digest.update(np.asarray(constant).tobytes())
        return digest.hexdigest()


class Known:
    """Stands in for a user's part; equal to another if the parts and their programs are equal.

    It has all attributes and methods of the part, and is an instance of the part's class for
    `isinstance`. For a derivative JAX may trace a method again later, with the part of the original
    call. So the parts are compared as well as the programs, and a part that has changed since is
    refused.

    Args:
        part: the part.
        trace: gives the digest of the part's program as it is now.
        check: runs the program on numbers; called when the program is seen for the first time.
    """

    def __init__(
        self, part: Any, trace: Callable[[], str], check: Callable[[], None] = lambda: None
    ):
        self.part, self._trace, self._check = part, trace, check
        self.digest = trace()
        _check_numbers(self)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if callable(value) and name not in ("init", "param_shapes"):  # not in the program
            check_unchanged(repr(self.part), self.digest, self._trace())
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
        if type(other) is not Known or self.digest != other.digest:
            return False
        try:
            return self.part is other.part or bool(self.part == other.part)
        except (TypeError, ValueError):  # a field holds an array
            return False


@functools.lru_cache(maxsize=512)
def _check_numbers(known: Known) -> None:
    known._check()


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
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = (getattr(part, field.name) for field in fields)
    return all(is_of_library(value) for value in values if callable(value))


def is_of_this_package(cls: type) -> bool:
    """Whether a class is defined in this library."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


# --- the words of errors ---


def users_line(error: BaseException) -> str | None:
    """The deepest line of the user's code in the traceback, as "my_scores.py, line 12".

    The user's code is neither this library nor an installed package. None if there is no such line.
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


def shapes_in_words(tree: Any) -> str:
    """The dtype and shape of each array in a pytree: "float32 [3, 8] and float32 [5, 8]"."""
    leaves = jax.tree.leaves(tree)
    dtypes = (getattr(leaf, "dtype", type(leaf).__name__) for leaf in leaves)
    words = (f"{dtype} {list(np.shape(leaf))}" for dtype, leaf in zip(dtypes, leaves, strict=True))
    return " and ".join(words) or repr(tree)


# --- results of a user's methods ---


def is_array(result: Any, kind: Any) -> bool:
    """Whether a result is an array whose dtype is of a kind, such as `jnp.floating`."""
    return isinstance(result, jax.Array | np.ndarray) and jnp.issubdtype(result.dtype, kind)


def on_numbers(function: Callable[..., Any], *arguments: Any) -> Any:
    """NumPy arrays that a function gives of NumPy arrays, also in the middle of a trace.

    NaN and infinities are the caller's to judge, also under `jax_debug_nans` and `jax_debug_infs`.
    """
    with jax.ensure_compile_time_eval(), jax.debug_nans(False), jax.debug_infs(False):
        return jax.tree.map(np.asarray, jax.jit(lambda *arrays: function(*arrays))(*arguments))


def close(left: Any, right: Any) -> bool:
    """Whether two arrays are equal up to rounding in float32, NaN included."""
    if left.shape != right.shape or left.dtype == jax.dtypes.float0:  # cotangents of integers
        return left.shape == right.shape
    largest = np.abs(right[np.isfinite(right)]).max(initial=1.0)
    return np.allclose(left, right, 1e-4, 1e-4 * largest, equal_nan=True)


def _with_inner(program: ClosedJaxpr | Jaxpr) -> Iterator[ClosedJaxpr | Jaxpr]:
    """A program, and all programs in it, in the order of its operations."""
    yield program
    for equation in program.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _with_inner(inner)


def _has_own_rule(program: ClosedJaxpr) -> bool:
    """Whether a function in it has a rule for derivatives that is neither JAX's nor this library's.

    The text of a program names a rule, and does not show what it computes.
    """
    sources = [
        str(equation.params["call_jaxpr"].jaxpr.debug_info.func_src_info).partition(" at ")[2]
        for each in _with_inner(program)
        for equation in each.eqns
        if equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")
    ]
    return any(not source.startswith((_LIBRARY, _JAX)) for source in sources)


def _derivatives(closed: ClosedJaxpr, orders: int) -> list[ClosedJaxpr]:
    """The programs of the derivatives up to an order, as long as the user has a rule for the next.

    They are of reverse mode, or of forward mode where the rule defines no other. An error in a rule
    is left to JAX, which raises it where the derivative is taken.
    """
    if orders == 0 or not _has_own_rule(closed):
        return []
    function = jaxpr_as_fun(closed)

    def pull(primals: Any, cotangents: Any) -> Any:
        return jax.vjp(function, *primals)[1](cotangents)

    def push(primals: Any, tangents: Any) -> Any:
        return jax.jvp(function, primals, tangents)[1]

    for derive, avals in ((pull, closed.out_avals), (push, closed.in_avals)):
        with contextlib.suppress(Exception):
            directions = [aval.to_tangent_aval() for aval in avals]
            derivative = jax.make_jaxpr(derive)(closed.in_avals, directions)
            return [derivative, *_derivatives(derivative, orders - 1)]
    return []
