"""How a decoder looks at its memory: one interface for every kind of attention, by name.

Each kind can be asked for all queries at once (training) or for one after another (decoding): what
passes from query to query is a carry, what does not depend on queries is made once, a `Memory`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import check_choice, check_integer
from attention_jax.functional.memory import Memory
from attention_jax.nn.cross_attention_kinds import KINDS, Carry
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.empty_rows import project_rows
from attention_jax.nn.local import Alignment
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.placement import Positions, check_positions, rotated
from attention_jax.nn.positions import check_wavelength
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import RowScaled, Score, get_score

Array = jax.Array
AttentionKind = Literal["global", "local-m", "local-p", "coverage", "monotonic"]


@dataclasses.dataclass(frozen=True)
class CrossAttentionConfig:
    """How a decoder looks at its memory.

    Attributes:
        attention: "global" sees the whole memory; "local-m" a window around a known alignment,
            "local-p" around a predicted one; "coverage" remembers what it has attended to;
            "monotonic" never goes back.
        heads: of "global": 1 has no projections, as Bahdanau 2014 and Luong 2015; more are
            multi-head attention, between projections.
        radius: of the local kinds, keys on either side of the window's center, at least 0; at least
            1 for "local-p".
        alignment: of "local-m": "monotonic", p_i = i, or "reversed", p_i = S - 1 - i.
        rotary_wavelength: of "global": rotates queries and keys by their positions; with one head
            the tokens themselves, as keys but not as values. None for none.
        position_ends: how many numbers a position is, see `placement.Positions`.
        sharpen_from: of "global" with one head: a length n_0; the logits of a memory of n > n_0
            tokens are multiplied by log(1 + n) / log(1 + n_0). A softmax over more keys needs
            larger logits to be as sharp. None for no factor.

    Raises:
        ValueError: there is no such kind or alignment, a number is below 1, or a setting is none of
            this kind's.

    Source: Chiang and Cholak 2022 for logits that grow with log n (theirs do so from n = 1 on).
    """

    attention: AttentionKind = "global"
    heads: int = 1
    radius: int = 2
    alignment: Alignment = "reversed"
    rotary_wavelength: float | None = None
    position_ends: int = 1
    sharpen_from: int | None = None

    def __post_init__(self) -> None:
        check_choice("attention", self.attention, AttentionKind)
        check_choice("alignment", self.alignment, Alignment)
        # The Gaussian of local-p has half the radius for its deviation.
        for name, least in (("heads", 1), ("radius", int(self.attention == "local-p"))):
            check_integer(name, getattr(self, name), least)
        if self.heads > 1 and self.attention != "global":
            raise ValueError(f"heads must be 1 with attention {self.attention!r}; got {self.heads}")
        if self.position_ends not in (1, 2):
            raise ValueError(f"position_ends must be 1 or 2; got {self.position_ends!r}")
        if self.rotary_wavelength is not None:
            check_wavelength("rotary_wavelength", self.rotary_wavelength)
            if self.attention != "global":
                raise ValueError(
                    "attention must be global where positions are rotations; got"
                    f" {self.attention!r}"
                )
        if self.sharpen_from is not None:
            if self.attention != "global" or self.heads > 1:
                raise ValueError(
                    f"sharpen_from is for attention 'global' with one head; got {self.attention!r}"
                    f" with {self.heads}"
                )
            whole = isinstance(self.sharpen_from, int) and not isinstance(self.sharpen_from, bool)
            if not whole or self.sharpen_from < 1:
                raise ValueError(
                    f"sharpen_from must be an integer of at least 1; got {self.sharpen_from!r}"
                )


class CrossAttention(DropoutModule):
    """Attention of a decoder to a memory, and a projection of what it found to the decoder's size.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        dim: size of the decoder's tokens.
        memory_dim: size of the memory's.
        config: the kind and its settings.
        dropout_rate: probability that a weight is dropped, where the kind has weights to drop
            ("global" and the local kinds).
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: where the initial parameters come from, and the stream "dropout".
        options: `dtype`, `param_dtype` and, of projections, `kernel_init`; see
            `parameters.LayerOptions`.

    Raises:
        ValueError: there is no such score, or it cannot pair the two sizes.
    """

    def __init__(
        self,
        score: str | Score,
        dim: int,
        memory_dim: int,
        config: CrossAttentionConfig,
        *,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        if config.rotary_wavelength is not None:
            for name, size in (("dim", dim), ("memory_dim", memory_dim)):
                if not _is_multi_head(config) and size % (2 * config.position_ends):
                    raise ValueError(
                        f"{name} must be a multiple of {2 * config.position_ends} to be rotated;"
                        f" got {size}"
                    )
        self.config = config
        self.kind: Any = KINDS["multi-head" if _is_multi_head(config) else config.attention]
        if config.sharpen_from is not None:
            score = RowScaled(get_score(score))
        settings: Any = {**options} if _is_multi_head(config) else {**dtypes_of(options)}
        if self.kind.drops:  # with keys that this module hands on
            settings |= {"dropout_rate": dropout_rate, "keep_rngs": False}
        self.attention: Any = self.kind.make(score, dim, memory_dim, config, rngs=rngs, **settings)
        self.output = (
            None if _is_multi_head(config)
            else nnx.Linear(memory_dim, dim, use_bias=False, rngs=rngs, **options)
        )  # fmt: skip
        self._set_dropout(dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        query: Array,
        memory: Array | Memory,
        *,
        source_lengths: Array | None = None,
        mask: Mask | Array | None = None,
        first: Array | int = 0,
        positions: Positions | None = None,
        memory_positions: Positions | None = None,
        carry: Carry = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Array | None, Carry]:
        """Attends.

        Args:
            query: float [*B, T, dim].
            memory: float [*B, S, memory_dim]; or what `remember` made of it.
            source_lengths: int [*B], how many memory tokens are real; None for all.
            mask: which of them each query may attend to; padding is for it to leave out.
            first: how many queries have attended before the first of these.
            positions: of the queries, where they are rotated; None for `first` and on.
            memory_positions: of the memory's tokens, where they are; None for 0, 1, 2, ...
            carry: what the call with those left; None for none before.
            deterministic: True for no dropout and no noise ("monotonic"), False for both; None for
                the module's setting.
            dropout_rng: one PRNG key for dropout and noise, whatever the module's setting; None for
                the next key of the module's stream, where it drops.
            return_weights: whether to compute the weights.

        Returns:
            (output [*B, T, dim], weights [*B, T, S] averaged over heads, or None if they were not
            asked for, carry).

        Raises:
            ValueError: an argument has the wrong shape or dtype; or a module with dropout was not
                told whether to drop, or has no key to drop with.
        """
        rng = self._dropout_rng(dropout_rng, deterministic, also_random=self.kind.has_noise)
        if self.config.rotary_wavelength is not None and positions is None:
            positions = (first + jnp.arange(query.shape[-2]),) * self.config.position_ends
        if not isinstance(memory, Memory) and self.config.rotary_wavelength is not None:
            memory = self.remember(memory, positions=memory_positions)
        queries = self._queries(query, memory, source_lengths, positions)
        found, weights, new = self.kind.attend(
            self.attention, queries, memory, source_lengths, mask, first, carry, rng, return_weights
        )
        if carry is not None:  # loops want the dtype they began with, whatever parameters have
            new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, carry)
        if self.output is not None:
            found = project_rows(self.output, found, feature_ndim=1)
        return found, weights, new

    def remember(self, memory: Array, *, positions: Positions | None = None) -> Memory:
        """What does not depend on the queries, made once: give it as `memory`.

        `positions` are those of its tokens, where they are rotated; None for 0, 1, 2, ...
        """
        wavelength = self.config.rotary_wavelength
        if wavelength is None:
            return self.attention.remember(memory)
        if positions is None:
            positions = (jnp.arange(memory.shape[-2]),) * self.config.position_ends
        if _is_multi_head(self.config):
            return self.attention.remember(memory, positions=positions)
        check_positions(positions, self.config.position_ends)
        keys = rotated(memory, positions, max_wavelength=wavelength)
        return self.attention.remember(keys, memory)

    def _queries(
        self,
        query: Array,
        memory: Array | Memory,
        source_lengths: Array | None,
        positions: Positions | None,
    ) -> Array | tuple[Array, Positions]:
        """As the kind takes them: with their positions, or with a factor for each row."""
        config = self.config
        if config.rotary_wavelength is not None:
            assert positions is not None
            if _is_multi_head(config):
                return query, positions
            check_positions(positions, config.position_ends)
            query = rotated(query, positions, max_wavelength=config.rotary_wavelength)
        if config.sharpen_from is not None:
            length = (memory.values if isinstance(memory, Memory) else memory).shape[-2]
            lengths = jnp.asarray(length if source_lengths is None else source_lengths)
            factor = jnp.log1p(lengths.astype(query.dtype)) / math.log1p(config.sharpen_from)
            factor = jnp.where(lengths > config.sharpen_from, factor, 1)[..., None, None]
            factor = jnp.broadcast_to(factor, (*query.shape[:-1], 1))
            query = jnp.concatenate([query, factor.astype(query.dtype)], axis=-1)
        return query

    def first_carry(
        self, batch_shape: tuple[int, ...], source_length: int, dtype: Any = jnp.float32
    ) -> Carry:
        """The carry before the first query, as an array; None if this kind carries nothing.

        Every later carry has its dtype: float64 for tokens of that `dtype`, else float32.
        """
        wide = accumulator_dtype(jnp.zeros((), dtype))
        return self.kind.first_carry((*batch_shape, source_length), wide)


def _is_multi_head(config: CrossAttentionConfig) -> bool:
    return config.attention == "global" and config.heads > 1
