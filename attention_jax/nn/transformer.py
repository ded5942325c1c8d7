"""Encoder and decoder blocks: attention with any score, feed-forward layers, residuals around."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
from flax import nnx

from attention_jax.core.checks import check_choice, check_integer, checked_rate
from attention_jax.functional.memory import Memory
from attention_jax.nn.cache import KeyValueCache
from attention_jax.nn.cross_attention import Carry, CrossAttention, CrossAttentionConfig
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.feed_forward import Activation, FeedForward
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.placement import Positions
from attention_jax.nn.positions import check_wavelength
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask, causal_mask
from attention_jax.scores import Score

Array = jax.Array
Norm = Literal["pre", "post"]


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings that encoder and decoder blocks share.

    Attributes:
        dim: size of the tokens.
        hidden_dim: hidden size of the feed-forward layer.
        heads: heads of the self attention.
        key_heads: heads of its keys and values (grouped-query); None for `heads`.
        activation: of the feed-forward layer, see `FeedForward`.
        norm: "pre", x + f(norm x); or "post", norm(x + f(x)).
        dropout_rate: of attention weights and of what a layer adds, in training.
        normalize_qk: layer normalisation of the self attention's queries and keys.
        rotary_wavelength: rotary positions in the self attention; None for none.
        position_ends: how many numbers a position is, see `placement.Positions`.
        decoder_self_attention: False for decoder blocks without.

    Raises:
        ValueError: a size is below 1, or a name is unknown.
    """

    dim: int
    hidden_dim: int
    heads: int = 1
    key_heads: int | None = None
    activation: Activation = "relu"
    norm: Norm = "pre"
    dropout_rate: float = 0.0
    normalize_qk: bool = False
    rotary_wavelength: float | None = None
    position_ends: int = 1
    decoder_self_attention: bool = True

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "heads", "key_heads"):
            size = getattr(self, name)
            if size is not None or name != "key_heads":
                check_integer(name, size)
        if self.dim % self.heads:
            raise ValueError(f"dim must be a multiple of {self.heads} heads; got {self.dim}")
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide {self.heads} heads; got {self.key_heads}")
        check_choice("activation", self.activation, Activation)
        check_choice("norm", self.norm, Norm)
        checked_rate(self.dropout_rate)
        if self.rotary_wavelength is not None:
            check_wavelength("rotary_wavelength", self.rotary_wavelength)

    def self_attention(
        self, score: str | Score, rngs: nnx.Rngs, **options: Unpack[LayerOptions]
    ) -> MultiHeadAttention:
        """A block's self attention, which drops with keys that the block hands on."""
        return MultiHeadAttention(
            score,
            self.dim,
            num_heads=self.heads,
            num_key_heads=self.key_heads,
            normalize_qk=self.normalize_qk,
            rotary_wavelength=self.rotary_wavelength,
            position_ends=self.position_ends,
            dropout_rate=self.dropout_rate,
            rngs=rngs,
            keep_rngs=False,
            **options,
        )


