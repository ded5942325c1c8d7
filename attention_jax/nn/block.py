"""A block: attention with any score to itself and to a memory, and a feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attended, Carry
from attention_jax.nn.cache import KeyValueCache
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.cross_attention import CrossAttention, multi_head
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.parameters import Dtype
from attention_jax.nn.position_encoding import PositionIds
from attention_jax.pairwise.biases import Bias
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask

Array = jax.Array


class Source(NamedTuple):
    """The memory that the cross attention of a block attends to.

    >>> Source(jnp.ones((2, 7, 8)), lengths=jnp.array([4, 7])).memory.shape
    (2, 7, 8)
    """

    memory: Array | Memory  # [*B, S, dim]
    mask: Mask | Array | None = None  # which memory tokens may be attended to
    lengths: Array | None = None  # int [*B], how many are real; None for all
    position_ids: PositionIds | None = None  # of the memory's tokens, for rotation


class BlockState(NamedTuple):
    """The state of a block between two steps of decoding; the batch axes are in front."""

    tokens: Memory | None  # keys and values so far, with room for more; None: no self attention
    carry: Carry  # of the cross attention


class _Residual(nnx.Module):
    """x + dropout(f(norm x)), or norm(x + dropout(f(x)))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(config.dim, rngs=rngs)
        self.pre = config.norm == "pre"
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Array, layer: Callable[[Array], Any], rng: Array | None) -> Any:
        """(x, extra) for a layer that returns (output, extra)."""
        output, extra = layer(self.norm(x) if self.pre else x)
        x = x + drop_features(output, rng, self.dropout_rate)
        return x if self.pre else self.norm(x), extra


