"""The encoding of positions in a model: ids of its tokens, and vectors for embeddings."""

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import any_array
from attention_jax.core.checks import check_entries
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.parameters import check_rngs
from attention_jax.nn.positions import (
    anchored_positions,
    random_position_ids,
    random_window_position_ids,
    rows_of,
    sinusoidal_encoding,
)
from attention_jax.positions.documents import Documents

Array = jax.Array
PositionIds = tuple[Array, ...]  # of tokens, int [T] or [*B, T]: one array, or two (both ends)


class PositionEncoding(nnx.Module):
    """Chooses the position ids of tokens, and encodes them; the learned kind holds a table.

    Args:
        config: the settings.
        rngs: where the initial table comes from.

    >>> encoding = PositionEncoding(ModelConfig(dim=8, position_anchor="end"), rngs=nnx.Rngs(0))
    >>> ids = encoding.ids(5)
    >>> encoding.source_ids(ids, 4, jnp.array([3]))
    (Array([[2, 1, 0, 0]], dtype=int32),)
    >>> encoding(encoding.target_ids(ids, 5)).shape
    (5, 8)
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        check_rngs(rngs)
        self.config, table = config, None
        self.size = config.dim // config.num_position_ids  # features per position id
        if config.positions == "learned":
            # With the variance that sines and cosines have.
            shape = (config.position_limit, self.size)
            table = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * 0.5**0.5)
        self.table = table

    def ids(
        self,
        count: int,
        rng: Array | None = None,
        given: Array | None = None,
        *,
        packed: bool = False,
    ) -> Array:
        """The ids of the positions 0, 1, 2, ...

        Args:
            count: number of positions, at least as many as source and target have tokens.
            rng: one PRNG key, for training. None for consecutive ids: from 0, or from
                `position_limit` / 8 if training draws ids.
            given: int [P], increasing, P at least `count`: checked and returned in place of these.
            packed: whether documents share the rows. A learned table may then have fewer than
                `count` rows, because it must hold the longest document, not the row.

        Returns:
            int [P], increasing: P is `count`, or less for `packed` and a learned table that has
            fewer rows, or that of `given`.

        Raises:
            ValueError: `given` or the table has too few ids; or ids would be drawn for documents,
                whose number of positions is not known.
        """
        config = self.config
        if packed and config.position_draw != "none" and rng is not None and given is None:
            raise ValueError(
                "position_ids must be given with segments and an rng, because position_draw"
                f" {config.position_draw!r} would draw them for the row; got None"
            )
        if packed and config.positions == "learned":
            count = min(count, config.position_limit - config.first_position_id)
        if given is not None:
            given = any_array("position_ids", given)
            if given.ndim != 1 or given.shape[0] < count:
                raise ValueError(
                    f"position_ids must be [P], P at least {count} for source and target; got"
                    f" {list(given.shape)}"
                )
            if config.positions == "learned":
                check_entries("position_ids", given, 0, config.position_limit - 1)
            return given
        if config.positions == "learned" or rng is not None:
            config.check_length(count)
        if config.position_draw == "none" or rng is None:
            return config.first_position_id + jnp.arange(count)
        is_subset = config.position_draw == "subset"
        draw = random_position_ids if is_subset else random_window_position_ids
        return draw(rng, count, config.position_limit)

    def source_ids(
        self, ids: Array, length: int, lengths: Array, documents: Documents | None = None
    ) -> PositionIds:
        """Ids of source tokens [*B, length], of which `lengths` [*B] are real: int [*B, length].

        `ids` [P] are those of the positions 0, 1, 2, ..., from `PositionEncoding.ids`. With
        `documents` positions are counted in each document.
        """
        anchor = self.config.position_anchor
        if documents is None:
            positions = anchored_positions(length, lengths, anchor)
            return tuple(rows_of(ids, position) for position in positions)
        sides = {"start": documents.position_ids, "end": documents.positions_from_end}
        names = ("start", "end") if anchor == "both" else (anchor,)
        return tuple(self._ids_in_documents(ids, sides[name]) for name in names)

    def target_ids(
        self, ids: Array, length: int, documents: Documents | None = None
    ) -> PositionIds:
        """Ids of the target tokens at the positions 0, 1, 2, ...: int [length].

        With `documents` [*B, length] positions are counted in each document: int [*B, length].
        """
        target = ids[:length]
        if documents is not None:
            target = self._ids_in_documents(ids, documents.position_ids)
        return (target,) * self.config.num_position_ids

    def _ids_in_documents(self, ids: Array, positions: Array) -> Array:
        check_entries("positions in the documents of segments", positions, 0, len(ids) - 1)
        return rows_of(ids, positions)

    def __call__(self, position_ids: PositionIds) -> Array | None:
        """The vectors to add to embeddings: float [*B, T, dim]; None for "rotary" and "none"."""
        config = self.config
        if config.positions not in ("sinusoidal", "learned"):
            return None
        parts = [
            rows_of(self.table[...], ids)
            if self.table is not None
            else sinusoidal_encoding(
                ids,
                self.size,
                max_wavelength=config.max_wavelength,
                min_wavelength=config.min_wavelength,
            )
            for ids in position_ids
        ]
        return config.position_scale * jnp.concatenate(parts, axis=-1)
