"""Settings of how a model encodes the positions of its tokens."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Any, Literal

from attention_jax.core.checks import check_choice, check_integer
from attention_jax.nn.positions import Anchor, check_wavelength

PositionKind = Literal["sinusoidal", "learned", "rotary", "none"]
Draw = Literal["none", "subset", "window"]


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """How a model encodes the positions of its tokens.

    Attributes:
        kind: "sinusoidal" or "learned" encodings, added to embeddings; "rotary", a rotation of
            queries and keys in every attention; "none".
        anchor: the end from which the source's tokens are counted: its "start", its "end", or
            "both", each with half of the features. The target is counted from its start, because
            its end is not known while it is generated.
        draw: the position ids of training: 0, 1, 2, ... ("none"); an ordered random "subset" of all
            `limit` ids; or a subset of a random "window" (see `random_window_position_ids`). Source
            and target of a batch share them. Evaluation uses consecutive ids. A model trained on
            subsets of a large range does better with a subset, given as `position_ids`.
        limit: number of position ids to draw from and, for "learned", rows of the table.
        max_wavelength: of the slowest sines, cosines and rotations.
        min_wavelength: of the fastest sines and cosines. Below 1, neighbours differ more.
        scale: factor of the encodings. Embeddings have variance 1, sines and cosines 1/2.

    Raises:
        ValueError: there is no such kind, anchor or draw, or a number is not above 0.

    >>> positions = PositionConfig("learned", anchor="both", limit=64)
    >>> positions.to_words(), positions.num_position_ids
    (['learned', 'anchor=both', 'limit=64'], 2)
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
        check_integer("limit", self.limit)
        check_wavelength("max_wavelength", self.max_wavelength)
        check_wavelength("min_wavelength", self.min_wavelength)
        if self.min_wavelength > self.max_wavelength:
            raise ValueError(
                f"max_wavelength must be at least min_wavelength {self.min_wavelength};"
                f" got {self.max_wavelength}"
            )
        check_wavelength("scale", self.scale)

    @property
    def num_position_ids(self) -> int:
        """Ids of each token: 2 if tokens are counted from both ends, else 1.

        Each id encodes its share of the features.
        """
        return 2 if self.anchor == "both" else 1

    @property
    def rotary_wavelength(self) -> float | None:
        """`max_wavelength` if attention rotates queries and keys, else None."""
        return self.max_wavelength if self.kind == "rotary" else None

    @property
    def first_id(self) -> int:
        """The id of position 0 in evaluation.

        Where training draws ids it is `limit` / 8: windows seldom reach the ends of the range, so
        the first ids are trained little.
        """
        return 0 if self.draw == "none" else self.limit // 8

    def check_length(self, length: int) -> None:
        """Raises ValueError unless there are ids for `length` tokens in training.

        In evaluation sines, cosines and rotations continue beyond `limit`, though never trained.
        """
        available = self.limit - (self.first_id if self.kind == "learned" else 0)
        if length > available and (self.draw != "none" or self.kind == "learned"):
            raise ValueError(
                f"positions must have a limit that holds {length} tokens, EOS included; limit"
                f" {self.limit} holds {available}"
            )

    def check_dim(self, name: str, dim: int) -> None:
        """Raises ValueError unless `dim` features can hold these encodings or rotations."""
        if self.kind != "none" and dim % (2 * self.num_position_ids):
            raise ValueError(
                f"{name} must be a multiple of {2 * self.num_position_ids}, for {self.kind}"
                f" positions anchored at {self.anchor}; got {dim}"
            )

    @classmethod
    def from_words(cls, words: Sequence[str]) -> PositionConfig:
        """Parses the words of a command line: a kind or a name in `NAMED_POSITIONS`, then settings.

        >>> PositionConfig.from_words(["learned", "anchor=both", "limit=64"]).limit
        64

        Raises:
            ValueError: a word is neither.
        """
        name, *settings = words or [""]
        kinds = typing.get_args(PositionKind)
        if name not in (*kinds, *NAMED_POSITIONS):
            raise ValueError(
                f"positions must begin with {', '.join((*kinds, *NAMED_POSITIONS))}; got {name!r}"
            )
        base = NAMED_POSITIONS.get(name) or cls(kind=typing.cast(PositionKind, name))
        types: dict[str, Any] = {field: type(getattr(base, field)) for field in _USED[base.kind]}
        changes: dict[str, Any] = {}
        for setting in settings:
            field, _, value = setting.partition("=")
            if field not in types:
                expected = ", ".join(f"{field}=..." for field in types) or "nothing"
                raise ValueError(f"positions {name} may be followed by {expected}; got {setting!r}")
            if field in changes:
                raise ValueError(f"positions must have {field} once; got {' '.join(words)!r}")
            try:
                changes[field] = types[field](value)
            except ValueError as error:
                raise ValueError(f"positions {setting!r}: {error}") from error
        return dataclasses.replace(base, **changes)

    def to_words(self) -> list[str]:
        """The words that `from_words` parses to this, without settings that the kind ignores."""
        for name, named in NAMED_POSITIONS.items():
            if self == named:
                return [name]
        defaults, settings = PositionConfig(), []
        for field in _USED[self.kind]:
            if getattr(self, field) != getattr(defaults, field):
                settings.append(f"{field}={getattr(self, field)}")
        return [self.kind, *settings]


_USED = {  # the settings that each kind reads
    "sinusoidal": ("anchor", "draw", "limit", "max_wavelength", "min_wavelength", "scale"),
    "learned": ("anchor", "draw", "limit", "scale"),
    "rotary": ("anchor", "draw", "limit", "max_wavelength"),
    "none": (),
}

# These solve strings far longer than those of training, if letter i of the output is letter i from
# the source's end. Fast waves tell neighbours apart, the scale tells encodings from letters.
ANY_LENGTH = PositionConfig(
    anchor="end", draw="window", limit=8192, max_wavelength=100.0, min_wavelength=0.4, scale=8.0
)
NAMED_POSITIONS = {"any-length": ANY_LENGTH}
