"""Encoder and decoder blocks: attention with any score, feed-forward layers, residuals around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
from flax import nnx

from attention_jax.functional.memory import Memory
from attention_jax.nn.cache import KeyValueCache
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.cross_attention import Carry, CrossAttention
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.position_encoding import PositionIds
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask, causal_mask
from attention_jax.scores import Score

Array = jax.Array


class _Residual(nnx.Module):
    """x + dropout(f(norm x)), or norm(x + dropout(f(x)))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, **options: Unpack[LayerOptions]):
        self.norm = nnx.LayerNorm(config.dim, rngs=rngs, **dtypes_of(options))
        self.dtype = options.get("dtype")
        self.pre = config.norm == "pre"
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Array, layer: Callable[[Array], Any], rng: Array | None) -> Any:
        """Returns x; or (x, extra) if `layer` returns (output, extra)."""
        x = x if self.dtype is None else x.astype(self.dtype)
        result = layer(self.norm(x) if self.pre else x)
        output, extra = result if isinstance(result, tuple) else (result, None)
        x = x + drop_features(output, rng, self.dropout_rate)
        x = x if self.pre else self.norm(x)
        return x if extra is None else (x, extra)


class EncoderBlock(DropoutModule):
    """Self attention, then a feed-forward layer, each with a residual.

    Args:
        score: the score of the self attention.
        config: sizes and kinds of layers.
        rotary_wavelength, num_position_ids: as in `MultiHeadAttention`.
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: the streams of the initial parameters and of "dropout".
        options: `dtype`, `param_dtype`, `kernel_init`, `bias_init`, as in `nnx.Linear`.

    >>> import jax.numpy as jnp
    >>> config = ModelConfig(dim=8, hidden_dim=16, num_heads=2)
    >>> block = EncoderBlock("additive", config, rngs=nnx.Rngs(0))
    >>> output, weights = block(jnp.ones((3, 5, 8)), return_weights=True)
    >>> output.shape, weights.shape
    ((3, 5, 8), (3, 2, 5, 5))

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(
        self,
        score: str | Score,
        config: ModelConfig,
        *,
        rotary_wavelength: float | None = None,
        num_position_ids: int = 1,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        self.self_residual = _Residual(config, rngs=rngs, **options)
        self.self_attention = _self_attention(
            score,
            config,
            rngs,
            rotary_wavelength=rotary_wavelength,
            num_position_ids=num_position_ids,
            **options,
        )
        self.feed_forward_residual = _Residual(config, rngs=rngs, **options)
        self.feed_forward = _feed_forward(config, rngs, **options)
        self._set_dropout(config.largest_dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        x: Array,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: PositionIds | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """x [*B, S, dim] -> output of the same shape; or (output, weights [*B, N, S, S]).

        The other arguments are as in `MultiHeadAttention`.
        """
        dropout_rng = self._dropout_rng(dropout_rng, deterministic)
        attention_rng, *residual_rngs = split_rng(dropout_rng, 3)

        @jax.named_scope("self_attention")
        def attend(x: Array) -> Any:
            return self.self_attention(
                x,
                mask=mask,
                bias=bias,
                position_ids=position_ids,
                deterministic=dropout_rng is None,
                dropout_rng=attention_rng,
                return_weights=return_weights,
            )

        result = self.self_residual(x, attend, residual_rngs[0])
        x, weights = result if return_weights else (result, None)
        x = self.feed_forward_residual(x, self.feed_forward, residual_rngs[1])
        return (x, weights) if return_weights else x


class DecoderState(NamedTuple):
    """What a decoder block keeps between tokens while it decodes."""

    memory: Memory  # of the source, computed once
    cache: KeyValueCache | None  # of the self attention; None for a block without
    carry: Carry  # of the cross attention


class DecoderBlock(DropoutModule):
    """Causal self attention, then attention to the memory, then a feed-forward layer.

    Args:
        self_score: the score of the self attention.
        cross_score: the score between decoder and memory.
        config: sizes and kinds of layers, and of the cross attention. Without
            `decoder_self_attention` no output depends on the other tokens.
        memory_dim: size of the memory's tokens; None for `config.dim`.
        rotary_wavelength, num_position_ids: as in `MultiHeadAttention`, of both attentions.
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: the streams of the initial parameters and of "dropout".
        options: `dtype`, `param_dtype`, `kernel_init`, `bias_init`, as in `nnx.Linear`.

    >>> import jax.numpy as jnp
    >>> config = ModelConfig(dim=8, hidden_dim=16)
    >>> block = DecoderBlock("scaled", "additive", config, memory_dim=6, rngs=nnx.Rngs(0))
    >>> output, weights = block(jnp.ones((3, 4, 8)), jnp.ones((3, 5, 6)), return_weights=True)
    >>> output.shape, weights.shape
    ((3, 4, 8), (3, 4, 5))

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(
        self,
        self_score: str | Score,
        cross_score: str | Score,
        config: ModelConfig,
        *,
        memory_dim: int | None = None,
        rotary_wavelength: float | None = None,
        num_position_ids: int = 1,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        rotary: Any = {"rotary_wavelength": rotary_wavelength, "num_position_ids": num_position_ids}
        self_attention = config.decoder_self_attention
        self.self_residual = _Residual(config, rngs=rngs, **options) if self_attention else None
        self.self_attention = (
            _self_attention(self_score, config, rngs, **rotary, **options)
            if self_attention
            else None
        )
        self.cross_residual = _Residual(config, rngs=rngs, **options)
        memory_dim = config.dim if memory_dim is None else memory_dim
        self.cross_attention = CrossAttention(
            cross_score,
            config.dim,
            memory_dim,
            config,
            num_heads=config.cross_heads,
            output_gate=config.output_gate,
            **rotary,
            dropout_rate=config.rate_of_weights,
            rngs=rngs,
            keep_rngs=False,
            **options,
        )
        self.feed_forward_residual = _Residual(config, rngs=rngs, **options)
        self.feed_forward = _feed_forward(config, rngs, **options)
        self._set_dropout(config.largest_dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        source_lengths: Array | None = None,
        memory_mask: Mask | Array | None = None,
        position_ids: PositionIds | None = None,
        memory_position_ids: PositionIds | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """All tokens at once; each attends to itself and to earlier tokens.

        Args:
            x: float [*B, T, dim].
            memory: float [*B, S, memory_dim].
            source_lengths: int [*B], how many memory tokens are real; None for all.
            memory_mask: the memory tokens that may be attended to.
            position_ids, memory_position_ids, deterministic, dropout_rng: as in `CrossAttention`.
            return_weights: also return the weights of the cross attention.

        Returns:
            output like x; or (output, weights [*B, T, S], averaged over heads).
        """
        has_noise = self.cross_attention.kind.has_noise
        dropout_rng = self._dropout_rng(dropout_rng, deterministic, also_random=has_noise)
        deterministic = dropout_rng is None
        self_rng, cross_rng, *residual_rngs = split_rng(dropout_rng, 5)

        @jax.named_scope("self_attention")
        def attend_to_self(x: Array) -> Array:
            assert self.self_attention is not None
            return self.self_attention(
                x,
                mask=causal_mask(),
                position_ids=position_ids,
                deterministic=deterministic,
                dropout_rng=self_rng,
            )

        @jax.named_scope("cross_attention")
        def attend_to_memory(x: Array) -> Any:
            output, weights, _ = self.cross_attention(
                x,
                memory,
                source_lengths=source_lengths,
                mask=memory_mask,
                position_ids=position_ids,
                memory_position_ids=memory_position_ids,
                deterministic=deterministic,
                dropout_rng=cross_rng,
                return_weights=return_weights,
            )
            return (output, weights) if return_weights else output

        if self.self_residual is not None:
            x = self.self_residual(x, attend_to_self, residual_rngs[0])
        result = self.cross_residual(x, attend_to_memory, residual_rngs[1])
        x, weights = result if return_weights else (result, None)
        x = self.feed_forward_residual(x, self.feed_forward, residual_rngs[2])
        return (x, weights) if return_weights else x

    def start(
        self, memory: Array, max_length: int, *, memory_position_ids: PositionIds | None = None
    ) -> DecoderState:
        """The state before the first of at most `max_length` tokens; memory [*B, S, memory_dim]."""
        *batch, source_length, _ = memory.shape
        cache = None
        if self.self_attention is not None:
            cache = self.self_attention.empty_cache(tuple(batch), max_length, memory.dtype)
        return DecoderState(
            self.cross_attention.remember(memory, position_ids=memory_position_ids),
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
        position_ids: PositionIds | None = None,
    ) -> tuple[Array, DecoderState]:
        """The next tokens, x [*B, t, dim], after those of `state`: one step of decoding.

        The outputs are those of one call with all tokens, without dropout. `first` is the number of
        tokens in `state`. `position_ids` are those of the next tokens, for rotation; None for
        `first` and on.
        """
        memory, cache, carry = state

        @jax.named_scope("self_attention")
        def attend_to_self(x: Array) -> tuple[Array, KeyValueCache]:
            assert self.self_attention is not None
            assert cache is not None
            return self.self_attention.extend(x, cache, position_ids=position_ids)

        @jax.named_scope("cross_attention")
        def attend_to_memory(x: Array) -> tuple[Array, tuple[Carry]]:
            output, _, new_carry = self.cross_attention(
                x,
                memory,
                source_lengths=source_lengths,
                mask=memory_mask,
                first=first,
                position_ids=position_ids,
                carry=carry,
                deterministic=True,
            )
            return output, (new_carry,)

        if self.self_residual is not None:
            x, cache = self.self_residual(x, attend_to_self, None)
        x, (carry,) = self.cross_residual(x, attend_to_memory, None)
        x = self.feed_forward_residual(x, self.feed_forward, None)
        return x, DecoderState(memory, cache, carry)


def _self_attention(
    score: str | Score,
    config: ModelConfig,
    rngs: nnx.Rngs,
    *,
    rotary_wavelength: float | None,
    num_position_ids: int,
    **options: Unpack[LayerOptions],
) -> MultiHeadAttention:
    """A block's self attention; the block hands it the keys of dropout."""
    return MultiHeadAttention(
        score,
        config.dim,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        normalize_qk=config.normalize_qk,
        normalizer=config.self_attention_normalizer,
        output_gate=config.output_gate,
        rotary_wavelength=rotary_wavelength,
        num_position_ids=num_position_ids,
        dropout_rate=config.rate_of_weights,
        rngs=rngs,
        keep_rngs=False,
        **options,
    )


def _feed_forward(
    config: ModelConfig, rngs: nnx.Rngs, **options: Unpack[LayerOptions]
) -> FeedForward:
    return FeedForward(
        config.dim, config.hidden_dim, activation=config.activation, rngs=rngs, **options
    )


def split_rng(rng: Array | None, count: int) -> list[Array | None]:
    """`count` keys; or `count` times None."""
    return [None] * count if rng is None else list(jax.random.split(rng, count))
