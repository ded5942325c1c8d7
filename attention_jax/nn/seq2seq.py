"""A sequence-to-sequence model of attention alone: no recurrence, every position at once."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.decoding import BeamResult, beam_search, greedy_search
from attention_jax.dropout import drop_features
from attention_jax.masks import Mask, padding_mask
from attention_jax.nn.placement import Placement, Positions
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.nn.transformer import DecoderBlock, DecoderState, EncoderBlock, split_rng

Array = jax.Array


class Decoded(NamedTuple):
    """What greedy decoding found."""

    tokens: Array  # int32 [B, max_length], PAD after EOS
    weights: Array  # [L, B, max_length, S], cross attention of each decoder layer


class DecodingState(NamedTuple):
    """What the next token depends on; `blocks` and lengths have the batch axis in front."""

    blocks: tuple[DecoderState, ...]
    source_lengths: Array  # int [B]
    places: Array  # int [P], see `Seq2Seq.__call__`
    step: Array  # int32 [], how many tokens have been read
    room: Array  # int32 [], how many there may be


class Seq2Seq(nnx.Module):
    """Encoder and decoder of attention blocks.

    Args:
        config: the settings.
        vocabulary_size: V, of the target.
        source_vocabulary_size: of the source; None for V.
        rngs: where the initial parameters come from.

    Raises:
        ValueError: all embeddings are one, and there are two vocabularies.

    >>> model = Seq2Seq(Seq2SeqConfig(score="additive", dim=8), 11, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5), int), jnp.array([3, 5]), jnp.ones((2, 7), int)).shape
    (2, 7, 11)
    """

    def __init__(
        self,
        config: Seq2SeqConfig,
        vocabulary_size: int,
        *,
        source_vocabulary_size: int | None = None,
        rngs: nnx.Rngs,
    ):
        dim, tie = config.dim, config.tied_embeddings
        source_size = vocabulary_size if source_vocabulary_size is None else source_vocabulary_size
        config.check_vocabularies(source_size, vocabulary_size)
        self_score = config.self_attention_score or config.score
        self.config = config
        self.source_embedding = nnx.Embed(source_size, dim, rngs=rngs)
        self.encoder = nnx.List(
            EncoderBlock(self_score, config.block, rngs=rngs) for _ in range(config.encoder_layers)
        )
        self.memory_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.target_embedding = (
            self.source_embedding if tie == "all" else nnx.Embed(vocabulary_size, dim, rngs=rngs)
        )
        self.decoder = nnx.List(
            DecoderBlock(self_score, config.score, config.block, cross=config.cross, rngs=rngs)
            for _ in range(config.decoder_layers)
        )
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.logits = nnx.Linear(dim, vocabulary_size, rngs=rngs) if tie == "none" else None
        self.placement = Placement(config.positions, dim, rngs=rngs)

    def __call__(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None = None,
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
            dropout_rng: one PRNG key, for training; None for no dropout, no noise, and positions
                that are not drawn.
            return_weights: also return the cross-attention weights.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S]), one row a decoder layer, averaged
            over heads.
        """
        features, weights = self.features(
            source, source_lengths, target_inputs, places=places, dropout_rng=dropout_rng
        )
        logits = self.logits_of(features)
        return (logits, weights) if return_weights else logits

    def features(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None = None,
        dropout_rng: Array | None = None,
    ) -> tuple[Array, Array]:
        """What a call gives its output layer, [B, T, dim], and the weights [L, B, T, S]."""
        encoder_rng, decoder_rng = split_rng(dropout_rng, 2)
        place_rng = None if dropout_rng is None else jax.random.fold_in(dropout_rng, 2)
        places = self._places(places, source.shape[-1], target_inputs.shape[-1], place_rng)
        memory = self.encode(source, source_lengths, places=places, dropout_rng=encoder_rng)
        return self._decode(
            memory, source_lengths, target_inputs, places=places, dropout_rng=decoder_rng
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
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The memory [B, S, dim] that the decoder attends to.

        With `return_weights`: (memory, weights [L, B, N, S, S] of the encoder's self attentions).
        `places` None is for evaluation: positions are not drawn here.
        """
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.encoder))
        mask = self._source_mask(source_lengths)
        positions = self._source_positions(places, source.shape[-1], source_lengths)
        x = self._embed(self.source_embedding, source, positions, rng=rng)
        weights = []
        for index, (block, rng) in enumerate(zip(self.encoder, block_rngs, strict=True)):
            apply = functools.partial(block, mask=mask, positions=positions, return_weights=True)
            with jax.named_scope(f"encoder_{index}"):
                x, block_weights = self._checkpointed(apply)(x, dropout_rng=rng)
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
        dropout_rng: Array | None = None,
    ) -> tuple[Array, Array]:
        """Logits [B, T, V] and cross-attention weights [L, B, T, S], averaged over heads."""
        features, weights = self._decode(
            memory, source_lengths, target_inputs, places=places, dropout_rng=dropout_rng
        )
        return self.logits_of(features), weights

    def _decode(
        self,
        memory: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        places: Array | None,
        dropout_rng: Array | None,
    ) -> tuple[Array, Array]:
        """What the output layer is given [B, T, dim], and the weights."""
        # Padding of the target stands to its right, where no real position looks.
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.decoder))
        mask = self._source_mask(source_lengths)
        lengths = self._visible_lengths(source_lengths, memory.shape[-2])
        places = self._places(places, memory.shape[-2], target_inputs.shape[-1])
        positions = self.placement.target_positions(places, target_inputs.shape[-1])
        x = self._embed(self.target_embedding, target_inputs, positions, rng=rng)
        memory_positions = self._source_positions(places, memory.shape[-2], source_lengths)
        weights = []
        for index, (block, rng) in enumerate(zip(self.decoder, block_rngs, strict=True)):
            apply = functools.partial(
                block, source_lengths=lengths, memory_mask=mask, positions=positions,
                memory_positions=memory_positions,
            )  # fmt: skip
            with jax.named_scope(f"decoder_{index}"):
                x, block_weights = self._checkpointed(apply)(x, memory, dropout_rng=rng)
            weights.append(block_weights)
        return self.output_norm(x), jnp.stack(weights)

    # --- one token after another ---

    def start_decoding(
        self,
        source: Array,
        source_lengths: Array,
        *,
        max_length: int,
        places: Array | None = None,
    ) -> DecodingState:
        """Reads the source, and makes room for `max_length` tokens.

        Args:
            source: int [B, S].
            source_lengths: int [B].
            max_length: how many tokens will be read at most, at least 1.
            places: as in a call, P at least S and `max_length`.
        """
        places = self._places(places, source.shape[-1], max_length)
        memory = self.encode(source, source_lengths, places=places)
        return self._start(memory, source_lengths, max_length, places)

    def decode_step(self, state: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
        """Reads one more token: int [B] -> (logits [B, V] of the next, state).

        The logits are those of `decode` with all tokens so far; beyond `max_length`, NaN.
        """
        positions = self.placement.target_positions(state.places, 1, state.step)
        x = self._embed(self.target_embedding, tokens[:, None], positions)
        x = jnp.where(state.step < state.room, x, jnp.nan)
        mask = self._source_mask(state.source_lengths)
        memory_length = state.blocks[0].memory.values.shape[-2]
        lengths = self._visible_lengths(state.source_lengths, memory_length)
        blocks = []
        for index, (block, block_state) in enumerate(zip(self.decoder, state.blocks, strict=True)):
            with jax.named_scope(f"decoder_{index}"):
                x, block_state = block.extend(
                    x, block_state, first=state.step, source_lengths=lengths, memory_mask=mask,
                    positions=positions,
                )  # fmt: skip
            blocks.append(block_state)
        logits = self.logits_of(self.output_norm(x))[:, 0, :]
        return logits, state._replace(blocks=tuple(blocks), step=state.step + 1)

    def greedy_decode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        max_length: int,
        sos: int,
        eos: int,
        pad: int,
        places: Array | None = None,
    ) -> Decoded:
        """Feeds back the likeliest token at every step; stops when every row has said EOS.

        Args:
            source, source_lengths: as in a call.
            max_length: longest output, EOS included.
            sos: the token every decoder input begins with.
            eos: the token that ends a row.
            pad: what follows it.
            places: as in a call, P at least S and `max_length`.
        """
        places = self._places(places, source.shape[-1], max_length)
        memory = self.encode(source, source_lengths, places=places)
        tokens = greedy_search(
            self.decode_step, self._start(memory, source_lengths, max_length, places),
            batch_size=source.shape[0], max_length=max_length, sos=sos, eos=eos, pad=pad,
        ).astype(source.dtype)  # fmt: skip
        _, weights = self.decode(memory, source_lengths, _shifted(tokens, sos), places=places)
        return Decoded(tokens, weights)

    def beam_decode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        beams: int,
        max_length: int,
        sos: int,
        eos: int,
        pad: int,
        length_penalty: float = 0.0,
        places: Array | None = None,
    ) -> BeamResult:
        """The likeliest answers that a beam search finds, best first; see `decoding.beam_search`.

        Args:
            source, source_lengths, max_length, sos, eos, pad, places: as in `greedy_decode`.
            beams: how many beginnings are kept for each row; 1 is greedy decoding.
            length_penalty: how much longer answers are favoured; 0 not at all.
        """
        state = self.start_decoding(source, source_lengths, max_length=max_length, places=places)
        row_axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)._replace(places=None)
        return beam_search(
            self.decode_step, state,
            batch_size=source.shape[0], beams=beams, max_length=max_length, sos=sos, eos=eos,
            pad=pad, length_penalty=length_penalty, row_axes=row_axes,
        )  # fmt: skip

    def weights_of(
        self,
        source: Array,
        source_lengths: Array,
        tokens: Array,
        *,
        sos: int,
        places: Array | None = None,
    ) -> Array:
        """Cross-attention weights [L, B, T, S] with which an answer, int [B, T], is given."""
        inputs = _shifted(tokens, sos)
        return self(source, source_lengths, inputs, places=places, return_weights=True)[1]

    # --- what they share ---

    def _start(
        self, memory: Array, source_lengths: Array, max_length: int, places: Array
    ) -> DecodingState:
        if max_length < 1:
            raise ValueError(f"max_length must be at least 1; got {max_length}")
        positions = self._source_positions(places, memory.shape[-2], source_lengths)
        blocks = tuple(
            block.start(memory, max_length, memory_positions=positions) for block in self.decoder
        )
        step, room = jnp.zeros((), jnp.int32), jnp.full((), max_length, jnp.int32)
        return DecodingState(blocks, source_lengths, places, step, room)

    def _embed(
        self,
        embedding: nnx.Embed,
        tokens: Array,
        positions: Positions,
        *,
        rng: Array | None = None,
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to 1, they weigh as much as positions.
        # Flax would go on in the dtype that the table was made with.
        x = embedding(tokens).astype(embedding.embedding[...].dtype) * embedding.features**0.5
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


def _shifted(tokens: Array, sos: int) -> Array:
    """What the decoder reads to say `tokens` [B, T]: SOS, then all but the last."""
    return jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=sos)
