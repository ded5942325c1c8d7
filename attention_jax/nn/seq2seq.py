"""A sequence-to-sequence model of attention alone: no recurrence, every position at once."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.masks import causal_mask, padding_mask
from attention_jax.nn.positions import sinusoidal_positions
from attention_jax.nn.transformer import DecoderBlock, EncoderBlock
from attention_jax.scores import get_score

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig:
    """The model's settings.

    Attributes:
        score: the score under study, with which the decoder attends to the encoder: a name in
            `SCORES`, or "module:Name" for one of your own.
        self_attention_score: the score of the self attentions; None for the score under study.
        dim: size of embeddings and of every layer, even.
        hidden_dim: hidden size of the feed-forward layers.
        encoder_layers: number of encoder blocks.
        decoder_layers: number of decoder blocks.
        mask_padding: False lets every attention see padding, the flaw of a published comparison.

    Raises:
        ValueError: there is no such score, a size is below 1, or `dim` is odd.
    """

    score: str = "scaled"
    self_attention_score: str | None = "scaled"
    dim: int = 64
    hidden_dim: int = 64
    encoder_layers: int = 1
    decoder_layers: int = 1
    mask_padding: bool = True

    def __post_init__(self) -> None:
        get_score(self.score)
        if self.self_attention_score is not None:
            get_score(self.self_attention_score)
        for name in ("dim", "hidden_dim", "encoder_layers", "decoder_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.dim % 2:
            raise ValueError(f"dim must be even; got {self.dim}")


class Decoded(NamedTuple):
    """What greedy decoding found."""

    tokens: Array  # int32 [B, max_length], PAD after EOS
    weights: Array  # [L, B, max_length, S], cross attention of each decoder layer


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
        dim, hidden_dim = config.dim, config.hidden_dim
        self_score = config.self_attention_score or config.score
        self.config = config
        self.source_embedding = nnx.Embed(vocabulary_size, dim, rngs=rngs)
        self.encoder = nnx.List(
            EncoderBlock(self_score, dim, hidden_dim, rngs=rngs)
            for _ in range(config.encoder_layers)
        )
        self.memory_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.target_embedding = nnx.Embed(vocabulary_size, dim, rngs=rngs)
        self.decoder = nnx.List(
            DecoderBlock(self_score, config.score, dim, hidden_dim, rngs=rngs)
            for _ in range(config.decoder_layers)
        )
        self.output_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.logits = nnx.Linear(dim, vocabulary_size, rngs=rngs)

    def __call__(
        self,
        source: Array,
        source_lengths: Array,
        target_inputs: Array,
        *,
        return_weights: bool = False,
    ) -> Any:
        """Teacher forcing: the logits of all target positions at once.

        Args:
            source: int [B, S].
            source_lengths: int [B]; what stands from there on is padding.
            target_inputs: int [B, T], the right answer shifted by one: SOS, then all but its end.
            return_weights: also return the cross-attention weights.

        Returns:
            logits [B, T, V]; or (logits, weights [L, B, T, S]), one row a decoder layer.
        """
        memory = self.encode(source, source_lengths)
        logits, weights = self.decode(memory, source_lengths, target_inputs)
        return (logits, weights) if return_weights else logits

    def encode(self, source: Array, source_lengths: Array) -> Array:
        """The memory [B, S, dim] that the decoder attends to."""
        mask = padding_mask(source_lengths) if self.config.mask_padding else None
        x = _embed(self.source_embedding, source)
        for block in self.encoder:
            x = block(x, mask)
        return self.memory_norm(x)

    def decode(
        self, memory: Array, source_lengths: Array, target_inputs: Array
    ) -> tuple[Array, Array]:
        """Logits [B, T, V] and cross-attention weights [L, B, T, S]."""
        # Padding of the target stands to its right, where no real position looks: causal is enough.
        mask = padding_mask(source_lengths) if self.config.mask_padding else None
        x = _embed(self.target_embedding, target_inputs)
        weights = []
        for block in self.decoder:
            x, block_weights = block(x, memory, causal_mask(), mask)
            weights.append(block_weights)
        return self.logits(self.output_norm(x)), jnp.stack(weights)

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
        batch_size = source.shape[0]
        inputs = jnp.full((batch_size, max_length + 1), pad, source.dtype).at[:, 0].set(sos)
        done = jnp.zeros((batch_size,), bool)

        def unfinished(state):
            step, _, done = state
            return (step < max_length) & ~jnp.all(done)

        def extend(state):
            step, inputs, done = state
            logits, _ = self.decode(memory, source_lengths, inputs[:, :-1])
            best = jnp.argmax(logits[:, step], axis=-1).astype(inputs.dtype)
            best = jnp.where(done, jnp.asarray(pad, inputs.dtype), best)
            return step + 1, inputs.at[:, step + 1].set(best), done | (best == eos)

        _, inputs, _ = jax.lax.while_loop(unfinished, extend, (0, inputs, done))
        _, weights = self.decode(memory, source_lengths, inputs[:, :-1])
        return Decoded(tokens=inputs[:, 1:], weights=weights)


def _embed(embedding: nnx.Embed, tokens: Array) -> Array:
    # Embeddings start with variance 1 / dim; scaled to 1, they weigh as much as positions.
    x = embedding(tokens) * embedding.features**0.5
    return x + sinusoidal_positions(tokens.shape[-1], embedding.features)[None, :, :]