class Block(nnx.Module):
    """Self attention, attention to a memory, and a feed-forward layer, each with a residual.

    The blocks of an encoder, and those of a model without an encoder, do not attend to a memory.
    With a causal mask, the latter are the blocks of a language model.

    Args:
        config: scores, sizes and kinds of layers.
        is_cross: whether there is attention to a memory. `config.decoder_self_attention` decides
            whether such a block has self attention.
        rngs: the stream of the initial parameters.

    >>> block = Block(ModelConfig(dim=8, hidden_dim=16), is_cross=True, rngs=nnx.Rngs(0))
    >>> memory = Source(jnp.ones((3, 5, 8)))
    >>> output, weights = block(jnp.ones((3, 4, 8)), memory, return_weights=True)
    >>> output.shape, weights.shape
    ((3, 4, 8), (3, 4, 5))

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(self, config: ModelConfig, *, is_cross: bool = False, rngs: nnx.Rngs):
        has_self = config.decoder_self_attention or not is_cross
        self.self_residual = _Residual(config, rngs=rngs) if has_self else None
        options: Any = {"num_key_heads": config.num_key_heads, "normalize_qk": config.normalize_qk}
        self.self_attention = (
            multi_head(config, config.self_score, config.self_normalizer, rngs, **options)
            if has_self
            else None
        )
        self.cross_residual = _Residual(config, rngs=rngs) if is_cross else None
        self.cross_attention = CrossAttention(config, rngs=rngs) if is_cross else None
        self.feed_forward_residual = _Residual(config, rngs=rngs)
        self.feed_forward = FeedForward(
            config.dim, config.hidden_dim, activation=config.activation, rngs=rngs
        )

    def __call__(
        self,
        x: Array,
        source: Source | None = None,
        *,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: PositionIds | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """All tokens at once.

        Args:
            x: float [*B, T, dim].
            source: the memory; None for a block without attention to a memory.
            mask, bias: of the self attention, as in `MultiHeadAttention`.
            position_ids: of the tokens, for rotation; None for 0, 1, 2, ...
            rng: one PRNG key, for dropout and the noise of "monotonic"; None for neither.
            return_weights: also return the weights, averaged over heads: of the attention to the
                memory, or else of the self attention.

        Returns:
            output like x; or (output, weights [*B, T, S]).
        """
        has_memory = self.cross_attention is not None
        self_rng, cross_rng, *_ = rngs = split_rng(rng, 5 if has_memory else 3)

        @jax.named_scope("self_attention")
        def attend_to_self(x: Array) -> tuple[Array, Array | None]:
            assert self.self_attention is not None
            result = self.self_attention(
                x,
                mask=mask,
                bias=bias,
                position_ids=position_ids,
                deterministic=rng is None,
                dropout_rng=self_rng,
                return_weights=return_weights and not has_memory,
            )
            if not return_weights or has_memory:
                return result, None
            return result[0], jnp.mean(result[1], axis=-3)

        def attend_to_memory(x: Array) -> tuple[Array, Array | None]:
            assert source is not None
            attended = self._attend_to_memory(
                x, source, position_ids=position_ids, rng=cross_rng, return_weights=return_weights
            )
            return attended.output, attended.weights

        x, *weights = self._layers(x, attend_to_self, attend_to_memory, rngs[1 + has_memory :])
        return (x, weights[has_memory]) if return_weights else x

    def start(
        self, source: Source | None, batch_shape: tuple[int, ...], max_length: int, dtype: Dtype
    ) -> tuple[Source | None, BlockState]:
        """The source, projected once for all calls of `extend`, and the state before any token.

        Args:
            source: the memory; None for a block without attention to a memory.
            batch_shape: *B of the tokens.
            max_length: the largest number of tokens that `extend` will read.
            dtype: of the tokens.
        """
        tokens = carry = None
        if self.self_attention is not None:
            tokens = self.self_attention.empty_cache(batch_shape, max_length, dtype).memory
        if self.cross_attention is not None:
            assert source is not None
            memory: Any = source.memory
            carry = self.cross_attention.first_carry(memory)
            memory = self.cross_attention.remember(memory, position_ids=source.position_ids)
            source = source._replace(memory=memory, position_ids=None)
        return source, BlockState(tokens, carry)

    def extend(
        self,
        x: Array,
        state: BlockState,
        source: Source | None = None,
        *,
        first: Array,
        mask: Mask | Array | None = None,
        position_ids: PositionIds | None = None,
    ) -> tuple[Array, BlockState]:
        """The next tokens, x [*B, t, dim], after those of `state`: one step of decoding.

        The outputs are those of one call with all tokens and a causal mask, without dropout.
        `first` is the number of tokens in `state`, int32 []. `mask` is that of all tokens.
        """

        @jax.named_scope("self_attention")
        def attend_to_self(x: Array) -> tuple[Array, Memory]:
            assert self.self_attention is not None
            assert state.tokens is not None
            cache = KeyValueCache(state.tokens, first)
            output, cache = self.self_attention.extend(
                x, cache, mask=mask, position_ids=position_ids
            )
            return output, cache.memory

        def attend_to_memory(x: Array) -> tuple[Array, Carry]:
            assert source is not None
            attended = self._attend_to_memory(
                x, source, first=first, position_ids=position_ids, carry=state.carry
            )
            return attended.output, attended.carry

        x, tokens, carry = self._layers(x, attend_to_self, attend_to_memory, [None] * 3)
        return x, BlockState(tokens, carry)

    def _layers(
        self,
        x: Array,
        attend_to_self: Callable[[Array], tuple[Array, Any]],
        attend_to_memory: Callable[[Array], tuple[Array, Any]],
        rngs: Sequence[Array | None],
    ) -> tuple[Array, Any, Any]:
        """The output, and the second result of each attention; None for one that is not there."""
        from_self = from_memory = None
        if self.self_residual is not None:
            x, from_self = self.self_residual(x, attend_to_self, rngs[0])
        if self.cross_residual is not None:
            x, from_memory = self.cross_residual(x, attend_to_memory, rngs[-2])
        x, _ = self.feed_forward_residual(x, lambda x: (self.feed_forward(x), None), rngs[-1])
        return x, from_self, from_memory

    @jax.named_scope("cross_attention")
    def _attend_to_memory(self, x: Array, source: Source, **arguments: Any) -> Attended:
        assert self.cross_attention is not None
        return self.cross_attention(
            x,
            source.memory,
            mask=source.mask,
            lengths=source.lengths,
            memory_position_ids=source.position_ids,
            **arguments,
        )


def split_rng(rng: Array | None, count: int) -> list[Array | None]:
    """`count` keys; or `count` times None."""
    return [None] * count if rng is None else list(jax.random.split(rng, count))
