"""`known_positions`: masks and biases of a user, traced, checked, and known by their programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import broadcasts
from attention_jax.core.names import is_of_this_package
from attention_jax.parts.programs import Contract, Program, Size
from attention_jax.parts.samples import on_numbers
from attention_jax.parts.user_code import is_array
from attention_jax.positions.contract import Bias, Mask, TileStatus
from attention_jax.positions.function import PositionFunction, function_field, position_dataclass
from attention_jax.positions.masks import TokenMask

Array = jax.Array


@position_dataclass
class _KnownPart(PositionFunction):
    """A user's mask or bias with its program, a static option: a new one recompiles.

    Its methods raise ValueError unless the program is still that of the call.
    """

    program: Program
    part: Any = function_field()

    def on_tile(self, *positions: Array) -> Any:
        """The part, for a tile of these positions."""
        queries, keys = (each.shape[0] for each in positions)
        self.program.check(PositionsContract(self.part), (queries, keys))
        return self.part

    def at(self, query_positions: Array, key_positions: Array) -> Array:
        return self.on_tile(query_positions, key_positions).at(query_positions, key_positions)


@position_dataclass
class KnownMask(_KnownPart, Mask):
    """A user's mask with its digest."""

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        positions = query_positions, key_positions
        return self.on_tile(*positions).tile_status(*positions)

    def most_keys(self) -> int:
        return self.part.most_keys()


@position_dataclass
class KnownBias(_KnownPart, Bias):
    """A user's bias with its digest."""


def known_positions(function: Any, lengths: tuple[int, int], dtype: Any) -> Any:
    """A mask or bias in which each part that a user wrote is traced and known by its program.

    The `tile_status` of a mask that was not seen before with these lengths is compared with its
    `allowed` on small tiles of the call, unless an array of the mask is traced. A user's mask hides
    no key of a query for which an array [*B] or [*B, T] of it is NaN.

    Args:
        function: a `Mask` or `Bias` that has been checked. Its arrays may have batch axes.
        lengths: T and S.
        dtype: float32 or float64, in which attention computes.

    Raises:
        ValueError: `allowed` or `values` fails or does not return an array of the right kind,
            the part uses a traced array that is no field, or a `tile_status` is wrong.
    """

    def is_of_user(part: Any) -> bool:
        return isinstance(part, PositionFunction) and not is_of_this_package(type(part))

    def known(function: Any) -> Any:
        if not is_of_user(function):
            return function
        program = PositionsContract(function, dtype, lengths).program(lengths)
        if not isinstance(function, Mask):
            return KnownBias(program, function)
        mask: Mask = KnownMask(program, function)
        for unknown in function.unknown_rows():
            # A NaN, compared with distances, might hide all keys: attention makes the row NaN.
            mask = mask | TokenMask(jnp.ones(1, bool), unknown)
        return mask

    def is_whole(part: Any) -> bool:
        return is_of_user(part) or isinstance(part, _KnownPart)

    return jax.tree.map(known, function, is_leaf=is_whole)


class PositionsContract(Contract):
    """What a mask or a bias must keep.

    Args:
        function: the mask or bias. Its arrays may have batch axes.
        dtype: that of attention; float16 for a part whose widths have been checked.
        lengths: T and S of the call.
    """

    def __init__(self, function: PositionFunction, dtype: Any = jnp.float16, lengths: Any = None):
        remedy = "make it a field made by array_field()"
        super().__init__(function.kind, type(function).__name__, remedy)
        self.check_signatures(function)
        self.part, self.dtype, self.lengths = function, dtype, lengths
        self.has_status = (
            isinstance(function, Mask) and type(function).tile_status is not Mask.tile_status
        )

    def shapes(self, size: Size) -> Any:
        def without_batch(leaf: Any, ndim: int) -> jax.ShapeDtypeStruct:
            dtype = jnp.result_type(leaf)
            if jnp.issubdtype(dtype, jnp.floating):
                dtype = jnp.result_type(float)  # its arrays are cast before tiles read them
            return jax.ShapeDtypeStruct(jnp.shape(leaf)[jnp.ndim(leaf) - ndim :], dtype)

        example = jax.tree.map(without_batch, self.part, self.part.core_ndims())
        positions = [jax.ShapeDtypeStruct((length,), jnp.arange(0).dtype) for length in size]
        return [example, *positions]

    def results(self, function: Any, *positions: Array) -> Any:
        is_mask, size = isinstance(function, Mask), tuple(each.shape[0] for each in positions)
        name, kind = ("allowed", jnp.bool_) if is_mask else ("values", jnp.floating)
        values = "booleans" if is_mask else f"floats of {jnp.dtype(self.dtype)} or more"
        contract = (
            f"{name} must return {values} that broadcast to {list(size)} of"
            f" {size[0]} queries, {size[1]} keys"
        )
        entries = self.call(name, getattr(function, name), *positions, of=positions, cure=contract)
        fits = is_array(entries, kind, self.dtype) and broadcasts(entries.shape, size)
        self.require(fits, contract, entries)
        if not self.has_status:
            return entries
        return entries, self.call("tile_status", function.tile_status, *positions, of=positions)

    def check(self, size: Size) -> None:
        """Raises ValueError if a tile of the first example is not as `tile_status` says.

        A longer call has tiles that a shorter one has not, so each length of a call is checked.
        """
        mask, leaves = self.part, jax.tree.leaves(self.part)
        unknown = any(isinstance(leaf, jax.core.Tracer) or np.size(leaf) == 0 for leaf in leaves)
        if unknown or size != self.lengths or not self.has_status:
            return

        def of_first(leaf: Any, ndim: int) -> np.ndarray:
            return np.asarray(leaf)[(0,) * (np.ndim(leaf) - ndim)]

        example = jax.tree.map(of_first, mask, mask.core_ndims())
        for at_most in ((2, 3), (8, 5)):
            t, s = tile_size = min(at_most[0], size[0]), min(at_most[1], size[1])
            last = size[0] - t, size[1] - s
            starts = [
                np.unique([*range(min(n, 24)), *np.linspace(0, n, 9, dtype=int)]) for n in last
            ]
            tiles = np.stack(np.meshgrid(*starts), -1).reshape(-1, 2)

            def contents(mask: Any, tile: Array, tile_size: Size = tile_size) -> Any:
                positions = [tile[axis] + jnp.arange(tile_size[axis]) for axis in (0, 1)]
                allowed = jnp.broadcast_to(mask.at(*positions), tile_size)
                return TileStatus(~allowed.any(), allowed.all()), mask.tile_status(*positions)

            actual, status = on_numbers(jax.vmap(contents, (None, 0)), example, tiles)
            for name, is_so, claimed in zip(TileStatus._fields, actual, status, strict=True):
                for i, j in tiles[claimed & ~is_so]:
                    self.require(
                        False,
                        "tile_status must agree with allowed; it calls the tile of queries"
                        f" {i} to {i + t - 1} and keys {j} to {j + s - 1} {name}",
                    )
