"""Encoder and decoder of attention blocks, all target positions at once."""

from __future__ import annotations

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.nn.config import ModelConfig
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.lookup import rows_of
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.position_encoding import PositionEncoding, PositionIds
from attention_jax.nn.transformer import DecoderBlock, EncoderBlock, split_rng
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask, padding_mask

Array = jax.Array


class EncoderDecoder(DropoutModule):
    """The part of `Seq2Seq` that takes all target positions at once (teacher forcing)."""

    def __init__(
        self,
        config: ModelConfig,
        vocabulary_size: int,
        *,
        source_vocabulary_size: int | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        dim, tie = config.dim, config.tied_embeddings
        source_size = vocabulary_size if source_vocabulary_size is None else source_vocabulary_size
        if tie == "all" and source_size != vocabulary_size:
            raise ValueError(
                f"source_vocabulary_size must be {vocabulary_size}, that of the target, where all"
                f" embeddings are tied; got {source_size}"
            )
        if config.architecture != "encoder-decoder":
            raise ValueError(f"architecture must be encoder-decoder; got {config.architecture!r}")
        config.check_scores_run()
        self_score = config.self_score
        dtypes = dtypes_of(options)
        rotary: Any = {
            "rotary_wavelength": config.rotary_wavelength,
            "num_position_ids": config.num_position_ids,
        }
        self.config = config
        self.dtype = options.get("dtype")
        self.source_embedding = nnx.Embed(source_size, dim, rngs=rngs, **dtypes)
        # This module hands its blocks the keys of dropout.
        self.encoder = nnx.List(
            EncoderBlock(self_score, config, **rotary, rngs=rngs, keep_rngs=False, **options)
            for _ in range(config.encoder_layers)
        )
        self.memory_norm = nnx.LayerNorm(dim, rngs=rngs, **dtypes)
        self.target_embedding = (
            self.source_embedding
            if tie == "all"
            else nnx.Embed(vocabulary_size, dim, rngs=rngs, **dtypes)
        )
        self.decoder = nnx.List(
            DecoderBlock(
                self_score,
                config.score,
                config,
                **rotary,
                rngs=rngs,
                keep_rngs=False,
                **options,
            )
            for _ in range(config.decoder_layers)
        )
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs, **dtypes)
        self.logits = (
            nnx.Linear(dim, vocabulary_size, rngs=rngs, **options) if tie == "none" else None
        )
        # Checkpoints hold a learned table under the name "placement".
        self.placement = PositionEncoding(
            config, param_dtype=options.get("param_dtype", jnp.float32), rngs=rngs
        )
        self._set_dropout(config.largest_dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        position_ids: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        Args:
            source: int [B, S].
            source_lengths: int [B], how many source tokens are real; the rest is padding.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
            position_ids: int [P], increasing, P at least S and T: the ids of the positions 0, 1,
                2, ...; None for those of `PositionEncoding.ids`.
            deterministic: True for evaluation: no dropout, no noise and no random position ids;
                False for training; None for the module's setting.
            dropout_rng: one PRNG key for all three, which enables them whatever the module's
                setting; None for the next key of the module's stream, in training.
            return_weights: also return the cross-attention weights, which take memory T S.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S] of each decoder layer, averaged over
            heads).

        Raises:
            ValueError: a model that is random in training lacks `deterministic` or a PRNG key.
        """
        result = self.features(
            source,
            source_lengths,
            target_inputs,
            position_ids=position_ids,
            deterministic=deterministic,
            dropout_rng=dropout_rng,
            return_weights=return_weights,
        )
        return self._logits_and_weights(result, return_weights)

    def features(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        position_ids: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The inputs of the output layer, [B, T, dim]; or (features, weights [L, B, T, S]).

        The arguments are those of a call.
        """
        dropout_rng = self._random_key(dropout_rng, deterministic)
        encoder_rng, decoder_rng = split_rng(dropout_rng, 2)
        position_rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, 2)
        position_ids = self._position_ids(
            position_ids, source.shape[-1], target_inputs.shape[-1], position_rng
        )
        memory = self._encode(source, source_lengths, position_ids, encoder_rng)
        return self._decode(
            memory, source_lengths, target_inputs, position_ids, decoder_rng, return_weights
        )

    def logits_of(self, features: Array) -> Array:
        """The output layer: [..., dim] -> [..., V]."""
        return (self.logits or self.target_embedding.attend)(features)

    def encode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        position_ids: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The memory [B, S, dim] that the decoder attends to.

        With `return_weights`: (memory, weights [L, B, N, S, S] of the encoder's self attentions).
        Position ids are not random here: in training, give `position_ids`.
        """
        rng = self._dropout_rng(dropout_rng, deterministic)
        return self._encode(source, source_lengths, position_ids, rng, return_weights)

    def _encode(
        self,
        source: Array,
        source_lengths: Array,
        position_ids: Array | None,
        dropout_rng: Array | None,
        return_weights: bool = False,
    ) -> Any:
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.encoder))
        mask = self._source_mask(source_lengths)
        token_ids = self._source_ids(position_ids, source.shape[-1], source_lengths)
        x = self._embed(self.source_embedding, source, token_ids, rng=rng)
        weights: list[Any] = []
        for index, (block, rng) in enumerate(zip(self.encoder, block_rngs, strict=True)):
            with jax.named_scope(f"encoder_{index}"):
                result = block(
                    x,
                    mask=mask,
                    position_ids=token_ids,
                    deterministic=rng is None,
                    dropout_rng=rng,
                    return_weights=return_weights,
                )
            x, block_weights = result if return_weights else (result, None)
            weights.append(block_weights)
        memory = self.memory_norm(x)
        if not return_weights:
            return memory
        batch_size, length = source.shape
        no_weights = jnp.zeros((0, batch_size, self.config.num_heads, length, length))
        return memory, jnp.stack(weights) if weights else no_weights

    def decode(
        self,
        memory: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        position_ids: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Logits [B, T, V] of a memory that `encode` made.

        With `return_weights`: (logits, cross-attention weights [L, B, T, S], averaged over heads).
        """
        rng = self._random_key(dropout_rng, deterministic)
        result = self._decode(
            memory, source_lengths, target_inputs, position_ids, rng, return_weights
        )
        return self._logits_and_weights(result, return_weights)

    def _decode(
        self,
        memory: Array,
        source_lengths: Array,
        target_inputs: Array,
        position_ids: Array | None,
        dropout_rng: Array | None,
        return_weights: bool,
    ) -> Any:
        """The inputs of the output layer, [B, T, dim]; or (features, weights)."""
        # Target padding comes after every real token, and the causal mask hides it from them.
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.decoder))
        source_length, target_length = memory.shape[-2], target_inputs.shape[-1]
        mask = self._source_mask(source_lengths)
        lengths = self._visible_lengths(source_lengths, source_length)
        position_ids = self._position_ids(position_ids, source_length, target_length)
        target_ids = self.placement.target_ids(position_ids, target_length)
        source_ids = self._source_ids(position_ids, source_length, source_lengths)
        x = self._embed(self.target_embedding, target_inputs, target_ids, rng=rng)
        weights: list[Any] = []
        for index, (block, rng) in enumerate(zip(self.decoder, block_rngs, strict=True)):
            with jax.named_scope(f"decoder_{index}"):
                result = block(
                    x,
                    memory,
                    source_lengths=lengths,
                    memory_mask=mask,
                    position_ids=target_ids,
                    memory_position_ids=source_ids,
                    deterministic=rng is None,
                    dropout_rng=rng,
                    return_weights=return_weights,
                )
            x, block_weights = result if return_weights else (result, None)
            weights.append(block_weights)
        features = self.output_norm(x)
        return (features, jnp.stack(weights)) if return_weights else features

    def _logits_and_weights(self, result: Any, return_weights: bool) -> Any:
        """Logits of features; or (logits, weights) of (features, weights)."""
        if not return_weights:
            return self.logits_of(result)
        features, weights = result
        return self.logits_of(features), weights

    # --- shared with decoding token by token ---

    def _random_key(self, dropout_rng: Array | None, deterministic: bool | None) -> Array | None:
        """One key for dropout, random position ids and the noise of attention; or None."""
        has_noise = any(block.cross_attention.kind.has_noise for block in self.decoder)
        also_random = has_noise or self.config.position_draw != "none"
        return self._dropout_rng(dropout_rng, deterministic, also_random=also_random)

    def _embed(
        self,
        embedding: nnx.Embed,
        tokens: Array,
        position_ids: PositionIds,
        *,
        rng: Array | None = None,
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to variance 1, they weigh as much as
        # position encodings. The dtype is that of the parameters, not of the table at its creation
        # as in Flax.
        table = embedding.embedding[...]
        table = table if self.dtype is None else table.astype(self.dtype)
        x = rows_of(table, tokens) * embedding.features**0.5
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
        if position_ids is None:
            return self.placement.ids(count, rng)
        if position_ids.ndim != 1 or position_ids.shape[0] < count:
            raise ValueError(
                f"position_ids must be [P], P at least {count} for source and target; got"
                f" {list(position_ids.shape)}"
            )
        return position_ids

    def _source_ids(
        self, position_ids: Array | None, length: int, source_lengths: Array
    ) -> PositionIds:
        position_ids = self._position_ids(position_ids, length, 0)
        lengths = self._visible_lengths(source_lengths, length)
        return self.placement.source_ids(position_ids, length, lengths)

    def _source_mask(self, source_lengths: Array) -> Mask | None:
        return padding_mask(source_lengths) if self.config.mask_padding else None

    def _visible_lengths(self, source_lengths: Array, memory_length: int) -> Array:
        """The source lengths as attention sees them: without masking, padding counts too."""
        if self.config.mask_padding:
            return source_lengths
        return jnp.full_like(source_lengths, memory_length)
