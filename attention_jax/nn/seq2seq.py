"""A sequence-to-sequence model of attention alone: no recurrence, every position at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from attention_jax.core.checks import check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.nn.decoding import BeamResult, beam_search, greedy_search
from attention_jax.nn.encoder_decoder import EncoderDecoder
from attention_jax.nn.transformer import DecoderState

Array = jax.Array


class Decoded(NamedTuple):
    """The result of greedy decoding."""

    tokens: Array  # int32 [B, max_length], PAD after EOS
    # [L, B, max_length, S], cross attention of each decoder layer; None without `return_weights`
    weights: Array | None


class DecodingState(NamedTuple):
    """What the next token depends on. `blocks` and lengths have the batch axis in front."""

    blocks: tuple[DecoderState, ...]
    source_lengths: Array  # int [B]
    position_ids: Array  # int [P], see `Seq2Seq.__call__`
    step: Array  # int32 [], how many tokens have been read
    max_length: Array  # int32 [], how many may be read

    def fixed(self) -> Any:
        """The part that no step changes and that has the batch axis: the memory and its lengths."""
        return tuple(block.memory for block in self.blocks), self.source_lengths

    def with_fixed(self, fixed: Any) -> DecodingState:
        """The state with this part in place of its own; None for a state without it."""
        parts: Any = fixed or ([None] * len(self.blocks), None)
        memories, source_lengths = parts
        blocks = zip(self.blocks, memories, strict=True)
        return self._replace(
            blocks=tuple(block._replace(memory=memory) for block, memory in blocks),
            source_lengths=source_lengths,
        )


class Seq2Seq(EncoderDecoder):
    """Encoder and decoder of attention blocks.

    Args:
        config: the settings.
        vocabulary_size: V, of the target.
        source_vocabulary_size: of the source; None for V.
        deterministic: True for evaluation, False for training; `model.eval()` and `model.train()`
            set it. With None and a `dropout_rate` above 0, each call needs `deterministic` or a
            `dropout_rng`.
        rngs: the streams of the initial parameters and of "dropout".
        keep_rngs: whether a model with dropout keeps a stream forked from `rngs.dropout`, which is
            state beside the parameters (`nnx.split(model, nnx.Param, ...)`). Without it the model's
            state is its parameters, and training needs a `dropout_rng` at each call.
        options: `dtype`, `param_dtype`, and of all layers' projections `kernel_init` and
            `bias_init`, as in `nnx.Linear`.

    Raises:
        ValueError: all embeddings are tied, but source and target vocabularies differ in size; or
            `rngs` lacks a stream.

    >>> from attention_jax.nn import ModelConfig
    >>> model = Seq2Seq(ModelConfig(score="additive"), 11, rngs=nnx.Rngs(0))
    >>> model(jnp.ones((2, 5), int), jnp.array([3, 5]), jnp.ones((2, 7), int)).shape
    (2, 7, 11)
    """

    def start_decoding(
        self,
        source: Array,
        source_lengths: Array,
        *,
        max_length: int,
        position_ids: Array | None = None,
    ) -> DecodingState:
        """Encodes the source, and makes caches for `max_length` tokens.

        Args:
            source: int [B, S].
            source_lengths: int [B].
            max_length: the largest number of tokens that `decode_step` will read, at least 1.
            position_ids: as in a call, P at least S and `max_length`.
        """
        check_integer("max_length", max_length)
        position_ids = self._position_ids(position_ids, source.shape[-1], max_length)
        memory = self.encode(source, source_lengths, position_ids=position_ids, deterministic=True)
        source_ids = self._source_ids(position_ids, memory.shape[-2], source_lengths)
        blocks = tuple(
            block.start(memory, max_length, memory_position_ids=source_ids)
            for block in self.decoder
        )
        step, limit = jnp.zeros((), jnp.int32), jnp.full((), max_length, jnp.int32)
        return DecodingState(blocks, source_lengths, position_ids, step, limit)

    def decode_step(self, state: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
        """Reads one more token: int [B] -> (logits [B, V] of the next, state).

        The logits are those of `decode` with all tokens so far; beyond `max_length`, NaN.
        """
        target_ids = self.placement.target_ids(state.position_ids, 1, state.step)
        x = self._embed(self.target_embedding, tokens[:, None], target_ids)
        x = jnp.where(state.step < state.max_length, x, jnp.nan)
        mask = self._source_mask(state.source_lengths)
        memory_length = state.blocks[0].memory.values.shape[-2]
        lengths = self._visible_lengths(state.source_lengths, memory_length)
        blocks = []
        for index, (block, block_state) in enumerate(zip(self.decoder, state.blocks, strict=True)):
            with jax.named_scope(f"decoder_{index}"):
                x, block_state = block.extend(
                    x,
                    block_state,
                    first=state.step,
                    source_lengths=lengths,
                    memory_mask=mask,
                    position_ids=target_ids,
                )
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
        position_ids: Array | None = None,
        return_weights: bool = False,
    ) -> Decoded:
        """Feeds back the likeliest token at every step, until every row has generated EOS.

        Args:
            source, source_lengths: as in a call.
            max_length: longest output, EOS included.
            sos: the token every decoder input begins with.
            eos: the token that ends a row.
            pad: the token that fills a row after EOS.
            position_ids: as in a call, P at least S and `max_length`.
            return_weights: also compute the cross-attention weights of the answer, with one more
                call of the decoder on all tokens at once.

        Returns:
            `Decoded`.

        >>> from attention_jax.nn import ModelConfig
        >>> model = Seq2Seq(ModelConfig(), 11, rngs=nnx.Rngs(0))
        >>> source, lengths = jnp.ones((2, 5), int), jnp.array([3, 5])
        >>> decoded = model.greedy_decode(source, lengths, max_length=4, sos=1, eos=2, pad=0)
        >>> decoded.tokens.shape
        (2, 4)
        """
        position_ids = self._position_ids(position_ids, source.shape[-1], max_length)
        definition, variables = nnx.split(self)

        def search(
            variables: Any, source: Array, source_lengths: Array, position_ids: Array
        ) -> Array:
            model = nnx.merge(definition, variables)
            state = model.start_decoding(
                source, source_lengths, max_length=max_length, position_ids=position_ids
            )
            return greedy_search(
                model.decode_step,
                state,
                batch_size=source.shape[0],
                max_length=max_length,
                sos=sos,
                eos=eos,
                pad=pad,
            ).astype(source.dtype)

        rows = PartitionSpec(explicit_spec(source)[0])
        tokens = on_automatic_axes(search, rows, variables, source, source_lengths, position_ids)
        if not return_weights:
            return Decoded(tokens, None)
        return Decoded(
            tokens,
            self.weights_of(source, source_lengths, tokens, sos=sos, position_ids=position_ids),
        )

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
        position_ids: Array | None = None,
    ) -> BeamResult:
        """The best answers of a beam search, best first; see `decoding.beam_search`.

        Args:
            source, source_lengths, max_length, sos, eos, pad, position_ids: as in `greedy_decode`.
            beams: hypotheses kept for each row; 1 is greedy decoding.
            length_penalty: the larger, the longer the answers preferred; 0 for no preference.
        """
        position_ids = self._position_ids(position_ids, source.shape[-1], max_length)
        definition, variables = nnx.split(self)

        def search(
            variables: Any, source: Array, source_lengths: Array, position_ids: Array
        ) -> BeamResult:
            model = nnx.merge(definition, variables)
            state = model.start_decoding(
                source, source_lengths, max_length=max_length, position_ids=position_ids
            )
            # All prefixes of a row read the same memory: it does not move with them.
            fixed = jax.tree.map(lambda leaf: jnp.repeat(leaf, beams, axis=0), state.fixed())
            moving = state.with_fixed(None)
            axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, moving)

            def step(moving: DecodingState, tokens: Array) -> tuple[Array, DecodingState]:
                logits, state = model.decode_step(moving.with_fixed(fixed), tokens)
                return logits, state.with_fixed(None)

            return beam_search(
                step,
                moving,
                batch_size=source.shape[0],
                beams=beams,
                max_length=max_length,
                sos=sos,
                eos=eos,
                pad=pad,
                length_penalty=length_penalty,
                row_axes=axes._replace(position_ids=None),
            )

        rows = PartitionSpec(explicit_spec(source)[0])
        return on_automatic_axes(search, rows, variables, source, source_lengths, position_ids)

    def weights_of(
        self,
        source: Array,
        source_lengths: Array,
        tokens: Array,
        *,
        sos: int,
        position_ids: Array | None = None,
    ) -> Array:
        """Cross-attention weights [L, B, T, S] of an answer, int [B, T]."""
        inputs = _shifted(tokens, sos)
        _, weights = self(
            source,
            source_lengths,
            inputs,
            position_ids=position_ids,
            deterministic=True,
            return_weights=True,
        )
        return weights


def _shifted(tokens: Array, sos: int) -> Array:
    """The decoder's inputs for the outputs `tokens` [B, T]: SOS, then all tokens but the last."""
    return jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=sos)
