"""A block: attention with any score to itself and to a memory, and a feed-forward layer."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx

from attention_jax.core.checks import checked_rng
from attention_jax.core.serialization import exported
from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attended
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.cross_attention import CrossAttention, multi_head
from attention_jax.nn.dropout import RandomModule
from attention_jax.nn.feed_forward import FeedForward
from attention_jax.nn.multi_head import KeyValueCache
from attention_jax.nn.parameters import Dtype, check_rngs, checked_tokens, layer_norm
from attention_jax.positions.contract import Bias, Mask
from attention_jax.positions.dropout import drop_features

Array = jax.Array


@exported
class Source(NamedTuple):
    """The memory that the cross attention of a block attends to.

    >>> import jax.numpy as jnp
    >>> Source(jnp.ones((2, 7, 8)), lengths=jnp.array([4, 7])).memory.shape
    (2, 7, 8)
    """

    memory: Array | Memory  # [*B, S, dim]
    mask: Mask | Array | None = None  # which memory tokens may be attended to
    lengths: Array | None = None  # int [*B], how many are real; None for all
    position_ids: Array | None = None  # of the memory's tokens, for rotation


@exported
class BlockState(NamedTuple):
    """The state of a block between two steps of decoding; the batch axes are in front."""

    tokens: Memory | None = None  # keys and values so far, with room for more; None: no cache
    carry: Array | None = None  # of the cross attention


class _Residual(nnx.Module):
    """x + dropout(f(norm x)), or norm(x + dropout(f(x)))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.norm = layer_norm(config.dim, config.cast_dtype, rngs=rngs)
        self.pre = config.norm == "pre"
        self.dropout_rate = config.dropout_rate

    def __call__(self, x: Array, layer: Callable[[Array], Attended], rng: Array | None) -> Attended:
        attended = layer(self.norm(x).astype(x.dtype) if self.pre else x)
        x = x + drop_features(attended.output, rng, self.dropout_rate)
        return attended._replace(output=x if self.pre else self.norm(x).astype(x.dtype))


