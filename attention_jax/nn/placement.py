"""How a model's tokens are told where they stand: settings, and the codes or rotations."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_choice
from attention_jax.core.explicit_axes import explicit_spec, on_automatic_axes
from attention_jax.nn.lookup import rows_of
from attention_jax.nn.parameters import Dtype
from attention_jax.nn.positions import (
    Anchor,
    anchored_places,
    check_wavelength,
    learned_codes,
    random_positions,
    random_window_positions,
    rotary,
    sinusoidal_codes,
)

Array = jax.Array
Positions = tuple[Array, ...]  # int [T] or [*B, T] each: from the start, the end, or one and other
PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Draw = Literal["none", "subset", "window"]


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """How tokens are told where they stand.

    Attributes:
        kind: "sinusoidal" or "learned" codes, added to embeddings; "rotary", a rotation of queries
            and keys in every attention; "none".
        anchor: where the tokens of the source are counted from: their "start", their "end", or
            "both", which have half of the features each. The target, whose end is not known while
            it is written, is counted from its start.
        draw: in training, positions are 0, 1, 2, ... ("none"), an ordered random "subset" of all
            `limit` of them, or one of a random "window" (see `random_window_positions`). Source and
            target of a batch have the same. In evaluation they are neighbours; a model that knows
            subsets of a large range wants to be given one as `places`.
        limit: how many positions there are to draw from and, for "learned", to learn.
        max_wavelength: of the slowest sines, cosines and rotations.
        min_wavelength: of the fastest sines and cosines: below 1, neighbours differ more.
        scale: factor of the codes; embeddings have variance 1, sines and cosines 1/2.

    Raises:
        ValueError: there is no such kind, anchor or draw, or a number is not above 0.
    """

    kind: PositionKind = "sinusoidal"
    anchor: Anchor = "start"
    draw: Draw = "none"
    limit: int = 512
    max_wavelength: float = 10_000.0
    min_wavelength: float = 1.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, PositionKind)
        check_choice("anchor", self.anchor, Anchor)
        check_choice("draw", self.draw, Draw)
        whole = isinstance(self.limit, int) and not isinstance(self.limit, bool)
        if not whole or self.limit < 1:
            raise ValueError(f"limit must be an integer of at least 1; got {self.limit!r}")
        check_wavelength("max_wavelength", self.max_wavelength)
        check_wavelength("min_wavelength", self.min_wavelength)
        if self.min_wavelength > self.max_wavelength:
            raise ValueError(
                f"max_wavelength must be at least min_wavelength {self.min_wavelength};"
                f" got {self.max_wavelength}"
            )
        check_wavelength("scale", self.scale)

    @property
    def ends(self) -> int:
        """How many numbers a token has: each has that share of its features."""
        return 2 if self.anchor == "both" else 1

    @property
    def rotary_wavelength(self) -> float | None:
        """What attention is told."""
        return self.max_wavelength if self.kind == "rotary" else None

    @property
    def first(self) -> int:
        """The first position of a sequence that is not trained on.

        Windows seldom reach the ends of their range: there is little to know of its start.
        """
        return 0 if self.draw == "none" else self.limit // 8

    def check_room(self, count: int) -> None:
        """Raises ValueError unless so many tokens find positions in training.

        Beyond `limit` sines, cosines and rotations carry on in evaluation, though never trained.
        """
        room = self.limit - (self.first if self.kind == "learned" else 0)
        if count > room and (self.draw != "none" or self.kind == "learned"):
            raise ValueError(
                f"positions must have a limit that holds {count} tokens, EOS included; limit"
                f" {self.limit} holds {room}"
            )

    def check_dim(self, name: str, dim: int) -> None:
        """Raises ValueError unless codes or rotations of this size can be made."""
        if self.kind != "none" and dim % (2 * self.ends):
            raise ValueError(
                f"{name} must be a multiple of {2 * self.ends}, for {self.kind} positions anchored"
                f" at {self.anchor}; got {dim}"
            )

    @classmethod
    def from_words(cls, words: Sequence[str]) -> PositionConfig:
        """As a command line has them: a kind or a name in `NAMED_POSITIONS`, and settings.

        >>> PositionConfig.from_words(["learned", "anchor=both", "limit=64"]).limit
        64

        Raises:
            ValueError: a word is none of these.
        """
        name, *settings = words or [""]
        kinds = typing.get_args(PositionKind)
        if name not in (*kinds, *NAMED_POSITIONS):
            raise ValueError(
                f"positions must begin with {', '.join((*kinds, *NAMED_POSITIONS))}; got {name!r}"
            )
        base = NAMED_POSITIONS.get(name) or cls(kind=typing.cast(PositionKind, name))
        fields: dict[str, Any] = {key: type(getattr(base, key)) for key in _USED[base.kind]}
        found: dict[str, Any] = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if key not in fields:
                expected = ", ".join(f"{field}=..." for field in fields) or "nothing"
                raise ValueError(f"positions {name} may be followed by {expected}; got {setting!r}")
            if key in found:
                raise ValueError(f"positions must have {key} once; got {' '.join(words)!r}")
            try:
                found[key] = fields[key](value)
            except ValueError as error:
                raise ValueError(f"positions {setting!r}: {error}") from error
        return dataclasses.replace(base, **found)

    def to_words(self) -> list[str]:
        """What `from_words` makes this of, but for settings that its kind does not read."""
        for name, named in NAMED_POSITIONS.items():
            if self == named:
                return [name]
        plain, settings = PositionConfig(), []
        for name in _USED[self.kind]:
            if getattr(self, name) != getattr(plain, name):
                settings.append(f"{name}={getattr(self, name)}")
        return [self.kind, *settings]


_USED = {  # settings that a kind reads
    "sinusoidal": ("anchor", "draw", "limit", "max_wavelength", "min_wavelength", "scale"),
    "learned": ("anchor", "draw", "limit", "scale"),
    "rotary": ("anchor", "draw", "limit", "max_wavelength"),
    "none": (),
}

# What solves strings far longer than those of training, if the i-th letter to be written is the
# i-th from the source's end. Fast waves tell neighbours apart, the factor codes from letters.
ANY_LENGTH = PositionConfig(
    anchor="end", draw="window", limit=8192, max_wavelength=100.0, min_wavelength=0.4, scale=8.0
)
NAMED_POSITIONS = {"any-length": ANY_LENGTH}


class Placement(nnx.Module):
    """Codes of positions, those of the learned kind with a table; and which positions there are.

    Args:
        config: the settings.
        dim: size of the tokens.
        param_dtype: dtype of the table.
        rngs: where the initial table comes from.

    >>> place = Placement(PositionConfig(anchor="end"), 8, rngs=nnx.Rngs(0))
    >>> places = place.places(5)
    >>> place.source_positions(places, 4, jnp.array([3]))
    (Array([[2, 1, 0, 0]], dtype=int32),)
    >>> place.codes(place.target_positions(places, 5)).shape
    (5, 8)
    """

    def __init__(
        self,
        config: PositionConfig,
        dim: int,
        *,
        param_dtype: Dtype = jnp.float32,
        rngs: nnx.Rngs,
    ):
        config.check_dim("dim", dim)
        self.config, self.dim = config, dim
        self.table = (
            nnx.Param(_table(config, dim, rngs).astype(param_dtype))
            if config.kind == "learned"
            else None
        )

    def places(self, count: int, rng: Array | None = None) -> Array:
        """The numbers that tokens get which stand 0, 1, 2, ... away from where they are counted.

        Args:
            count: how many tokens, of source or target.
            rng: one PRNG key, for training; None for numbers one after another: from 0, or, where
                training draws them, from limit / 8.

        Returns:
            int [count], rising.

        Raises:
            ValueError: there are not so many positions.
        """
        config = self.config
        if config.kind == "learned" or rng is not None:
            config.check_room(count)
        if config.draw == "none" or rng is None:
            return config.first + jnp.arange(count)
        draw = random_positions if config.draw == "subset" else random_window_positions
        return draw(rng, count, config.limit)

    def source_positions(self, places: Array, length: int, lengths: Array) -> Positions:
        """Of tokens [*B, S], `lengths` [*B] of which are real: int [*B, S] each."""
        found = anchored_places(length, lengths, self.config.anchor)
        return tuple(rows_of(places, place) for place in found)

    def target_positions(self, places: Array, length: int, first: Array | int = 0) -> Positions:
        """Of the tokens that stand `first`, ... from the target's start: int [T] each."""
        return (places[first + jnp.arange(length)],) * self.config.ends

    def codes(self, positions: Positions) -> Array | None:
        """What is to be added to embeddings: float [*B, T, dim]; None if nothing is."""
        config = self.config
        if config.kind not in ("sinusoidal", "learned"):
            return None
        parts = []
        for part in positions:
            if self.table is not None:
                parts.append(learned_codes(self.table[...], part))
            else:
                waves = {
                    "max_wavelength": config.max_wavelength,
                    "min_wavelength": config.min_wavelength,
                }
                parts.append(sinusoidal_codes(part, self.dim // config.ends, **waves))
        # Positions from the end depend on lengths, and are cut as these over Explicit mesh axes.
        cuts = max(map(explicit_spec, parts), key=lambda spec: len(spec) - spec.count(None))
        join = functools.partial(jnp.concatenate, axis=-1)
        return config.scale * on_automatic_axes(join, cuts, parts)


def _table(config: PositionConfig, dim: int, rngs: nnx.Rngs) -> Array:
    """Of the variance that sines and cosines have."""
    shape = (config.limit, dim // config.ends)
    return jax.random.normal(rngs.params(), shape) * 0.5**0.5


def check_positions(positions: Positions, ends: int) -> None:
    """Raises ValueError unless there are as many as `ends` says."""
    if not isinstance(positions, tuple) or len(positions) != ends:
        came = f"{len(positions)} of them" if isinstance(positions, tuple) else "no tuple"
        raise ValueError(f"positions must be a tuple of {ends} arrays of integers; got {came}")


def rotated(x: Array, positions: Positions, *, max_wavelength: float) -> Array:
    """`rotary`, each of the positions having its share of the features of x [*B, T, D]."""
    parts = jnp.split(x, len(positions), axis=-1)
    turned = [
        rotary(part, of_part, max_wavelength=max_wavelength)
        for part, of_part in zip(parts, positions, strict=True)
    ]
    return jnp.concatenate(turned, axis=-1)
