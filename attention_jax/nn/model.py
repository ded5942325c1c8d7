"""The model: encoder and decoder of attention blocks, or a decoder alone; no recurrence."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.checks import check_integer, checked_rng
from attention_jax.core.products import einsum
from attention_jax.nn.block import Block, BlockState, Source, split_rng
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.generation import DecodingState, Fixed, Generator
from attention_jax.nn.inputs import PackedInputs, checked_ids, checked_inputs, checked_source
from attention_jax.nn.parameters import check_rngs, layer_norm
from attention_jax.nn.position_encoding import PositionEncoding, PositionIds
from attention_jax.nn.positions import rows_of
from attention_jax.positions.contract import Mask
from attention_jax.positions.dropout import drop_features
from attention_jax.positions.masks import causal_mask, padding_mask, token_mask

Array = jax.Array


class Model(Generator):
    """A model of sequences with any score.

    An "encoder-decoder" attends to an encoded source. A "decoder" has one sequence, the source and
    then the target, in which each token attends to itself and to earlier tokens; its source may be
    None.

    Args:
        config: the settings.
        vocabulary_size: V, of source and target.
        rngs: the stream of the initial parameters.

    Raises:
        ValueError: a score cannot have these sizes, or an argument has the wrong type.

    >>> model = Model(ModelConfig(score="additive", dim=8), 11, rngs=nnx.Rngs(0))
    >>> source, lengths, inputs = jnp.ones((2, 5), int), jnp.array([3, 5]), jnp.ones((2, 7), int)
    >>> jax.jit(model)(source, lengths, inputs).shape
    (2, 7, 11)
    """

    def __init__(self, config: ModelConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        if not isinstance(config, ModelConfig):
            raise ValueError(f"config must be a ModelConfig; got {type(config).__name__}")
        check_rngs(rngs)
        self.vocabulary_size = check_integer("vocabulary_size", vocabulary_size)
        dim, tie = config.dim, config.tied_embeddings
        self.config, self.has_encoder = config, config.architecture == "encoder-decoder"
        if self.has_encoder:
            self.source_embedding = nnx.Embed(vocabulary_size, dim, rngs=rngs)
            self.encoder = nnx.List(Block(config, rngs=rngs) for _ in range(config.encoder_layers))
            self.memory_norm = layer_norm(dim, config.cast_dtype, rngs=rngs)
        shares_source = self.has_encoder and tie == "all"
        self.target_embedding = (
            self.source_embedding if shares_source else nnx.Embed(vocabulary_size, dim, rngs=rngs)
        )
        self.decoder = nnx.List(
            Block(config, is_cross=self.has_encoder, rngs=rngs)
            for _ in range(config.decoder_layers)
        )
        self.output_norm = layer_norm(dim, config.cast_dtype, rngs=rngs)
        self.logits = nnx.Linear(dim, vocabulary_size, rngs=rngs) if tie == "none" else None
        # Checkpoints hold a learned table under the name "placement".
        self.placement = PositionEncoding(config, rngs=rngs)
        self.is_random = config.position_draw != "none" or self.decoder[0].is_random
        for _, module in nnx.iter_modules(self):
            if isinstance(module, nnx.LayerNorm):
                module.use_fast_variance = config.fast_variance

    def __call__(
        self,
        source: Array | None,
        source_lengths: Array | None,
        target_inputs: Array,
        *,
        segments: Any = None,
        position_ids: Array | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        A token is a number from 0 to V - 1. Under `jit`, where the values are not known, another
        number makes the logits of its example NaN.

        Args:
            source: int [B, S]; None for no source, in a "decoder".
            source_lengths: int [B], how many source tokens are real, the rest is padding; None for
                all.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
                Also float [B, T, V], vectors in place of tokens, but not after the source of a
                "decoder". The table of embeddings is then the kernel of a linear layer; a one-hot
                vector is a token.
            segments: the documents that share the rows, each of which sees itself alone and has
                positions of its own. In a "decoder" without a source int [B, T], the number of each
                token's document, negative for padding, as in `Documents.from_segments`; or
                `Documents`. In an "encoder-decoder" the pair of those of source and target, in
                which a document has the same number, for "global" and "coverage" attention. None
                for one document per row. Under `jit`, a document with more tokens than a learned
                table of positions has rows makes the logits of its example NaN.
            position_ids: int [P], increasing: the ids of the positions 0, 1, 2, ... P is at least S
                and T, or S + T in a "decoder". None for those of `PositionEncoding.ids`.
            rng: one PRNG key for training: dropout, random position ids and the noise of
                "monotonic" attention; None for evaluation.
            return_weights: also return the weights [T, S], averaged over heads, with which the
                target attends to the source. In a "decoder" a token attends to earlier tokens of
                the target too, whose weights are left out: rows sum to at most 1.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S] of each decoder layer).

        Raises:
            ValueError: an argument has the wrong shape, dtype or range; or `rng` is None after
                `model.train()`.
        """
        options: Any = {"position_ids": position_ids, "rng": rng, "return_weights": return_weights}
        result = self.features(source, source_lengths, target_inputs, segments=segments, **options)
        if not return_weights:
            return self.logits_of(result)
        features, weights = result
        return self.logits_of(features), weights

    def features(
        self,
        source: Array | None,
        source_lengths: Array | None,
        target_inputs: Array,
        *,
        segments: Any = None,
        position_ids: Array | None = None,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The inputs of the output layer, [B, T, dim]; or (features, weights [L, B, T, S]).

        The arguments are those of a call.
        """
        self._check_rng(rng)
        rng = None if rng is None else checked_rng(rng, name="rng")
        source, source_lengths, target_inputs, documents = checked_inputs(
            source, source_lengths, target_inputs, segments, self.vocabulary_size, self.config
        )
        encoder_rng, decoder_rng = split_rng(rng, 2)
        position_rng = None if rng is None else jax.random.fold_in(rng, 2)
        length, target_length = source.shape[1], target_inputs.shape[1]
        count, packed = self._num_positions(length, target_length), documents is not None
        position_ids = self.placement.ids(count, position_rng, position_ids, packed=packed)
        cross, visible, at = self._context(
            source, source_lengths, position_ids, target_length, encoder_rng, documents
        )
        mask, tokens = causal_mask(), target_inputs
        if documents is not None:
            mask = mask & documents.target.mask()
        if visible is not None:
            mask, tokens = mask & token_mask(visible), jnp.concatenate([source, tokens], axis=-1)
        x, layers = self._blocks(
            "decoder",
            tokens,
            at,
            sources=[cross] * len(self.decoder),
            mask=mask,
            rng=decoder_rng,
            return_weights=return_weights,
        )
        start = 0 if self.has_encoder else length
        features = self.output_norm(x[:, start:]).astype(x.dtype)
        if not return_weights:
            return features
        weights = jnp.stack([layer.weights for layer in layers])
        return features, weights[..., start:, :length]

    def logits_of(self, features: Array) -> Array:
        """The output layer: [..., dim] -> [..., V], float32 with `config.dtype` "bfloat16"."""
        if self.config.cast_dtype is None:
            return (self.logits or self.target_embedding.attend)(features)
        kernel, bias = self.output_layer()
        logits = einsum("...d,dv->...v", features, kernel)
        return logits if bias is None else logits + jnp.broadcast_to(bias, logits.shape)

    def output_layer(self) -> tuple[Array, Array | None]:
        """Kernel [dim, V] and bias [V] of the output layer; with tied embeddings the bias is None.

        For a loss that computes the logits itself.
        """
        if self.logits is None:
            return self.target_embedding.embedding[...].T, None
        bias = self.logits.bias
        return self.logits.kernel[...], None if bias is None else bias[...]

    def encode(
        self,
        source: Array,
        source_lengths: Array | None = None,
        *,
        position_ids: Array | None = None,
        rng: Array | None = None,
    ) -> Source:
        """The memory [B, S, dim] that the decoder of an "encoder-decoder" attends to.

        The arguments are those of a call. In training, give `position_ids` to have random ones.
        """
        source, source_lengths = checked_source(source, source_lengths, self.vocabulary_size)
        position_ids = self.placement.ids(source.shape[1], None, position_ids)
        memory = self._context(source, source_lengths, position_ids, 0, rng)[0]
        if memory is None:
            raise ValueError("encode needs the architecture encoder-decoder; got decoder")
        return memory

    # --- token by token ---

    def start_decoding(
        self,
        source: Array,
        source_lengths: Array | None = None,
        *,
        max_length: int,
        position_ids: Array | None = None,
    ) -> DecodingState:
        """Encodes the source, or reads it, and makes caches for `max_length` tokens.

        Args:
            source: int [B, S]; S may be 0 in a "decoder".
            source_lengths: int [B]; None for all tokens.
            max_length: the largest number of tokens that `decode_step` will read, at least 1.
            position_ids: as in a call.
        """
        max_length = check_integer("max_length", max_length)
        source, source_lengths = checked_source(source, source_lengths, self.vocabulary_size)
        batch_size, length = source.shape
        count = self._num_positions(length, max_length)
        position_ids = self.placement.ids(count, None, position_ids)
        cross, visible, at = self._context(source, source_lengths, position_ids, max_length, None)
        room = max_length if self.has_encoder else length + max_length
        zeros = jnp.zeros_like(source_lengths)
        padding = length - self._visible_lengths(source_lengths, length)
        dtype = None if self.config.cast_dtype else self.target_embedding.embedding[...].dtype
        starts = [block.start(cross, (batch_size,), room, dtype) for block in self.decoder]
        sources, blocks = (tuple(parts) for parts in zip(*starts, strict=True))
        position_ids = jnp.broadcast_to(position_ids[:room], (batch_size, room))
        fixed = Fixed(sources, position_ids, zeros if self.has_encoder else padding, visible)
        state = DecodingState(fixed, blocks, zeros)
        if visible is None:
            return state
        return self._extend(state, source, tuple(ids[:, :length] for ids in at))[1]

    def decode_step(self, state: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
        """Reads one more token: int [B] -> (logits [B, V] of the next, state).

        The logits are those of a call with all tokens so far; beyond `max_length`, NaN.
        """
        tokens = checked_ids("tokens", tokens, state.step.shape, self.vocabulary_size)
        position_ids = state.fixed.position_ids
        index = (state.step - state.fixed.padding)[:, None]
        ids = jnp.take_along_axis(position_ids, index, axis=1)
        x, after = self._extend(state, tokens[:, None], (ids,) * self.config.num_position_ids)
        has_room = state.step < position_ids.shape[1]
        x = jnp.where(has_room[:, None, None], self.output_norm(x).astype(x.dtype), jnp.nan)
        return self.logits_of(x)[:, 0, :], after

    def _extend(
        self, state: DecodingState, tokens: Array, at: PositionIds
    ) -> tuple[Array, DecodingState]:
        """The last block's output for the next tokens, int [B, t], and the state after them."""
        fixed, first = state.fixed, jnp.max(state.step, initial=0)
        mask = None if fixed.visible is None else token_mask(fixed.visible)
        x, layers = self._blocks(
            "decoder",
            tokens,
            at,
            sources=fixed.sources,
            mask=mask,
            states=state.blocks,
            first=first,
        )
        blocks = tuple(layer.carry for layer in layers)
        return x, DecodingState(fixed, blocks, state.step + tokens.shape[-1])

    # --- tokens, positions and masks ---

    def _blocks(
        self,
        side: str,
        tokens: Array,
        at: PositionIds,
        *,
        mask: Mask | None,
        sources: Sequence[Source | None] = (),
        states: Sequence[BlockState] = (),
        first: Array | int = 0,
        rng: Array | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, list[Any]]:
        """The output of the "encoder" or "decoder" for tokens [B, t], and the result of each block.

        `sources` and `states` have one entry per block, or none.
        """
        blocks, layers = getattr(self, side), []
        embedding = self.source_embedding if side == "encoder" else self.target_embedding
        rng, *rngs = split_rng(rng, 1 + len(blocks))
        x = self._embed(embedding, tokens, at, rng)
        each = itertools.zip_longest(blocks, sources, states, rngs)
        for index, (block, source, state, rng) in enumerate(each):
            options: Any = {"state": state, "first": first, "return_weights": return_weights}
            options |= {"mask": mask, "position_ids": at[0], "rng": rng}
            attend: Any = functools.partial(block.attend, **options)
            attend = jax.checkpoint(attend) if self.config.remat else attend
            with jax.named_scope(f"{side}_{index}"):
                layer = attend(x, source=source)
            x = layer.output
            layers.append(layer)
        return x, layers

    def _embed(
        self, embedding: nnx.Embed, tokens: Array, position_ids: PositionIds, rng: Array | None
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to variance 1, they weigh as much as
        # position encodings. `nnx.Embed` would cast to the dtype of the table at its creation.
        table, is_vector = embedding.embedding[...], jnp.issubdtype(tokens.dtype, jnp.floating)
        x = (tokens @ table if is_vector else rows_of(table, tokens)) * embedding.features**0.5
        encoding = self.placement(position_ids)
        if encoding is not None:
            examples = math.prod(encoding.shape[:-2])  # 1 or B
            x = x + encoding.reshape(examples, *encoding.shape[-2:]).astype(x.dtype)
        x = x.astype(self.config.cast_dtype or x.dtype)
        return drop_features(x, rng, self.config.dropout_rate)

    def _num_positions(self, *lengths: int) -> int:
        """The positions of a source and a target of these lengths."""
        return max(lengths) if self.has_encoder else sum(lengths)

    def _context(
        self,
        source: Array,
        source_lengths: Array,
        position_ids: Array,
        target_length: int,
        rng: Array | None,
        documents: PackedInputs | None = None,
    ) -> tuple[Source | None, Array | None, PositionIds]:
        """The source as the decoder sees it.

        Returns:
            The memory for the cross attention, None in a "decoder"; bool [B, S + T], False for
            padding, None except in a "decoder" with a source; the position ids of the decoder's
            tokens.
        """
        length, cross = source.shape[-1], None
        of_source, of_target = documents or (None, None)
        if self.has_encoder:
            real = self._visible_lengths(source_lengths, length)
            ids = self.placement.source_ids(position_ids, length, real, of_source)
            own: Mask | None = padding_mask(source_lengths) if self.config.mask_padding else None
            own = own if of_source is None else of_source.mask()
            x, _ = self._blocks("encoder", source, ids, mask=own, rng=rng)
            cross = Source(self.memory_norm(x).astype(x.dtype), own, real, ids[0])
        if cross is not None and of_target is not None:
            cross = cross._replace(mask=of_target.mask(of_source), lengths=None)
        if self.has_encoder or length == 0:
            return cross, None, self.placement.target_ids(position_ids, target_length, of_target)
        lengths = self._visible_lengths(source_lengths, length)[:, None]
        index = jnp.arange(length + target_length)[None, :]
        is_target = index >= length
        at = jnp.where(is_target, index - length + lengths, index)
        return None, is_target | (index < lengths), (rows_of(position_ids, at),)

    def _visible_lengths(self, source_lengths: Array, length: int) -> Array:
        """The source lengths as attention sees them: without masking, padding counts too."""
        if self.config.mask_padding:
            return source_lengths
        return jnp.full_like(source_lengths, length)
