"""Generates whole answers, token by token: greedily, by sampling, or by beam search."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from attention_jax.core.checks import check_entries, check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes
from attention_jax.core.serialization import exported
from attention_jax.nn import decoding
from attention_jax.nn.block import BlockState, Source
from attention_jax.nn.decoding import BeamResult
from attention_jax.nn.dropout import RandomModule
from attention_jax.nn.inputs import checked_source

Array = jax.Array


@exported
class Decoded(NamedTuple):
    """A generated answer.

    >>> from attention_jax.nn import Model, ModelConfig
    >>> model = Model(ModelConfig("decoder", dim=8), 11, rngs=nnx.Rngs(0))
    >>> @jax.jit
    ... def decode(source, lengths):
    ...     return model.greedy_decode(source, lengths, max_length=4, sos=1, eos=2, pad=0)
    >>> decode(jnp.ones((2, 5), int), jnp.array([3, 5])).tokens.shape
    (2, 4)
    """

    tokens: Array  # int [B, max_length], PAD after EOS
    weights: Array | None  # [L, B, max_length, S], those of a call; None without `return_weights`


@exported
class Fixed(NamedTuple):
    """The constant part of the state of decoding; every array has the batch axis in front."""

    sources: tuple[Source | None, ...]  # for each block, projected
    position_ids: Array  # int [B, P], for the P tokens that may be read
    padding: Array  # int [B], tokens of padding between source and target, which have no position
    visible: Array | None  # bool [B, P], False for padding; None with an encoder


@exported
class DecodingState(NamedTuple):
    """The state between two steps of decoding; every array has the batch axis in front."""

    fixed: Fixed
    blocks: tuple[BlockState, ...]
    step: Array  # int [B], how many tokens have been read, the same in all rows


class Generator(RandomModule):
    """A module with the methods `start_decoding` and `decode_step`, see `Model`.

    Each search takes its numbers as Python or NumPy integers, and raises ValueError for an argument
    of the wrong shape, dtype or range. The state is a NamedTuple whose first field stays the same
    in decoding. Every array has the batch axis in front.
    """

    start_decoding: Callable[..., Any]
    decode_step: Callable[..., Any]
    vocabulary_size: int

    def greedy_decode(
        self,
        source: Array,
        source_lengths: Array | None = None,
        *,
        position_ids: Array | None = None,
        return_weights: bool = False,
        **ends: Any,
    ) -> Decoded:
        """Feeds back the likeliest token at every step, until every row has generated EOS.

        Args:
            source, source_lengths: as in `start_decoding`.
            position_ids: as in a call.
            return_weights: also compute the weights of the answer, with one more call of the model
                on all tokens at once.
            ends: `max_length`, of the longest answer, EOS included; `eos`, the token that ends a
                row; `pad`, which fills a row after EOS; and `sos`, the token that every row begins
                with, or one for each, int [B]: in a language model the last token of the prompt,
                whose other tokens are the source.
        """
        tokens = self._searched(decoding.greedy_search, source, source_lengths, position_ids, ends)
        if not return_weights:
            return Decoded(tokens, None)
        first = jnp.asarray(ends["sos"], tokens.dtype).reshape(-1, 1)  # [1 or B, 1]
        inputs = jnp.pad(self._readable(tokens[:, :-1], ends), ((0, 0), (1, 0)))
        inputs = jnp.where(jnp.arange(tokens.shape[1])[None, :] == 0, first, inputs)
        options: Any = {"position_ids": position_ids, "return_weights": True}
        return Decoded(tokens, self(source, source_lengths, inputs, **options)[1])

    def sample_decode(
        self,
        source: Array,
        source_lengths: Array | None,
        rng: Array,
        *,
        temperature: float = 1.0,
        position_ids: Array | None = None,
        **ends: Any,
    ) -> Array:
        """Random answers, int [B, max_length]: each token is drawn from softmax(logits / t).

        Args:
            source, source_lengths, position_ids, ends: as in `greedy_decode`.
            rng: one PRNG key.
            temperature: t, above 0; the smaller, the likelier the likeliest token.
        """
        ends |= {"temperature": temperature}
        search = decoding.sample_search
        return self._searched(search, source, source_lengths, position_ids, ends, rng)

    def beam_decode(
        self,
        source: Array,
        source_lengths: Array | None = None,
        *,
        beams: int,
        length_penalty: float = 0.0,
        position_ids: Array | None = None,
        **ends: Any,
    ) -> BeamResult:
        """The best answers of a beam search, best first; see `decoding.beam_search`.

        Args:
            source, source_lengths, position_ids, ends: as in `greedy_decode`.
            beams: hypotheses kept for each row; 1 is greedy decoding.
            length_penalty: the larger, the longer the answers preferred; 0 for no preference.
        """
        ends |= {"beams": check_integer("beams", beams), "length_penalty": length_penalty}
        return self._searched(decoding.beam_search, source, source_lengths, position_ids, ends)

    def _searched(
        self,
        search: Callable[..., Any],
        source: Array,
        source_lengths: Array | None,
        position_ids: Array | None,
        options: dict[str, Any],
        *rng: Array,
    ) -> Any:
        """The result of a function of `decoding` with these options; tokens like the source's."""
        source, source_lengths = checked_source(source, source_lengths, self.vocabulary_size)
        definition, variables = nnx.split(self)
        copies, batch_size = options.get("beams", 1), source.shape[0]
        first = decoding.first_tokens(options.get("sos"), batch_size)
        check_entries("sos", first, 0, self.vocabulary_size - 1)

        def run(variables: Any, source: Array, lengths: Array, ids: Any, *rng: Array) -> Any:
            model = nnx.merge(definition, variables)
            state = model.start_decoding(
                source, lengths, max_length=options.get("max_length"), position_ids=ids
            )
            fixed, *moving = state
            # All prefixes of a row read the same source, so the search need not reorder it.
            fixed = jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), fixed)

            def step(moving: Any, tokens: Array) -> tuple[Array, Any]:
                tokens = self._readable(tokens, options)
                logits, (_, *moving) = model.decode_step(type(state)(fixed, *moving), tokens)
                return logits, moving

            found = search(step, moving, *rng, batch_size=batch_size, **options)
            return found if "beams" in options else found.astype(source.dtype)

        arrays = variables, source, source_lengths, position_ids, *rng
        return on_automatic_axes(run, PartitionSpec(explicit_spec(source)[0]), *arrays)

    def _readable(self, tokens: Array, ends: dict[str, Any]) -> Array:
        """The tokens, with EOS in place of a PAD that is no token of this model."""
        pad, eos = int(ends["pad"]), int(ends["eos"])
        return tokens if 0 <= pad < self.vocabulary_size else jnp.where(tokens == pad, eos, tokens)
