"""Tiles of pairs in the registers of a warpgroup: the operations that the GPU kernels consist of.

A tile has 64 rows and 64 columns. Its 128 threads hold it in the layout of the tensor cores'
results, in which a row lies in four threads of one warp. So the sum of a row takes two exchanges
between threads, and a number for each row or column is loaded by the threads that need it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

Array = jax.Array

ROWS = 64  # of a tile: 16 for each of the four warps
_SHAPE = ROWS, ROWS
_TILE_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT, _COLUMN_LAYOUT = _TILE_LAYOUT.reduce(1), _TILE_LAYOUT.reduce(0)


@dataclasses.dataclass(frozen=True)
class Registers:
    """Operations on tiles [64, 64]; in the interpreter arrays have no layout."""

    interpreted: bool

    def row_vector(self, ref: Any, index: Any) -> Array:
        """`ref[index]`, [64], a number for each row."""
        return self._laid_out(ref[index], _ROW_LAYOUT)

    def rows(self, ref: Any, index: Any) -> Array:
        """`ref[index]`, [64], the same in all columns."""
        return self.spread(self.row_vector(ref, index))

    def along_columns(self, ref: Any, index: Any) -> Array:
        """`ref[index]`, [64], the same in all rows."""
        return lax.broadcast_in_dim(self._laid_out(ref[index], _COLUMN_LAYOUT), _SHAPE, (1,))

    def spread(self, vector: Array) -> Array:
        """[64] -> [64, 64]"""
        return lax.broadcast_in_dim(vector, _SHAPE, (0,))

    def filled(self, number: Any) -> Array:
        """A tile of one number."""
        return self._laid_out(jnp.full(_SHAPE, number, jnp.float32), _TILE_LAYOUT)

    def row_vector_filled(self, number: float) -> Array:
        """[64] of one number."""
        return self._laid_out(jnp.full((ROWS,), number, jnp.float32), _ROW_LAYOUT)

    def positions(self, axis: int) -> Array:
        """The row (axis 0) or the column (axis 1) of each entry, int32."""
        return self._laid_out(lax.broadcasted_iota(jnp.int32, _SHAPE, axis), _TILE_LAYOUT)

    def reciprocal(self, tile: Array) -> Array:
        """1 / tile for normal numbers, to one unit in the last place: one instruction."""
        if self.interpreted:
            return 1 / tile
        of_tile = plgpu.ShapeDtypeStruct(tile.shape, jnp.dtype(jnp.float32), layout=_TILE_LAYOUT)

        @plgpu.inline_mgpu(arg_types=(_TILE_LAYOUT,), return_type=of_tile)
        def inline(context: Any, tile: Any) -> Any:
            return tile._pointwise(tile._lift_fast_instr("rcp.approx.ftz.f32"))

        return inline(tile)

    def _laid_out(self, array: Array, layout: Any) -> Array:
        return array if self.interpreted else plgpu.layout_cast(array, layout)


def loop(count: Any, body: Callable[[Any], None]) -> None:
    """body(0), ..., body(count - 1)"""

    def step(n: Any, carry: None) -> None:
        body(n)

    lax.fori_loop(0, count, step, None)
