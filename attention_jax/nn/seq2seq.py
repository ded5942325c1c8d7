"""A sequence-to-sequence model of attention alone: no recurrence, every position at once."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.decoding import BeamResult, beam_search, greedy_search
from attention_jax.masks import Mask, padding_mask
from attention_jax.nn.cross_attention import Alignment, AttentionKind, CrossAttentionConfig
from attention_jax.nn.positions import sinusoidal_codes
from attention_jax.nn.transformer import (
    Activation,
    BlockConfig,
    DecoderBlock,
    DecoderState,
    EncoderBlock,
    Norm,
    split_rng,
)
from attention_jax.scores import get_score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig:
    """The model's settings.

    Attributes:
        score: the score under study, with which the decoder attends to the encoder: a name in
            `SCORES`, or "module:Name" for one of your own.
        self_attention_score: the score of the self attentions; None for the score under study.
        attention: how the decoder looks at the encoder: "global", the whole of it; "local-m" or
            "local-p", through a window; "coverage", remembering what it has attended to;
            "monotonic", never going back.
        radius: of the local kinds, positions on either side of the window's center.
        alignment: of "local-m": "reversed", the last letter first, or "monotonic".
        heads: of the self attentions; more than 1 also makes "global" attention multi-head, between
            projections. The other kinds have one head.
        key_heads: heads of keys and values in the self attentions (grouped-query), a divisor of
            `heads`; None for `heads`.
        dim: size of embeddings and of every layer, even, a multiple of `heads`.
        hidden_dim: hidden size of the feed-forward layers.
        activation: of the feed-forward layers.
        norm: layer normalisation before each layer ("pre") or after its residual ("post").
        normalize_qk: layer normalisation of queries and keys in the self attentions.
        encoder_layers: number of encoder blocks; 0 for a memory of embedded letters, none of which
            knows of another.
        decoder_layers: number of decoder blocks.
        dropout_rate: of embeddings, attention weights and layers, in training.
        checkpoint_blocks: compute each block again for its gradient rather than save what is in it.
            (On a CPU XLA merges the two computations, and nothing is gained.)
        mask_padding: False lets every attention see padding, the flaw of a published comparison.

    Raises:
        ValueError: there is no such score or kind, a size is below 1, or sizes do not divide.
    """

    score: str = "scaled"
    self_attention_score: str | None = "scaled"
    attention: AttentionKind = "global"
    radius: int = 2
    alignment: Alignment = "reversed"
    heads: int = 1
    key_heads: int | None = None
    dim: int = 64
    hidden_dim: int = 64
    activation: Activation = "relu"
    norm: Norm = "pre"
    normalize_qk: bool = False
    encoder_layers: int = 1
    decoder_layers: int = 1
    dropout_rate: float = 0.0
    checkpoint_blocks: bool = False
    mask_padding: bool = True

    def __post_init__(self) -> None:
        get_score(self.score)
        if self.self_attention_score is not None:
            get_score(self.self_attention_score)
        for name, least in (("encoder_layers", 0), ("decoder_layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.dim % 2:
            raise ValueError(f"dim must be even; got {self.dim}")
        self.block, self.cross  # noqa: B018 -- they check the rest

    @property
    def label(self) -> str:
        """The score, and how it is used where that is not the default: "additive, coverage"."""
        kind = [] if self.attention == "global" else [self.attention]
        where = "" if self.attention == "global" else " in self attention"
        heads = [] if self.heads == 1 else [f"{self.heads} heads{where}"]
        return ", ".join([self.score, *kind, *heads])

    @property
    def block(self) -> BlockConfig:
        """What encoder and decoder blocks are told."""
        return BlockConfig(
            dim=self.dim,
            hidden_dim=self.hidden_dim,
            heads=self.heads,
            key_heads=self.key_heads,
            activation=self.activation,
            norm=self.norm,
            dropout_rate=self.dropout_rate,
            normalize_qk=self.normalize_qk,
        )

    @property
    def cross(self) -> CrossAttentionConfig:
        """How decoder blocks look at the memory."""
        return CrossAttentionConfig(
            attention=self.attention,
            heads=self.heads if self.attention == "global" else 1,
            radius=self.radius,
            alignment=self.alignment,
        )


class Decoded(NamedTuple):
    """What greedy decoding found."""

    tokens: Array  # int32 [B, max_length], PAD after EOS
    weights: Array  # [L, B, max_length, S], cross attention of each decoder layer


class DecodingState(NamedTuple):
    """What the next token depends on; but for counters, every array has the batch axis in front."""

    blocks: tuple[DecoderState, ...]
    source_lengths: Array  # int [B]
    step: Array  # int32 [], how many tokens have been read


class Seq2Seq(nnx.Module):
    """Encoder and decoder of attention blocks.

    Args:
        config: the settings.
        vocabulary_size: V, of source and target alike.
        rngs: where the initial parameters come from.

    >>> model = Seq2Seq(Seq2SeqConfig(score="additive", dim=8), 11, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5), int), jnp.array([3, 5]), jnp.ones((2, 7), int)).shape
    (2, 7, 11)
    """

    def __init__(self, config: Seq2SeqConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        dim = config.dim
        self_score = config.self_attention_score or config.score
        self.config = config
        self.source_embedding = nnx.Embed(vocabulary_size, dim, rngs=rngs)
        self.encoder = nnx.List(
            EncoderBlock(self_score, config.block, rngs=rngs) for _ in range(config.encoder_layers)
        )
        self.memory_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.target_embedding = nnx.Embed(vocabulary_size, dim, rngs=rngs)
        self.decoder = nnx.List(
            DecoderBlock(self_score, config.score, config.block, cross=config.cross, rngs=rngs)
            for _ in range(config.decoder_layers)
        )
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.logits = nnx.Linear(dim, vocabulary_size, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        Args:
            source: int [B, S].
            source_lengths: int [B]; what stands from there on is padding.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
            dropout_rng: one PRNG key, for training; None for no dropout and no noise.
            return_weights: also return the cross-attention weights.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S]), one row a decoder layer, averaged
            over heads.
        """
        encoder_rng, decoder_rng = split_rng(dropout_rng, 2)
        memory = self.encode(source, source_lengths, dropout_rng=encoder_rng)
        logits, weights = self.decode(
            memory, source_lengths, target_inputs, dropout_rng=decoder_rng
        )
        return (logits, weights) if return_weights else logits

    def encode(
        self,
        source: Array,
        source_lengths: Array,
        *,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> Any:
        """The memory [B, S, dim] that the decoder attends to.

        With `return_weights`: (memory, weights [L, B, N, S, S] of the encoder's self attentions).
        """
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.encoder))
        mask = self._source_mask(source_lengths)
        x = self._embed(self.source_embedding, source, rng=rng)
        weights = []
        for index, (block, rng) in enumerate(zip(self.encoder, block_rngs, strict=True)):
            apply = functools.partial(block, mask=mask, return_weights=True)
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
        dropout_rng: Array | None = None,
    ) -> tuple[Array, Array]:
        """Logits [B, T, V] and cross-attention weights [L, B, T, S], averaged over heads."""
        # Padding of the target stands to its right, where no real position looks.
        rng, *block_rngs = split_rng(dropout_rng, 1 + len(self.decoder))
        mask = self._source_mask(source_lengths)
        lengths = self._visible_lengths(source_lengths, memory.shape[-2])
        x = self._embed(self.target_embedding, target_inputs, rng=rng)
        weights = []
        for index, (block, rng) in enumerate(zip(self.decoder, block_rngs, strict=True)):
            apply = functools.partial(block, source_lengths=lengths, memory_mask=mask)
            with jax.named_scope(f"decoder_{index}"):
                x, block_weights = self._checkpointed(apply)(x, memory, dropout_rng=rng)
            weights.append(block_weights)
        return self.logits(self.output_norm(x)), jnp.stack(weights)

    # --- one token after another ---

    def start_decoding(
        self, source: Array, source_lengths: Array, *, max_length: int
    ) -> DecodingState:
        """Reads the source, and makes room for `max_length` tokens.

        Args:
            source: int [B, S].
            source_lengths: int [B].
            max_length: how many tokens will be read at most, at least 1.
        """
        return self._start(self.encode(source, source_lengths), source_lengths, max_length)

    def decode_step(self, state: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
        """Reads one more token: int [B] -> (logits [B, V] of the next, state).

        The logits are those of `decode` with all tokens so far.
        """
        x = self._embed(self.target_embedding, tokens[:, None], first=state.step)
        mask = self._source_mask(state.source_lengths)
        memory_length = state.blocks[0].memory.values.shape[-2]
        lengths = self._visible_lengths(state.source_lengths, memory_length)
        blocks = []
        for index, (block, block_state) in enumerate(zip(self.decoder, state.blocks, strict=True)):
            with jax.named_scope(f"decoder_{index}"):
                x, block_state = block.extend(
                    x, block_state, source_lengths=lengths, memory_mask=mask
                )
            blocks.append(block_state)
        logits = self.logits(self.output_norm(x))[:, 0, :]
        return logits, DecodingState(tuple(blocks), state.source_lengths, state.step + 1)

    def greedy_decode(
        self, source: Array, source_lengths: Array, *, max_length: int, sos: int, eos: int, pad: int
    ) -> Decoded:
        """Feeds back the likeliest token at every step; stops when every row has said EOS.

        Args:
            source: int [B, S].
            source_lengths: int [B].
            max_length: longest output, EOS included.
            sos: the token every decoder input begins with.
            eos: the token that ends a row.
            pad: what follows it.
        """
        memory = self.encode(source, source_lengths)
        tokens = greedy_search(
            self.decode_step, self._start(memory, source_lengths, max_length),
            batch_size=source.shape[0], max_length=max_length, sos=sos, eos=eos, pad=pad,
        ).astype(source.dtype)  # fmt: skip
        _, weights = self.decode(memory, source_lengths, _shifted(tokens, sos))
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
    ) -> BeamResult:
        """The likeliest answers that a beam search finds, best first; see `decoding.beam_search`.

        Args:
            source, source_lengths, max_length, sos, eos, pad: as in `greedy_decode`.
            beams: how many beginnings are kept for each row; 1 is greedy decoding.
            length_penalty: how much longer answers are favoured; 0 not at all.
        """
        state = self.start_decoding(source, source_lengths, max_length=max_length)
        row_axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, state)
        return beam_search(
            self.decode_step, state,
            batch_size=source.shape[0], beams=beams, max_length=max_length, sos=sos, eos=eos,
            pad=pad, length_penalty=length_penalty, row_axes=row_axes,
        )  # fmt: skip

    def weights_of(self, source: Array, source_lengths: Array, tokens: Array, *, sos: int) -> Array:
        """Cross-attention weights [L, B, T, S] with which an answer, int [B, T], is given."""
        memory = self.encode(source, source_lengths)
        return self.decode(memory, source_lengths, _shifted(tokens, sos))[1]

    # --- what they share ---

    def _start(self, memory: Array, source_lengths: Array, max_length: int) -> DecodingState:
        blocks = tuple(block.start(memory, max_length) for block in self.decoder)
        return DecodingState(blocks, source_lengths, jnp.zeros((), jnp.int32))

    def _embed(
        self,
        embedding: nnx.Embed,
        tokens: Array,
        *,
        first: Array | int = 0,
        rng: Array | None = None,
    ) -> Array:
        # Embeddings start with variance 1 / dim; scaled to 1, they weigh as much as positions.
        x = embedding(tokens) * embedding.features**0.5
        codes = sinusoidal_codes(first + jnp.arange(tokens.shape[-1]), embedding.features)
        return self.dropout(x + codes[None, :, :], deterministic=rng is None, rngs=rng)

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
