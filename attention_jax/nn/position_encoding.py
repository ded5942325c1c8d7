"""The encoding of positions in a model: ids of its tokens, vectors for embeddings, rotations."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.positions import (
    anchored_positions,
    check_wavelength,
    learned_encoding,
    random_position_ids,
    random_window_position_ids,
    rotary,
    rows_of,
    sinusoidal_encoding,
)

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
        self.config = config
        is_learned = config.positions == "learned"
        self.table = nnx.Param(_initial_table(config, rngs)) if is_learned else None

    def ids(self, count: int, rng: Array | None = None) -> Array:
        """The ids of the positions 0, 1, 2, ...

        Args:
            count: number of positions, at least as many as source and target have tokens.
            rng: one PRNG key, for training. None for consecutive ids: from 0, or from `limit` / 8
                if training draws ids.

        Returns:
            int [count], increasing.

        Raises:
            ValueError: there are fewer than `count` ids.
        """
        config = self.config
        if config.positions == "learned" or rng is not None:
            config.check_length(count)
        if config.position_draw == "none" or rng is None:
            return config.first_position_id + jnp.arange(count)
        draw = (
            random_position_ids if config.position_draw == "subset" else random_window_position_ids
        )
        return draw(rng, count, config.position_limit)

    def source_ids(self, ids: Array, length: int, lengths: Array) -> PositionIds:
        """Ids of source tokens [*B, length], of which `lengths` [*B] are real: int [*B, length].

        `ids` [P] are those of the positions 0, 1, 2, ..., from `PositionEncoding.ids`.
        """
        positions = anchored_positions(length, lengths, self.config.position_anchor)
        return tuple(rows_of(ids, position) for position in positions)

    def target_ids(self, ids: Array, length: int) -> PositionIds:
        """Ids of the target tokens at the positions 0, 1, 2, ...: int [length]."""
        return (ids[:length],) * self.config.num_position_ids

    def __call__(self, position_ids: PositionIds) -> Array | None:
        """The vectors to add to embeddings: float [*B, T, dim]; None for "rotary" and "none"."""
        config = self.config
        if config.positions not in ("sinusoidal", "learned"):
            return None
        if self.table is not None:
            parts = [learned_encoding(self.table[...], ids) for ids in position_ids]
        else:
            size = config.dim // config.num_position_ids
            waves = {
                "max_wavelength": config.max_wavelength,
                "min_wavelength": config.min_wavelength,
            }
            parts = [sinusoidal_encoding(ids, size, **waves) for ids in position_ids]
        # Over Explicit mesh axes, ids counted from the end are sharded as lengths are; others not.
        spec = max(map(explicit_spec, parts), key=lambda spec: len(spec) - spec.count(None))
        join = functools.partial(jnp.concatenate, axis=-1)
        return config.position_scale * on_automatic_axes(join, spec, parts)


def _initial_table(config: ModelConfig, rngs: nnx.Rngs) -> Array:
    """Random, with the variance that sines and cosines have."""
    shape = (config.position_limit, config.dim // config.num_position_ids)
    return jax.random.normal(rngs.params(), shape, jnp.float32) * 0.5**0.5


@dataclasses.dataclass(frozen=True)
class Rotation:
    """`rotary` for tokens with one position id each, or two that rotate half of the features each.

    Attributes:
        max_wavelength: as in `rotary`.
        num_position_ids: position ids of each token, 1 or 2.

    Raises:
        ValueError: the wavelength is not a finite number above 0, or `num_position_ids` is not 1
            or 2.
    """

    max_wavelength: float
    num_position_ids: int = 1

    def __post_init__(self) -> None:
        check_wavelength("rotary_wavelength", self.max_wavelength)
        check_integer("num_position_ids", self.num_position_ids)
        if self.num_position_ids > 2:
            raise ValueError(f"num_position_ids must be 1 or 2; got {self.num_position_ids}")

    def check_dim(self, name: str, dim: int) -> None:
        """Raises ValueError unless `dim` features can be rotated."""
        if dim % (2 * self.num_position_ids):
            raise ValueError(
                f"{name} must be a multiple of {2 * self.num_position_ids} to be rotated; got {dim}"
            )

    def consecutive_ids(self, length: int, first: Array | int = 0) -> PositionIds:
        """The default ids of `length` tokens: `first`, `first` + 1, ..."""
        return (first + jnp.arange(length),) * self.num_position_ids

    def __call__(self, x: Array, position_ids: PositionIds | None) -> Array:
        """Rotates x [*B, T, D] by the ids of its tokens; None for 0, 1, 2, ..."""
        if position_ids is None:
            position_ids = self.consecutive_ids(x.shape[-2])
        if not isinstance(position_ids, tuple) or len(position_ids) != self.num_position_ids:
            came = f"{len(position_ids)} of them" if isinstance(position_ids, tuple) else "no tuple"
            raise ValueError(
                f"position_ids must be a tuple of {self.num_position_ids} arrays of integers;"
                f" got {came}"
            )
        parts = zip(jnp.split(x, len(position_ids), axis=-1), position_ids, strict=True)
        rotated = [rotary(part, ids, max_wavelength=self.max_wavelength) for part, ids in parts]
        return jnp.concatenate(rotated, axis=-1)
