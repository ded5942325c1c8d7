"""Attention of a decoder to its memory: a table of kinds, and one signature for all of them.

Each kind takes all queries at once (training) or one after another (decoding). The carry is the
state that passes from query to query. A `Memory` holds the projections of the memory's tokens,
which are computed once for all queries.
"""

from typing import Any

import jax
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.functional.memory import Memory
from attention_jax.nn.attention import Attended, Attention, Carry
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.dropout import RandomModule
from attention_jax.nn.empty_rows import project_rows
from attention_jax.nn.local import LocalMAttention, LocalPAttention
from attention_jax.nn.multi_head import MultiHeadAttention
from attention_jax.nn.ordered import CoverageAttention, MonotonicAttention
from attention_jax.nn.positions import rotary

Array = jax.Array


# The kinds of attention by name: the module, which has a method `attend`, and its options.
KINDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "global": (Attention, ("normalizer", "dropout_rate", "keep_rngs")),
    "local-m": (LocalMAttention, ("radius", "alignment", "dropout_rate")),
    "local-p": (LocalPAttention, ("radius", "dropout_rate")),
    "coverage": (CoverageAttention, ()),
    "monotonic": (MonotonicAttention, ()),
}


def multi_head(
    config: ModelConfig, score: str, normalizer: str, rngs: nnx.Rngs, **options: Any
) -> MultiHeadAttention:
    """Multi-head attention of a block, which gives it the PRNG keys for dropout."""
    return MultiHeadAttention(
        score,
        config.dim,
        num_heads=config.num_heads,
        normalizer=normalizer,
        output_gate=config.output_gate,
        rotary_wavelength=config.rotary_wavelength,
        dropout_rate=config.rate_of_weights,
        dtype=config.cast_dtype,
        rngs=rngs,
        keep_rngs=False,
        **options,
    )


class CrossAttention(RandomModule):
    """Attention of a decoder to a memory, projected to the size of the decoder's tokens.

    One head has no projections of query, key and value, as in Bahdanau 2014 and Luong 2015; several
    heads of "global" attention are multi-head attention. With rotary positions a single head
    rotates queries and keys, but not values.

    Args:
        config: the kind and its settings, the score and the sizes.
        rngs: the stream of the initial parameters.

    Raises:
        ValueError: there is no such score, or it fails for these sizes.

    >>> import jax.numpy as jnp
    >>> config = ModelConfig(
    ...     score="dot", dim=4, attention="local-m", radius=1, alignment="monotonic"
    ... )
    >>> attend = CrossAttention(config, rngs=nnx.Rngs(0))
    >>> attended = attend(jnp.ones((1, 2, 4)), jnp.ones((1, 5, 4)), return_weights=True)
    >>> (attended.weights > 0).astype(int).tolist()  # query i sees the keys around i
    [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dim, self.rotary_wavelength = config.dim, config.rotary_wavelength
        self.is_random = config.rate_of_weights > 0 or config.attention == "monotonic"
        if config.cross_heads > 1:
            self.attention: Any = multi_head(config, config.score, config.cross_normalizer, rngs)
            self.output = None
            return
        options = {
            "normalizer": config.cross_normalizer,
            "radius": config.radius,
            "alignment": config.alignment,
            "dropout_rate": config.rate_of_weights,
            "keep_rngs": False,  # the block gives it the PRNG keys
        }
        kind, names = KINDS[config.attention]
        options = {name: options[name] for name in names}
        dtype = config.cast_dtype
        self.attention = kind(config.score, dim, dim, dtype=dtype, rngs=rngs, **options)
        self.output = nnx.Linear(dim, dim, use_bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, query: Array, memory: Array | Memory, **arguments: Any) -> Attended:
        """Calls `attend`."""
        self._check_rng(arguments.get("rng"))
        return self.attend(query, memory, **arguments)

    def attend(
        self,
        query: Array,
        memory: Array | Memory,
        *,
        position_ids: Array | None = None,
        memory_position_ids: Array | None = None,
        **options: Any,
    ) -> Attended:
        """Computes attention.

        Args:
            query: float [*B, T, dim].
            memory: float [*B, S, dim]; or the `Memory` that `remember` made of it.
            position_ids: of the queries, for rotation; None for 0, 1, 2, ...
            memory_position_ids: of the memory's tokens, for rotation; None for 0, 1, 2, ...
            mask: the memory tokens to which each query may attend; must exclude padding.
            lengths: int [*B], how many memory tokens are real; None for all.
            first: position of the first query: the number of queries that have attended before.
            carry: from the call with the previous queries; None for the first call.
            rng: one PRNG key, for dropout of weights and the noise of "monotonic"; None for
                neither.
            return_weights: whether to compute the weights.

        Returns:
            `Attended(output [*B, T, dim], weights [*B, T, S] averaged over heads, carry)`.

        Raises:
            ValueError: an argument has the wrong shape or dtype.
        """
        if self.rotary_wavelength is not None:
            if not isinstance(memory, Memory):
                memory = self.remember(memory, position_ids=memory_position_ids)
            if self.output is not None:
                query = rotary(query, position_ids, max_wavelength=self.rotary_wavelength)
        attended = self.attention.attend(query, memory, position_ids=position_ids, **options)
        if self.output is None:
            return attended
        output = project_rows(self.output, attended.output, feature_ndim=1)
        return attended._replace(output=output)

    def remember(self, memory: Array, *, position_ids: Array | None = None) -> Memory:
        """Projects the memory once, for many calls that take the result as `memory`.

        `position_ids` are those of the memory's tokens, for rotation; None for 0, 1, 2, ...
        """
        if self.output is None:
            return self.attention.remember(memory, position_ids=position_ids)
        if self.rotary_wavelength is None:
            return self.attention.remember(memory)
        keys = rotary(memory, position_ids, max_wavelength=self.rotary_wavelength)
        return self.attention.remember(keys, memory)

    def first_carry(self, memory: Array) -> Carry:
        """The carry before the first query of a memory [*B, S, dim]; None if nothing is carried.

        It is float64 for a memory of float64, else float32, and so are all later carries.
        """
        if self.output is None:
            return None
        return self.attention.first_carry(memory.shape[:-1], accumulator_dtype(memory))