class Block(RandomModule):
    """Self attention, attention to a memory, and a feed-forward layer, each with a residual.

    The blocks of an encoder and of a "decoder", a model without an encoder, have no memory.

    Args:
        config: scores, sizes and kinds of layers.
        is_cross: whether there is attention to a memory. `config.decoder_self_attention` decides
            whether such a block has self attention.
        rngs: the stream of the initial parameters.

    >>> import jax.numpy as jnp
    >>> block = Block(ModelConfig(dim=8, hidden_dim=16), is_cross=True, rngs=nnx.Rngs(0))
    >>> memory = Source(jnp.ones((3, 5, 8)))
    >>> jax.jit(block)(jnp.ones((3, 4, 8)), memory).shape
    (3, 4, 8)

    Source: Vaswani et al. 2017, section 3.1 (`norm="post"`); Xiong et al. 2020 for "pre".
    """

    def __init__(self, config: ModelConfig, *, is_cross: bool = False, rngs: nnx.Rngs):
        check_rngs(rngs)
        has_self = config.decoder_self_attention or not is_cross
        self.self_residual = _Residual(config, rngs=rngs) if has_self else None
        options: Any = {"num_key_heads": config.num_key_heads, "normalize_qk": config.normalize_qk}
        self.self_attention: Any = (
            multi_head(config, config.self_score, config.self_normalizer, rngs, **options)
            if has_self
            else None
        )
        self.cross_residual = _Residual(config, rngs=rngs) if is_cross else None
        self.cross_attention: Any = CrossAttention(config, rngs=rngs) if is_cross else None
        has_hidden, size = config.hidden_dim > 0, (config.dim, config.hidden_dim)
        self.feed_forward_residual = _Residual(config, rngs=rngs) if has_hidden else None
        self.feed_forward: Any = (
            FeedForward(*size, activation=config.activation, dtype=config.cast_dtype, rngs=rngs)
            if has_hidden
            else None
        )
        has_noise = is_cross and config.attention == "monotonic"
        self.dim, self.dtype = config.dim, config.cast_dtype
        self.is_random = has_noise or config.dropout_rate + config.rate_of_weights > 0

    def attend(
        self,
        x: Array,
        source: Any = None,
        *,
        state: Any = None,
        first: Any = 0,
        mask: Mask | Array | None = None,
        bias: Bias | Array | None = None,
        position_ids: Array | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Attended:
        """Applies the block to all tokens at once or, in decoding, to those that follow a state.

        With a state the outputs equal those of one call with all tokens and a causal mask.

        Args:
            x: float [*B, T, dim].
            source: a `Source`; None for a block without attention to a memory.
            state: a `BlockState`, from `start` or the previous step; None for all tokens at once.
            first: int [], how many tokens the state holds.
            mask, bias: of the self attention, as in `MultiHeadAttention`; with a state, of all
                tokens.
            position_ids: of the tokens, for rotation; None for `first` and on.
            rng: one PRNG key, for dropout and the noise of "monotonic"; None for neither.
            return_weights: also return the weights, averaged over heads: those of the attention to
                the memory or, in a block without memory, of the self attention.

        Returns:
            `Attended(output [*B, T, dim], weights [*B, T, S], carry)`, whose carry is the next
            state. The output has the dtype of x, or bfloat16 if `config.dtype` is.
        """
        has_memory = self.cross_attention is not None
        x = checked_tokens("x", x, self.dim)
        x = x if self.dtype is None else x.astype(self.dtype)
        if has_memory and not isinstance(source, Source):
            raise ValueError(f"source must be a Source; got {type(source).__name__}")
        state = BlockState() if state is None else state
        self_rng, cross_rng, *_ = rngs = split_rng(rng, 5 if has_memory else 3)
        residual_rngs = rngs[1 + has_memory :]
        weights = tokens = carry = None
        if self.self_residual is not None:
            attend_to_self = functools.partial(
                self.self_attention.attend,
                mask=mask,
                bias=bias,
                position_ids=position_ids,
                carry=None if state.tokens is None else KeyValueCache(state.tokens, first),
                rng=self_rng,
                return_weights=return_weights and not has_memory,
            )
            with jax.named_scope("self_attention"):
                x, weights, cache = self.self_residual(x, attend_to_self, residual_rngs[0])
            tokens = None if cache is None else cache.memory
        if self.cross_residual is not None:
            attend_to_memory = functools.partial(
                self.cross_attention.attend,
                memory=source.memory,
                mask=source.mask,
                lengths=source.lengths,
                memory_position_ids=source.position_ids,
                first=first,
                position_ids=position_ids,
                carry=state.carry,
                rng=cross_rng,
                return_weights=return_weights,
            )
            with jax.named_scope("cross_attention"):
                x, weights, carry = self.cross_residual(x, attend_to_memory, residual_rngs[-2])
        if self.feed_forward_residual is not None:
            x, *_ = self.feed_forward_residual(
                x, lambda x: Attended(self.feed_forward(x), None, None), residual_rngs[-1]
            )
        return Attended(x, weights, BlockState(tokens, carry))

    def start(
        self,
        source: Source | None,
        batch_shape: tuple[int, ...],
        max_length: int,
        dtype: Dtype | None = None,
    ) -> tuple[Source | None, BlockState]:
        """Projects the source once for all decoding steps, and makes the state before any token.

        Args:
            source: the memory; None for a block without attention to a memory.
            batch_shape: *B of the tokens.
            max_length: the largest number of tokens that will be read.
            dtype: of the cache, as in `MultiHeadAttention.empty_cache`.
        """
        tokens = carry = None
        if self.self_attention is not None:
            tokens = self.self_attention.empty_cache(batch_shape, max_length, dtype).memory
        if source is not None:
            carry = self.cross_attention.first_carry(source.memory)
            memory = self.cross_attention.remember(source.memory, position_ids=source.position_ids)
            source = source._replace(memory=memory, position_ids=None)
        return source, BlockState(tokens, carry)


def split_rng(rng: Array | None, count: int) -> list[Array | None]:
    """`count` PRNG keys, or `count` times None without a key."""
    if rng is None:
        return [None] * count
    return list(jax.random.split(checked_rng(rng, name="rng"), count))