class _Residual(nnx.Module):
    """x + dropout(f(norm x)), or norm(x + dropout(f(x)))."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs, **options: Unpack[LayerOptions]):
        self.norm = nnx.LayerNorm(config.dim, rngs=rngs, **dtypes_of(options))
        self.dtype = options.get("dtype")
        self.pre = config.norm == "pre"
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Array, layer: Callable[[Array], Any], rng: Array | None) -> Any:
        """`layer` gives its output, or (output, what else it found): so does this."""
        x = x if self.dtype is None else x.astype(self.dtype)
        found = layer(self.norm(x) if self.pre else x)
        added, rest = found if isinstance(found, tuple) else (found, None)
        x = x + drop_features(added, rng, self.dropout_rate)
        x = x if self.pre else self.norm(x)
        return x if rest is None else (x, rest)


class EncoderBlock(DropoutModule):
    """Self attention, then a feed-forward layer, each with a residual.

    Args:
        score: the score of the self attention.
        config: sizes and kinds.
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: where the initial parameters come from, and the stream "dropout".
        options: `dtype`, `param_dtype`, `kernel_init`, `bias_init`, as in `nnx.Linear`.

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(
        self,
        score: str | Score,
        config: BlockConfig,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        self.self_residual = _Residual(config, rngs=rngs, **options)
        self.self_attention = config.self_attention(score, rngs, **options)
        self.feed_forward_residual = _Residual(config, rngs=rngs, **options)
        self.feed_forward = _feed_forward(config, rngs, **options)
        self._set_dropout(config.dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        x: Array,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        positions: Positions | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """x [*B, S, dim] -> the same shape; or (it, weights [*B, N, S, S]).

        `positions`, where attention rotates by them, are 0, 1, 2, ... if not given; `deterministic`
        and `dropout_rng` are as in `MultiHeadAttention`.
        """
        dropout_rng = self._dropout_rng(dropout_rng, deterministic)
        attention_rng, *residual_rngs = split_rng(dropout_rng, 3)

        @jax.named_scope("self_attention")
        def attend(x: Array) -> Any:
            return self.self_attention(
                x, mask=mask, bias=bias, positions=positions, deterministic=dropout_rng is None,
                dropout_rng=attention_rng, return_weights=return_weights,
            )  # fmt: skip

        found = self.self_residual(x, attend, residual_rngs[0])
        x, weights = found if return_weights else (found, None)
        x = self.feed_forward_residual(x, self.feed_forward, residual_rngs[1])
        return (x, weights) if return_weights else x


class DecoderState(NamedTuple):
    """What a decoder block knows of the tokens so far, and of the memory."""

    memory: Memory  # made once
    cache: KeyValueCache | None  # of the self attention, if there is one
    carry: Carry  # of the cross attention


_GLOBAL = CrossAttentionConfig()


class DecoderBlock(DropoutModule):
    """Causal self attention, then attention to the memory, then a feed-forward layer.

    Args:
        self_score: the score of the self attention.
        cross_score: the score between decoder and memory.
        config: sizes and kinds.
        cross: how it looks at the memory.
        memory_dim: size of the memory's tokens; None for `config.dim`.
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: where the initial parameters come from, and the stream "dropout".
        options: `dtype`, `param_dtype`, `kernel_init`, `bias_init`, as in `nnx.Linear`.

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(
        self,
        self_score: str | Score,
        cross_score: str | Score,
        config: BlockConfig,
        *,
        cross: CrossAttentionConfig = _GLOBAL,
        memory_dim: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        attends = config.decoder_self_attention
        self.self_residual: Any = _Residual(config, rngs=rngs, **options) if attends else None
        self.self_attention: Any = (
            config.self_attention(self_score, rngs, **options) if attends else None
        )
        self.cross_residual = _Residual(config, rngs=rngs, **options)
        memory_dim = config.dim if memory_dim is None else memory_dim
        self.cross_attention = CrossAttention(
            cross_score, config.dim, memory_dim, cross, dropout_rate=config.dropout_rate, rngs=rngs,
            keep_rngs=False, **options,
        )  # fmt: skip
        self.feed_forward_residual = _Residual(config, rngs=rngs, **options)
        self.feed_forward = _feed_forward(config, rngs, **options)
        self._set_dropout(config.dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        source_lengths: Array | None = None,
        memory_mask: Mask | Array | None = None,
        positions: Positions | None = None,
        memory_positions: Positions | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """All tokens at once, each seeing itself and those before.

        Args:
            x: float [*B, T, dim].
            memory: float [*B, S, memory_dim].
            source_lengths: int [*B], how many memory tokens are real; None for all.
            memory_mask: which of them may be attended to.
            positions: of the tokens, where attention rotates by them; None for 0, 1, 2, ...
            memory_positions: of the memory's.
            deterministic, dropout_rng: as in `CrossAttention`.
            return_weights: also return the weights of the cross attention.

        Returns:
            like x; or (like x, weights [*B, T, S], averaged over heads).
        """
        has_noise = self.cross_attention.kind.has_noise
        dropout_rng = self._dropout_rng(dropout_rng, deterministic, also_random=has_noise)
        deterministic = dropout_rng is None
        self_rng, cross_rng, *residual_rngs = split_rng(dropout_rng, 5)

        @jax.named_scope("self_attention")
        def attend(x: Array) -> Array:
            return self.self_attention(
                x, mask=causal_mask(), positions=positions, deterministic=deterministic,
                dropout_rng=self_rng,
            )  # fmt: skip

        @jax.named_scope("cross_attention")
        def look(x: Array) -> Any:
            output, weights, _ = self.cross_attention(
                x, memory, source_lengths=source_lengths, mask=memory_mask, positions=positions,
                memory_positions=memory_positions, deterministic=deterministic,
                dropout_rng=cross_rng, return_weights=return_weights,
            )  # fmt: skip
            return (output, weights) if return_weights else output

        if self.self_residual is not None:
            x = self.self_residual(x, attend, residual_rngs[0])
        found = self.cross_residual(x, look, residual_rngs[1])
        x, weights = found if return_weights else (found, None)
        x = self.feed_forward_residual(x, self.feed_forward, residual_rngs[2])
        return (x, weights) if return_weights else x

    def start(
        self, memory: Array, max_length: int, *, memory_positions: Positions | None = None
    ) -> DecoderState:
        """The state before the first of at most `max_length` tokens; memory [*B, S, memory_dim]."""
        *batch, source_length, _ = memory.shape
        cache = None
        if self.self_attention is not None:
            cache = self.self_attention.empty_cache(tuple(batch), max_length, memory.dtype)
        return DecoderState(
            self.cross_attention.remember(memory, positions=memory_positions),
            cache,
            self.cross_attention.first_carry(tuple(batch), source_length, memory.dtype),
        )

    def extend(
        self,
        x: Array,
        state: DecoderState,
        *,
        first: Array | int,
        source_lengths: Array | None = None,
        memory_mask: Mask | Array | None = None,
        positions: Positions | None = None,
    ) -> tuple[Array, DecoderState]:
        """The next tokens, x [*B, t, dim], after those of `state`: as in one call with all.

        `first` is how many those are. `positions` are those of the next tokens, where attention
        rotates by them; None for `first` and on. Decoding is evaluation: nothing is dropped.
        """
        memory, cache, carry = state

        @jax.named_scope("self_attention")
        def attend(x: Array) -> tuple[Array, KeyValueCache]:
            return self.self_attention.extend(x, cache, positions=positions)

        @jax.named_scope("cross_attention")
        def look(x: Array) -> tuple[Array, Carry]:
            output, _, new = self.cross_attention(
                x, memory, source_lengths=source_lengths, mask=memory_mask, first=first,
                positions=positions, carry=carry, deterministic=True,
            )  # fmt: skip
            return output, (new,)

        extended = cache
        if self.self_residual is not None:
            x, extended = self.self_residual(x, attend, None)
        x, (carry,) = self.cross_residual(x, look, None)
        x = self.feed_forward_residual(x, self.feed_forward, None)
        return x, DecoderState(memory, extended, carry)


def _feed_forward(
    config: BlockConfig, rngs: nnx.Rngs, **options: Unpack[LayerOptions]
) -> FeedForward:
    return FeedForward(
        config.dim, config.hidden_dim, activation=config.activation, rngs=rngs, **options
    )


def split_rng(rng: Array | None, count: int) -> list[Array | None]:
    """As many keys, or as many times None."""
    return [None] * count if rng is None else list(jax.random.split(rng, count))
