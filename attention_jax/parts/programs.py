"""A part that a user writes (a score, a mask, a bias, a normaliser) is known by its program.

Compiled programs are cached by their static arguments. But a user's object may compute something
else and still be equal to what it was: a global, an attribute or the source of a function has
changed. So each call traces such a part, on shapes, and wraps it. Two wrapped parts are
equal if their programs are, including the numbers in them: a function that is made anew in each
call is compiled once.

Scores and normalisers are static arguments: their wrapper is a `Known`. Masks and biases hold
arrays that JAX differentiates: their wrapper is a pytree (`positions.py`), with the program as a
static field. For each kind of part, a subclass of `Contract` says how it is traced and checked.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax

from attention_jax.core.names import nested_parts
from attention_jax.parts.digests import CALLS_PYTHON, program_digest
from attention_jax.parts.samples import Numbers, sample_numbers
from attention_jax.parts.user_code import UserCode, is_users

Size = tuple[int, int]  # the numbers of queries and of keys of a tile

_PROGRAMS: dict[tuple[str, str], Program] = {}  # by the name and digest of a part
_KNOWN: weakref.WeakValueDictionary[Any, Known] = weakref.WeakValueDictionary()
# Methods that are called with the tokens, features or logits of a tile.
_ON_TILES = ("project_query", "project_key", "pair", "pair_vjp", "transform", "weight", "inverse")


class Contract(UserCode):
    """A user's part, and what a part of its kind must keep. There is a subclass for each kind.

    Attributes:
        small: numbers of queries and of keys, unequal, on which a new part is traced and checked.
    """

    small: Size = (3, 5)

    def results(self, *arguments: Any) -> Any:
        """What the methods of the user give. Each result is checked."""

    def shapes(self, size: Size) -> Any:
        """The shapes of the arguments of `results`, on a tile."""

    def check(self, size: Size) -> None:
        """Raises ValueError if the part, new on tokens of this size, breaks its contract."""

    def trace(self, size: Size) -> str:
        """The digest of the part's program on a tile, see `program_digest`."""
        return program_digest(self, self.results, *self.shapes(size))

    def program(self, lengths: Any) -> Program:
        """The program of the part on the tokens of a call, and on the tiles that it got before.

        A part may branch on the number of its tokens. So it is traced for those of the call, and
        again on each tile with which it was called in it.

        Args:
            lengths: T and S of the call; None, or symbolic ones, for `small`.
        """
        known = lengths is not None and all(isinstance(n, int) and n > 0 for n in lengths)
        size = tuple(lengths) if known else self.small
        try:
            digest = self.trace(size)
        except ValueError:
            self.trace(self.small)  # whose message has no two equal sizes
            raise
        program = _PROGRAMS.get((self.name, digest))
        if program is None:
            if size != self.small:
                self.program(self.small)
            self.check(size)
        elif all(self.trace(tile) == then for tile, then in [*program.tiles.items()][1:]):
            return program
        program = _PROGRAMS[self.name, digest] = Program(size, digest)
        return program


class Program:
    """The digests of a part's program: on tokens of a size, and on the tiles that it was called on.

    A program is equal to itself alone, and the parts that have it share it.
    """

    def __init__(self, size: Size, digest: str):
        self.size, self.digest, self.tiles = size, digest, {size: digest}

    def __deepcopy__(self, memo: Any) -> Program:
        return self

    def check(self, part: Contract, tile: Size) -> None:
        """Raises ValueError unless a part has this program still, also on a tile."""
        for size in dict.fromkeys((self.size, tile)):
            now = part.trace(size)
            if self.tiles.setdefault(size, now) != now:
                raise ValueError(
                    f"{part.name} must not change between a call of attention and its derivative,"
                    " which would mix old and new numbers; call the function again, or compile it"
                    " again, after a change"
                )


class StaticContract(Contract):
    """The contract of a score or a normaliser, whose wrapper is a `Known`.

    Attributes:
        dtype: float32 or float64, in which the part computes.
        params: the shapes of its parameters.
        facts: what the library reads of the part beside its program, hashable.
        sampled: the shapes of `sample_numbers`.
    """

    dtype: Any
    params: Any
    facts: tuple[Any, ...]
    sampled: tuple[Any, ...]

    def init(self, rng: Any) -> Any:
        """The parameters of a PRNG key."""

    def arrays(self, size: Size) -> Any:
        """The shapes of the arrays that `results` takes beside the parameters."""

    def tile_size_of(self, name: str, arguments: Any, size: Size) -> Any:
        """The size of the tile on which a method was called, in a call of `size` tokens."""

    def check_numbers(self) -> None:
        """Raises ValueError if the part breaks its contract on numbers."""

    def check(self, size: Size) -> None:
        if size == self.small:
            self.check_numbers()

    def shapes(self, size: Size) -> Any:
        params = jax.tree.map(lambda leaf: self.shape(*leaf.shape), self.params)
        return [params, *(self.shape(*shape) for shape in self.arrays(size))]

    def shape(self, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, self.dtype)

    def trace_init(self) -> str:
        """The digest of the part's `init`, on which no call depends, but a run does."""
        return program_digest(self, self.init, jax.eval_shape(lambda: jax.random.key(0)))

    def sample(self) -> Numbers:
        """Numbers by which a changed program is compared; see `sample_numbers`."""
        return self.call("its derivative", sample_numbers, self.part, self.init, *self.sampled)

    def known(self, lengths: Any) -> Any:
        """The `Known` of this part, checked if its program was not seen before."""
        program = self.program(lengths)
        # The classes say how it is computed.
        kinds = tuple(map(type, nested_parts(self.part)))
        key: tuple[Any, ...] = program, kinds, self.facts
        # Which function of Python a program calls is not in its digest, nor is the `init`.
        if is_users(self.part, "init") or program.digest.endswith(CALLS_PYTHON):
            key += (_itself(self.part),)
        new = Known(self.part, key, program.digest, self, program)
        held = _KNOWN.setdefault(key, new)
        vars(held).update(vars(new))  # compiled functions may hold it; this part is newer
        return held


class Known:
    """Stands in for the parts with one program, and holds the newest of them.

    It has all attributes and methods of that part. For a derivative JAX may trace a method again
    later. So the programs are compared again, and a part that has changed since is refused.

    Args:
        part: the part.
        key: what is equal for equal parts.
        digest: that of the part's program.
        contract: the part's; None for settings, which have no program of their own.
        program: the part's, on the tokens of a call.
    """

    def __init__(self, part: Any, key: Any, digest: str, contract: Any = None, program: Any = None):
        self.part, self.key, self.digest = part, key, digest
        self.contract, self._program = contract, program

    def __getattr__(self, name: str) -> Any:
        if "part" not in vars(self):  # while it is copied
            raise AttributeError(name)
        value = getattr(self.part, name)
        if value is self.part:
            return self
        if callable(value) and self.contract and name not in ("init", "param_shapes"):
            if name in _ON_TILES:
                return functools.partial(self._on_tile, name, value)
            self._program.check(self.contract, self._program.size)
        return value

    def _on_tile(self, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
        tile = self.contract.tile_size_of(name, arguments, self._program.size)
        self._program.check(self.contract, tile)
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
