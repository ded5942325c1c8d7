"""Masks and biases for a device that holds several padded chunks of a longer sequence.

Every tile lies inside one chunk, so that masks and biases are evaluated at consecutive positions,
as for a whole sequence.
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
    """The chunks of a sequence. An index counts their tokens, including the padding of each chunk.

    Attributes:
        starts: int [chunks], the position of the first token of each chunk.
        length: the number of tokens of a chunk.
        tile: the size of a tile; chunks are padded to whole tiles.
    """

    starts: Array
    length: int
    tile: int

    @property
    def padded_length(self) -> int:
        """The length of a chunk with its padding."""
        return self.tile * math.ceil(self.length / self.tile)

    @property
    def num_tiles(self) -> int:
        """The number of tiles of all chunks."""
        return self.starts.shape[0] * self.padded_length // self.tile

    def positions(self, indices: Array) -> Array:
        """The positions of indices, int [n] -> int [n]; positions of padding have no meaning."""
        starts = self.starts.astype(indices.dtype)
        return starts[indices // self.padded_length] + indices % self.padded_length

    def is_token(self, indices: Array) -> Array:
        """Whether each index is that of a token rather than padding, int [n] -> bool [n]."""
        return indices % self.padded_length < self.length

    def add_padding(self, tokens: Array) -> Array:
        """[chunks * length, D] -> [chunks * padded_length, D]."""
        count, features = self.starts.shape[0], tokens.shape[-1]
        chunks = tokens.reshape(count, self.length, features)
        chunks = jnp.pad(chunks, ((0, 0), (0, self.padded_length - self.length), (0, 0)))
        return chunks.reshape(count * self.padded_length, features)

    def remove_padding(self, tiles: Array) -> Array:
        """[tiles, tile, ...] -> [chunks * length, ...]."""
        count, rest = self.starts.shape[0], tiles.shape[2:]
        chunks = tiles.reshape(count, self.padded_length, *rest)[:, : self.length]
        return chunks.reshape(count * self.length, *rest)


@mask_dataclass
class ChunkedMask(Mask):
    """A mask of the whole sequences (None: all pairs), evaluated at indices; False for padding."""

    mask: Mask | None = part_field()
    queries: Chunks = part_field()
    keys: Chunks = part_field()

    def allowed(self, query_positions: Array, key_positions: Array) -> Array:
        # The arguments are indices. The position of a padding index may be that of another token.
        query_tokens = self.queries.is_token(query_positions)[:, None]
        tokens = query_tokens & self.keys.is_token(key_positions)[None, :]
        if self.mask is None:
            return tokens
        positions = self.queries.positions(query_positions), self.keys.positions(key_positions)
        return tokens & self.mask.allowed(*positions)

    def tile_status(self, query_positions: Array, key_positions: Array) -> TileStatus:
        unpadded = self.queries.is_token(query_positions[-1]) & self.keys.is_token(
            key_positions[-1]
        )
        if self.mask is None:
            return TileStatus(empty=jnp.zeros((), bool), full=unpadded)
        # The mask's status includes the padding. What holds for all pairs holds for the tokens.
        positions = self.queries.positions(query_positions), self.keys.positions(key_positions)
        status = self.mask.tile_status(*positions)
        return TileStatus(empty=status.empty, full=status.full & unpadded)


@bias_dataclass
class ChunkedBias(Bias):
    """A bias of the whole sequences, evaluated at indices."""

    bias: Bias = part_field()
    queries: Chunks = part_field()
    keys: Chunks = part_field()

    def values(self, query_positions: Array, key_positions: Array) -> Array:
        return self.bias.values(
            self.queries.positions(query_positions), self.keys.positions(key_positions)
        )
