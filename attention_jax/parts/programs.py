"""A part that a user writes (a score, a mask, a bias, a normaliser) is known by its program.

Compiled programs are cached by their static arguments. But a user's object may compute something
else and still be equal to what it was: a global, an attribute or the source of a function has
changed. So each call traces such a part, on shapes, and replaces it by a stand-in. Two of these are
equal if their programs are, including the numbers in them: a function that is made anew in each
call is compiled once.

Scores and normalisers are static arguments: their stand-in is a `Known`. Masks and biases hold
arrays that JAX differentiates: their stand-in is a pytree (`positions.py`), with the digest of the
program as a static field. A `Part` traces and checks both.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.errors import one_line, users_line
from attention_jax.core.names import is_of_this_package
from attention_jax.parts.digests import CALLS_PYTHON, program_digest
from attention_jax.parts.samples import Numbers, sample_numbers

Size = tuple[int, int]  # the numbers of queries and of keys of a tile

_SEEN: set[tuple[str, str]] = set()  # what has been checked on numbers
_PROGRAMS: dict[tuple[str, str], Program] = {}  # by the name and digest of a part
_VERSIONS = itertools.count()
_KNOWN: weakref.WeakValueDictionary[Any, Known] = weakref.WeakValueDictionary()
# Methods that are called with the tokens, features or logits of a tile.
_ON_TILES = ("project_query", "project_key", "pair", "pair_vjp", "transform", "weight", "inverse")
_CURES: list[tuple[type[Exception], str]] = [
    (jax.errors.TracerArrayConversionError, "use jax.numpy in place of numpy"),
    (jax.errors.TracerBoolConversionError, "use jnp.where in place of a branch on an array"),
    (jax.errors.ConcretizationTypeError, "use jnp functions of the array, not its Python value"),
]


class Part:
    """Calls and traces the methods of a part that a user wrote, and words the errors about it.

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

    def program(
        self, trace: Callable[[Size], str], small: Size, lengths: Any, check: Callable[[str], None]
    ) -> Program:
        """The program of the part on the tokens of a call, and on the tiles that it got before.

        A part may branch on the number of its tokens. So it is traced for those of the call, and
        again on each tile with which it was called in it.

        Args:
            trace: gives the digest of the part's program for a number of queries and of keys.
            small: such numbers, unequal, on which a part that was not seen before is traced first.
            lengths: T and S of the call; None, or symbolic ones, for `small`.
            check: takes the digest for `small`; raises ValueError if the part breaks its contract.
        """
        known = lengths is not None and all(isinstance(n, int) and n > 0 for n in lengths)
        size = tuple(lengths) if known else small
        try:
            digest = trace(size)
        except ValueError:
            trace(small)  # whose message has no two equal sizes
            raise
        program = _PROGRAMS.get((self.name, digest))
        if program is None:
            check(digest if size == small else trace(small))
        if program is None or any(trace(tile) != then for tile, then in program.tiles.items()):
            program = _PROGRAMS[self.name, digest] = Program(size, digest, next(_VERSIONS), {})
        return program

    def check_once(self, digest: str, check: Callable[[], None]) -> None:
        """Calls `check` unless a part with this name and program has passed it before."""
        if (self.name, digest) not in _SEEN:
            check()
            _SEEN.add((self.name, digest))

    def known(
        self,
        program: Callable[..., Any],
        arguments: Callable[[Any, Any], Any],
        sizes: tuple[Size, Any],
        check: Callable[[], None],
        init: Callable[[jax.Array], Any],
        sampled: Any,
        *,
        alone: bool,
        **about: Any,
    ) -> Any:
        """The `Known` of this part, after `check` where its program was not seen before.

        Args:
            program: takes pytrees of arrays, returns one, and calls all methods but `init`.
            arguments: makes the shapes of its arguments for a number of queries and of keys.
            sizes: `small` and `lengths`, see `program`.
            check: raises ValueError if the part breaks its contract.
            init: makes params of a PRNG key.
            sampled: the shapes of `sample_numbers`.
            alone: whether no other part is equal, because its `init` is a user's.
            about: `tile_of` and `facts` of the `Known`.
        """

        def trace(size: Any) -> str:
            return self.trace(program, *arguments(*size))

        known = Known(
            self.part,
            self.program(trace, *sizes, lambda digest: self.check_once(digest, check)),
            trace,
            alone=alone,
            trace_init=lambda: self.trace(init, jax.eval_shape(lambda: jax.random.key(0))),
            sample=lambda: self.call("its derivative", sample_numbers, self.part, init, *sampled),
            **about,
        )
        held = _KNOWN.setdefault(known.key, known)
        vars(held).update(vars(known))  # compiled functions may hold it; this part is newer
        return held

    def trace(self, program: Callable[..., Any], *arguments: Any) -> str:
        """The digest of a function that calls the user's code, see `program_digest`.

        Nothing is computed and nothing is compiled.
        """
        return program_digest(program, arguments, self.name, self.remedy)


