"""The model: encoder and decoder of attention blocks, or a decoder alone; no recurrence."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_integer
from attention_jax.nn.block import Block, BlockState, Source, split_rng
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.generation import Generator
from attention_jax.nn.position_encoding import PositionEncoding, PositionIds
from attention_jax.nn.positions import rows_of
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask, causal_mask, padding_mask, token_mask

Array = jax.Array


class Fixed(NamedTuple):
    """The constant part of the state of decoding; every array has the batch axis in front."""

    sources: tuple[Source | None, ...]  # for each block, projected
    position_ids: Array  # int [B, P]
    padding: Array  # int [B], tokens of padding between source and target, which have no position
    limit: Array  # int [B], how many tokens may be read
    visible: Array | None  # bool [B, limit], False for padding; None with an encoder


class DecodingState(NamedTuple):
    """The state between two steps of decoding; every array has the batch axis in front."""

    fixed: Fixed
    blocks: tuple[BlockState, ...]
    step: Array  # int [B], how many tokens have been read, the same in all rows


class Model(Generator):
    """A model of sequences with any score.

    An "encoder-decoder" attends to an encoded source. A "decoder" has one sequence, the source and
    then the target, in which each token attends to itself and to earlier tokens; its source may be
    None.

    Args:
        config: the settings.
        vocabulary_size: V, of the target.
        source_vocabulary_size: of the source; None for V.
        rngs: the stream of the initial parameters.

    Raises:
        ValueError: a score fails for these sizes; or one table embeds source and target, and their
            vocabularies have different sizes.

    >>> model = Model(ModelConfig(score="additive"), 11, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5), int), jnp.array([3, 5]), jnp.ones((2, 7), int)).shape
    (2, 7, 11)
    >>> model = Model(ModelConfig("decoder", score="additive"), 11, rngs=nnx.Rngs(0))
    >>> model(None, None, jnp.ones((2, 7), int)).shape
    (2, 7, 11)
    """

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        *,
        source_vocabulary_size: int | None = None,
        rngs: nnx.Rngs,
    ):
        dim, tie = config.dim, config.tied_embeddings
        source_size = vocabulary_size if source_vocabulary_size is None else source_vocabulary_size
        self.config, self.has_encoder = config, config.architecture == "encoder-decoder"
        if source_size != vocabulary_size and (tie == "all" or not self.has_encoder):
            raise ValueError(
                f"source_vocabulary_size must be {vocabulary_size}, that of the target, where one"
                f" table embeds both; got {source_size}"
            )
        config.check_scores_run()
        if self.has_encoder:
            self.source_embedding = nnx.Embed(source_size, dim, rngs=rngs)
            self.encoder = nnx.List(Block(config, rngs=rngs) for _ in range(config.encoder_layers))
            self.memory_norm = nnx.LayerNorm(dim, rngs=rngs)
        shares_source = self.has_encoder and tie == "all"
        self.target_embedding = (
            self.source_embedding if shares_source else nnx.Embed(vocabulary_size, dim, rngs=rngs)
        )
        self.decoder = nnx.List(
            Block(config, is_cross=self.has_encoder, rngs=rngs)
            for _ in range(config.decoder_layers)
        )
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.logits = nnx.Linear(dim, vocabulary_size, rngs=rngs) if tie == "none" else None
        # Checkpoints hold a learned table under the name "placement".
        self.placement = PositionEncoding(config, rngs=rngs)

    def __call__(
        self,
        source: Array | None,
        source_lengths: Array | None,
        target_inputs: Array,
        *,
        position_ids: Array | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        Args:
            source: int [B, S]; None for no source, in a "decoder".
            source_lengths: int [B], how many source tokens are real; the rest is padding.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
            position_ids: int [P], increasing: the ids of the positions 0, 1, 2, ... P is at least S
                and T, or S + T in a "decoder". None for those of `PositionEncoding.ids`.
            rng: one PRNG key for training: dropout, random position ids and the noise of
                "monotonic" attention; None for evaluation.
            return_weights: also return the weights, averaged over heads, with which the target
                attends to the source; they take memory T S. In a "decoder" a token attends to
                earlier tokens of the target too, whose weights are left out: rows sum to at most 1.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S] of each decoder layer).
        """
        result = self.features(
            source,
            source_lengths,
            target_inputs,
            position_ids=position_ids,
            rng=rng,
            return_weights=return_weights,
        )
        if not return_weights:
            return self.logits_of(result)
        return self.logits_of(result[0]), result[1]

    def features(
        self,
        source: Array | None,
        source_lengths: Array | None,
        target_inputs: Array,
        *,
        position_ids: Array | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The inputs of the output layer, [B, T, dim]; or (features, weights [L, B, T, S]).

        The arguments are those of a call.
        """
        if source is None or source_lengths is None:
            source = jnp.zeros_like(target_inputs[:, :0])
            source_lengths = jnp.zeros_like(target_inputs[:, 0])
        encoder_rng, decoder_rng = split_rng(rng, 2)
        position_rng = None if rng is None else jax.random.fold_in(rng, 2)
        lengths = source.shape[-1], target_inputs.shape[-1]
        position_ids = self._position_ids(position_ids, *lengths, position_rng)
        cross, visible, at = self._context(
            source, source_lengths, position_ids, lengths[1], encoder_rng
        )
        mask, tokens = causal_mask(), target_inputs
        if visible is not None:
            mask, tokens = mask & token_mask(visible), jnp.concatenate([source, tokens], axis=-1)
        rng, *block_rngs = split_rng(decoder_rng, 1 + len(self.decoder))
        x = self._embed(self.target_embedding, tokens, at, rng=rng)
        weights: list[Any] = []
        for index, (block, rng) in enumerate(zip(self.decoder, block_rngs, strict=True)):
            with jax.named_scope(f"decoder_{index}"):
                result = block(
                    x, cross, mask=mask, position_ids=at, rng=rng, return_weights=return_weights
                )
            x, own = result if return_weights else (result, None)
            weights.append(own)
        if not self.has_encoder:
            x = x[:, lengths[0] :]
        features = self.output_norm(x)
        if not return_weights:
            return features
        stacked = jnp.stack(weights)
        return features, stacked if self.has_encoder else stacked[..., lengths[0] :, : lengths[0]]

    def logits_of(self, features: Array) -> Array:
        """The output layer: [..., dim] -> [..., V]."""
        return (self.logits or self.target_embedding.attend)(features)

    def output_layer(self) -> tuple[Array, Array | None]:
        """Kernel [dim, V] and bias [V] of the output layer; with tied embeddings the bias is None.

        For a loss that computes the logits in pieces.
        """
        if self.logits is None:
            return self.target_embedding.embedding[...].T, None
        bias = self.logits.bias
        return self.logits.kernel[...], None if bias is None else bias[...]

    def encode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        position_ids: Array | None = None,
        rng: Array | None = None,
    ) -> Array:
        """The memory [B, S, dim] that the decoder of an "encoder-decoder" attends to.

        Position ids are not random here: in training, give `position_ids`.
        """
        position_ids = self._position_ids(position_ids, source.shape[-1], 0)
        rng, *block_rngs = split_rng(rng, 1 + len(self.encoder))
        at = self._source_ids(source_lengths, position_ids, source.shape[-1])
        x = self._embed(self.source_embedding, source, at, rng=rng)
        mask = self._source_mask(source_lengths)
        for index, (block, rng) in enumerate(zip(self.encoder, block_rngs, strict=True)):
            with jax.named_scope(f"encoder_{index}"):
                x = block(x, mask=mask, position_ids=at, rng=rng)
        return self.memory_norm(x)

    # --- token by token ---

    def start_decoding(
        self,
        source: Array,
        source_lengths: Array,
        *,
        max_length: int,
        position_ids: Array | None = None,
    ) -> DecodingState:
        """Encodes the source, or reads it, and makes caches for `max_length` tokens.

        Args:
            source: int [B, S]; S may be 0 in a "decoder".
            source_lengths: int [B].
            max_length: the largest number of tokens that `decode_step` will read, at least 1.
            position_ids: as in a call.
        """
        check_integer("max_length", max_length)
        batch_size, length = source.shape
        position_ids = self._position_ids(position_ids, length, max_length)
        cross, visible, at = self._context(source, source_lengths, position_ids, max_length, None)
        room = max_length if self.has_encoder else length + max_length
        lengths = self._visible_lengths(source_lengths, length)
        padding = jnp.zeros_like(lengths) if self.has_encoder else length - lengths
        dtype = self.target_embedding.embedding[...].dtype
        starts = [block.start(cross, (batch_size,), room, dtype) for block in self.decoder]
        sources, blocks = (tuple(parts) for parts in zip(*starts, strict=True))
        position_ids = jnp.broadcast_to(position_ids, (batch_size, *position_ids.shape))
        limit = jnp.full_like(lengths, room)
        fixed = Fixed(sources, position_ids, padding, limit, visible)
        state = DecodingState(fixed, blocks, jnp.zeros_like(lengths))
        if visible is None:
            return state
        return self._extend(state, source, tuple(ids[:, :length] for ids in at))[1]

    def decode_step(self, state: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
        """Reads one more token: int [B] -> (logits [B, V] of the next, state).

        The logits are those of a call with all tokens so far; beyond `max_length`, NaN.
        """
        index = (state.step - state.fixed.padding)[:, None]
        ids = jnp.take_along_axis(state.fixed.position_ids, index, axis=1)
        x, state = self._extend(state, tokens[:, None], (ids,) * self.config.num_position_ids)
        return self.logits_of(self.output_norm(x))[:, 0, :], state

    def _extend(
        self, state: DecodingState, tokens: Array, at: PositionIds
    ) -> tuple[Array, DecodingState]:
        """The last block's output for the next tokens, int [B, t], and the state after them."""
        fixed, step = state.fixed, state.step
        x = self._embed(self.target_embedding, tokens, at)
        x = jnp.where((step < fixed.limit)[:, None, None], x, jnp.nan)
        mask = None if fixed.visible is None else token_mask(fixed.visible)
        first = jnp.max(step, initial=0)
        blocks = []
        layers = zip(self.decoder, state.blocks, fixed.sources, strict=True)
        for index, (block, block_state, source) in enumerate(layers):
            with jax.named_scope(f"decoder_{index}"):
                x, block_state = block.extend(
                    x, block_state, source, first=first, mask=mask, position_ids=at
                )
            blocks.append(block_state)
        return x, DecodingState(fixed, tuple(blocks), step + tokens.shape[-1])

    # --- tokens, positions and masks ---

    def _embed(
        self,
        embedding: nnx.Embed,
        tokens: Array,
        position_ids: PositionIds,
        *,
        rng: Array | None = None,
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to variance 1, they weigh as much as
        # position encodings. `nnx.Embed` would cast to the dtype of the table at its creation.
        x = rows_of(embedding.embedding[...], tokens) * embedding.features**0.5
        encoding = self.placement(position_ids)
        if encoding is not None:
            examples = math.prod(encoding.shape[:-2])  # 1 or B
            x = x + encoding.reshape(examples, *encoding.shape[-2:]).astype(x.dtype)
        return drop_features(x, rng, self.config.dropout_rate)

    def _position_ids(
        self,
        position_ids: Array | None,
        source_length: int,
        target_length: int,
        rng: Array | None = None,
    ) -> Array:
        """The argument `position_ids`, checked; or the ids that stand for None."""
        count = max(source_length, target_length)
        if not self.has_encoder:
            count = source_length + target_length
        if position_ids is None:
            return self.placement.ids(count, rng)
        if position_ids.ndim != 1 or position_ids.shape[0] < count:
            raise ValueError(
                f"position_ids must be [P], P at least {count} for source and target; got"
                f" {list(position_ids.shape)}"
            )
        return position_ids

    def _source_ids(self, source_lengths: Array, position_ids: Array, length: int) -> PositionIds:
        lengths = self._visible_lengths(source_lengths, length)
        return self.placement.source_ids(position_ids, length, lengths)

    def _context(
        self,
        source: Array,
        source_lengths: Array,
        position_ids: Array,
        target_length: int,
        rng: Array | None,
    ) -> tuple[Source | None, Array | None, PositionIds]:
        """The source as the decoder sees it.

        Returns:
            With an encoder, what the cross attention attends to, otherwise None; in a "decoder"
            with a source, bool [B, S + T], False for padding, otherwise None; and the position ids
            of the decoder's tokens.
        """
        length = source.shape[-1]
        if self.has_encoder:
            memory = self.encode(source, source_lengths, position_ids=position_ids, rng=rng)
            cross = Source(
                memory,
                self._source_mask(source_lengths),
                self._visible_lengths(source_lengths, length),
                self._source_ids(source_lengths, position_ids, length),
            )
            return cross, None, self.placement.target_ids(position_ids, target_length)
        if length == 0:
            return None, None, self.placement.target_ids(position_ids, target_length)
        lengths = self._visible_lengths(source_lengths, length)[:, None]
        index = jnp.arange(length + target_length)[None, :]
        is_target = index >= length
        at = jnp.where(is_target, index - length + lengths, index)
        return None, is_target | (index < lengths), (rows_of(position_ids, at),)

    def _source_mask(self, source_lengths: Array) -> Mask | None:
        return padding_mask(source_lengths) if self.config.mask_padding else None

    def _visible_lengths(self, source_lengths: Array, length: int) -> Array:
        """The source lengths as attention sees them: without masking, padding counts too."""
        if self.config.mask_padding:
            return source_lengths
        return jnp.full_like(source_lengths, length)
