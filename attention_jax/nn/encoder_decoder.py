"""Encoder and decoder of attention blocks, all target positions at once."""

from __future__ import annotations

import functools
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.lookup import rows_of
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.placement import Placement, Positions
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.nn.transformer import DecoderBlock, EncoderBlock, split_rng
from attention_jax.pairwise.dropout import drop_features
from attention_jax.pairwise.masks import Mask, padding_mask

Array = jax.Array


class EncoderDecoder(DropoutModule):
    """The part of `Seq2Seq` that takes all target positions at once (teacher forcing)."""

    def __init__(
        self,
        config: Seq2SeqConfig,
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
        config.check_vocabularies(source_size, vocabulary_size)
        self_score = config.self_attention_score or config.score
        dtypes = dtypes_of(options)
        self.config = config
        self.dtype = options.get("dtype")
        self.source_embedding = nnx.Embed(source_size, dim, rngs=rngs, **dtypes)
        # Blocks drop with keys that this module hands on.
        self.encoder = nnx.List(
            EncoderBlock(self_score, config.block, rngs=rngs, keep_rngs=False, **options)
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
                self_score, config.score, config.block, cross=config.cross, rngs=rngs,
                keep_rngs=False, **options,
            )
            for _ in range(config.decoder_layers)
        )  # fmt: skip
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs, **dtypes)
        self.logits = (
            nnx.Linear(dim, vocabulary_size, rngs=rngs, **options) if tie == "none" else None
        )
        self.placement = Placement(
            config.positions, dim, param_dtype=options.get("param_dtype", jnp.float32), rngs=rngs
        )
        self._set_dropout(config.dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        Args:
            source: int [B, S].
            source_lengths: int [B]; what stands from there on is padding.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
            places: int [P], rising, P at least S and T: the positions of tokens that stand 0, 1,
                2, ... away from where they are counted; None for `Placement.places`.
            deterministic: True for evaluation: no dropout, no noise, and positions that are not
                drawn; False for training; None for the module's setting.
            dropout_rng: one PRNG key for all of these, whatever the module's setting; None for the
                next key of the module's stream, in training.
            return_weights: also return the cross-attention weights, which take memory T S.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S]), one row a decoder layer, averaged
            over heads.

        Raises:
            ValueError: a model with dropout was not told whether to drop, or has no key for what is
                random in training.
        """
        found = self.features(
            source, source_lengths, target_inputs, places=places, deterministic=deterministic,
            dropout_rng=dropout_rng, return_weights=return_weights,
        )  # fmt: skip
        features, weights = found if return_weights else (found, None)
        logits = self.logits_of(features)
        return (logits, weights) if return_weights else logits

    def features(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """What a call gives its output layer, [B, T, dim]; or (it, weights [L, B, T, S])."""
        dropout_rng = self._random_key(dropout_rng, deterministic)
        encoder_rng, decoder_rng = split_rng(dropout_rng, 2)
        place_rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, 2)
        places = self._places(places, source.shape[-1], target_inputs.shape[-1], place_rng)
        memory = self._encode(source, source_lengths, places, encoder_rng)
        return self._decode(
            memory, source_lengths, target_inputs, places, decoder_rng, return_weights
        )

    def logits_of(self, features: Array) -> Array:
        """The output layer: [..., dim] -> [..., V]."""
        return (self.logits or self.target_embedding.attend)(features)

    def encode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        places: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The memory [B, S, dim] that the decoder attends to.

        With `return_weights`: (memory, weights [L, B, N, S, S] of the encoder's self attentions).
        Positions are not drawn here: in training, give `places`.
        """
        rng = self._dropout_rng(dropout_rng, deterministic)
        return self._encode(source, source_lengths, places, rng, return_weights)

    def _encode(
        self,
        source: Array,
        source_lengths: Array,
        places: Array | None,
        dropout_rng: Array | None,
        return_weights: bool = False,
    ) -> Any:
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.encoder))
        mask = self._source_mask(source_lengths)
        positions = self._source_positions(places, source.shape[-1], source_lengths)
        x = self._embed(self.source_embedding, source, positions, rng=rng)
        weights: list[Any] = []
        for index, (block, rng) in enumerate(zip(self.encoder, block_rngs, strict=True)):
            apply = functools.partial(
                block, mask=mask, positions=positions, deterministic=rng is None,
                return_weights=return_weights,
            )  # fmt: skip
            with jax.named_scope(f"encoder_{index}"):
                found = self._checkpointed(apply)(x, dropout_rng=rng)
            x, block_weights = found if return_weights else (found, None)
            weights.append(block_weights)
        memory = self.memory_norm(x)
        if not return_weights:
            return memory
        batch_size, length = source.shape
        none = jnp.zeros((0, batch_size, self.config.heads, length, length))
        return memory, jnp.stack(weights) if weights else none

    def decode(
        self,
        memory: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Logits [B, T, V] of a memory that `encode` made.

        With `return_weights`: (logits, cross-attention weights [L, B, T, S], averaged over heads).
        """
        rng = self._random_key(dropout_rng, deterministic)
        found = self._decode(memory, source_lengths, target_inputs, places, rng, return_weights)
        features, weights = found if return_weights else (found, None)
        logits = self.logits_of(features)
        return (logits, weights) if return_weights else logits

    def _decode(
        self,
        memory: Array,
        source_lengths: Array,
        target_inputs: Array,
        places: Array | None,
        dropout_rng: Array | None,
        return_weights: bool,
    ) -> Any:
        """What the output layer is given [B, T, dim]; or (it, weights)."""
        # Padding of the target stands to its right, where no real position looks.
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.decoder))
        mask = self._source_mask(source_lengths)
        lengths = self._visible_lengths(source_lengths, memory.shape[-2])
        places = self._places(places, memory.shape[-2], target_inputs.shape[-1])
        positions = self.placement.target_positions(places, target_inputs.shape[-1])
        x = self._embed(self.target_embedding, target_inputs, positions, rng=rng)
        memory_positions = self._source_positions(places, memory.shape[-2], source_lengths)
        weights: list[Any] = []
        for index, (block, rng) in enumerate(zip(self.decoder, block_rngs, strict=True)):
            apply = functools.partial(
                block, source_lengths=lengths, memory_mask=mask, positions=positions,
                memory_positions=memory_positions, deterministic=rng is None,
                return_weights=return_weights,
            )  # fmt: skip
            with jax.named_scope(f"decoder_{index}"):
                found = self._checkpointed(apply)(x, memory, dropout_rng=rng)
            x, block_weights = found if return_weights else (found, None)
            weights.append(block_weights)
        features = self.output_norm(x)
        return (features, jnp.stack(weights)) if return_weights else features

    # --- what decoding shares with it ---

    def _random_key(self, dropout_rng: Array | None, deterministic: bool | None) -> Array | None:
        """One key for dropout, drawn positions and the noise of monotonic attention, or None."""
        config = self.config
        also_random = config.attention == "monotonic" or config.positions.draw != "none"
        return self._dropout_rng(dropout_rng, deterministic, also_random=also_random)

    def _embed(
        self,
        embedding: nnx.Embed,
        tokens: Array,
        positions: Positions,
        *,
        rng: Array | None = None,
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to 1, they weigh as much as positions.
        # In the dtype of the parameters, not in the one that the table was made with as in Flax.
        table = embedding.embedding[...]
        table = table if self.dtype is None else table.astype(self.dtype)
        x = rows_of(table, tokens) * embedding.features**0.5
        codes = self.placement.codes(positions)
        if codes is not None:
            examples = math.prod(codes.shape[:-2])  # 1 or B
            x = x + codes.reshape(examples, *codes.shape[-2:]).astype(x.dtype)
        return drop_features(x, rng, self.config.dropout_rate)

    def _places(
        self,
        given: Array | None,
        source_length: int,
        target_length: int,
        rng: Array | None = None,
    ) -> Array:
        count = max(source_length, target_length)
        if given is None:
            return self.placement.places(count, rng)
        if given.ndim != 1 or given.shape[0] < count:
            raise ValueError(
                f"places must be [P], P at least {count} for source and target; got"
                f" {list(given.shape)}"
            )
        return given

    def _source_positions(
        self, places: Array | None, length: int, source_lengths: Array
    ) -> Positions:
        places = self._places(places, length, 0)
        lengths = self._visible_lengths(source_lengths, length)
        return self.placement.source_positions(places, length, lengths)

    def _source_mask(self, source_lengths: Array) -> Mask | None:
        return padding_mask(source_lengths) if self.config.mask_padding else None

    def _visible_lengths(self, source_lengths: Array, memory_length: int) -> Array:
        """The S that windows are placed in: a model that sees padding counts it, too."""
        if self.config.mask_padding:
            return source_lengths
        return jnp.full_like(source_lengths, memory_length)

    def _checkpointed(self, block: Any) -> Any:
        return jax.checkpoint(block) if self.config.checkpoint_blocks else block