class Program(NamedTuple):
    """The digest of a part's program on tokens of a size, and on the tiles that it was called with.

    Programs that differ on a tile have other versions.
    """

    size: Size
    digest: str
    version: int
    tiles: dict[Size, str]

    def check(self, name: str, trace: Callable[[Size], str], tile: Size | None = None) -> None:
        """Raises ValueError unless the part has this program still, also on a tile."""
        check_unchanged(name, self.digest, trace(self.size))
        if tile is not None and tile != self.size:
            now = trace(tile)
            check_unchanged(name, self.tiles.setdefault(tile, now), now)


class Known:
    """Stands in for the parts with one program, and holds the newest of them.

    It has all attributes and methods of that part. For a derivative JAX may trace a method again
    later. So the programs are compared again, and a part that has changed since is refused.

    Args:
        part: the part.
        program: the part's.
        trace: gives the digest of the part's program as it is now, for a size.
        tile_of: (name of a method, size of the call, the method's arguments) -> size of the tile.
        facts: what the library reads of the part beside its program, hashable.
        alone: whether another object with this program is another part.
        trace_init: gives the digest of the part's `init`, on which no call depends, but a run does.
        sample: gives numbers by which a changed program is compared; see `sample_numbers`.
    """

    def __init__(
        self,
        part: Any,
        program: Program,
        trace: Callable[[Size], str],
        *,
        tile_of: Any = None,
        facts: Any = (),
        alone: bool = False,
        trace_init: Callable[[], str] = str,
        sample: Callable[[], Numbers] = list,
    ):
        self.part, self._program, self._trace = part, program, trace
        self.digest, self._tile_of = program.digest, tile_of
        self.trace_init, self.sample = trace_init, sample
        self.key: tuple[Any, ...] = program.digest, program.version, _kinds(part), facts
        # Which function of Python a program calls is not in its digest.
        if alone or program.digest.endswith(CALLS_PYTHON):
            self.key += (_itself(part),)

    def __getattr__(self, name: str) -> Any:
        if "part" not in vars(self):  # while it is copied
            raise AttributeError(name)
        value = getattr(self.part, name)
        if callable(value) and name not in ("init", "param_shapes"):  # not in the program
            if name in _ON_TILES:
                return functools.partial(self._on_tile, name, value)
            self._program.check(repr(self.part), self._trace)
        return self if value is self.part else value

    def _on_tile(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        tile = self._tile_of(name, self._program.size, *arguments)
        self._program.check(repr(self.part), self._trace, tile)
        return method(*arguments)

    # `isinstance` and `dataclasses.fields` read `__class__`, so that a `Known` score is a `Score`.
    # `type(score) is Known` tells it from the part itself.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.part)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.part(*arguments, **keywords)

    def __repr__(self) -> str:
        return repr(self.part)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return type(other) is Known and self.key == other.key


def _itself(part: Any) -> Any:
    """What is equal for equal parts; for parts that cannot be compared, for one object alone."""
    try:
        hash(part)
    except TypeError:  # a field holds an array
        return id(part)
    return part


def _kinds(part: Any) -> Any:
    """The classes of a part and of the parts in its fields, which say how it is computed."""
    fields = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
    values = (getattr(part, field.name) for field in fields)
    return type(part), *(_kinds(value) for value in values if callable(value))


def check_unchanged(name: str, before: Any, now: Any) -> None:
    """Raises ValueError if a part of a user is another program than when it was called."""
    if before != now:
        raise ValueError(
            f"{' '.join(name.split())} must not change between a call of attention and its"
            " derivative, which would mix old and new numbers; call the function again, or compile"
            " it again, after a change"
        )


def is_users(part: Any, method: str) -> bool:
    """Whether a user wrote a method of a part."""
    return not is_of_this_package(next(c for c in type(part).__mro__ if method in vars(c)))


# --- the words of errors ---


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


def is_wide(array: Any, dtype: Any) -> bool:
    """Whether an array has no float that is narrower than a dtype."""
    own = jnp.result_type(array)
    return not jnp.issubdtype(own, jnp.floating) or jnp.finfo(own).bits >= jnp.finfo(dtype).bits
