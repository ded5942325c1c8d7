"""Masks and biases of tokens that are not one sequence but chunks of one, each padded.

What a device holds of a sequence that is cut up. Tiles lie inside chunks, so that a mask or a bias
is asked of consecutive positions, as ever.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from attention_jax.pairwise.biases import Bias, bias_dataclass
from attention_jax.pairwise.mask_algebra import Mask, TileStatus, mask_dataclass
from attention_jax.pairwise.position_functions import part_field

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["starts"], meta_fields=["length", "tile"]
)
@dataclasses.dataclass(frozen=True)
class Chunks:
    """Where tokens stand in their sequence. An index counts them, the padding of chunks included.

    Attributes:
        starts: int [chunks], the position of each one's first token.
        length: how many tokens each has.
        tile: each is padded to whole tiles of this size.
    """

    starts: Array
    length: int
    tile: int

    @property
    def padded(self) -> int:
        """The length of a chunk and its padding."""
        return self.tile * math.ceil(self.length / self.tile)

    @property
    def tiles(self) -> int:
        """How many tiles there are in all."""
        return self.starts.shape[0] * self.padded // self.tile

    def positions(self, indices: Array) -> Array:
        """Int [n] -> int [n]. Those of padding go on where the chunk ends, and mean nothing."""
        starts = self.starts.astype(indices.dtype)
        return starts[indices // self.padded] + indices % self.padded

    def real(self, indices: Array) -> Array:
        """Int [n] -> bool [n], whether it is a token and not padding."""
        return indices % self.padded < self.length

    def pad(self, tokens: Array) -> Array:
        """[chunks * length, D] -> [chunks * padded, D]."""
        count, features = self.starts.shape[0], tokens.shape[-1]
        chunks = tokens.reshape(count, self.length, features)
        chunks = jnp.pad(chunks, ((0, 0), (0, self.padded - self.length), (0, 0)))
        return chunks.reshape(count * self.padded, features)

    def without_padding(self, tiles: Array) -> Array:
        """[tiles, tile, ...] -> [chunks * length, ...]."""
        count, rest = self.starts.shape[0], tiles.shape[2:]
        chunks = tiles.reshape(count, self.padded, *rest)[:, : self.length]
        return chunks.reshape(count * self.length, *rest)


@mask_dataclass
class ChunkedMask(Mask):
    """A mask of the whole sequences, None for no mask, asked by index; never true of padding."""

    mask: Mask | None = part_field()
    queries: Chunks = part_field()
    keys: Chunks = part_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        # By index: padding's positions are those of other tokens.
        real = self.queries.real(query_positions)[:, None] & self.keys.real(key_positions)[None, :]
        if self.mask is None:
            return real
        where = self.queries.positions(query_positions), self.keys.positions(key_positions)
        return real & self.mask.allowed(*where)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        whole = self.queries.real(query_positions[-1]) & self.keys.real(key_positions[-1])
        if self.mask is None:
            return TileStatus(empty=jnp.zeros((), bool), full=whole)
        # Asked of the padding too, so of more pairs: what is true of those is true of fewer.
        where = self.queries.positions(query_positions), self.keys.positions(key_positions)
        status = self.mask.tile_status(*where)
        return TileStatus(empty=status.empty, full=status.full & whole)


@bias_dataclass
class ChunkedBias(Bias):
    """A bias of the whole sequences, asked by index."""

    bias: Bias = part_field()
    queries: Chunks = part_field()
    keys: Chunks = part_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        return self.bias.values(
            self.queries.positions(query_positions), self.keys.positions(key_positions)
        )
