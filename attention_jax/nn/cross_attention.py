"""Attention of a decoder to its memory: one module for every kind of cross attention.

Each kind takes all queries at once (training) or one after another (decoding). What passes from
query to query is the carry; what does not depend on queries is computed once, as a `Memory`.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from attention_jax.core.arrays import accumulator_dtype
from attention_jax.core.checks import check_integer
from attention_jax.functional.memory import Memory
from attention_jax.nn import cross_attention_kinds as kinds
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.cross_attention_kinds import Carry, Inputs, Kind
from attention_jax.nn.dropout import DropoutModule
from attention_jax.nn.empty_rows import project_rows
from attention_jax.nn.parameters import LayerOptions, dtypes_of
from attention_jax.nn.position_encoding import PositionIds, Rotation
from attention_jax.normalizers import get_normalizer
from attention_jax.pairwise.masks import Mask
from attention_jax.scores import Score

Array = jax.Array


def kind_of(config: ModelConfig, num_heads: int = 1, rotation: Rotation | None = None) -> Kind:
    """The kind of cross attention, with so many heads and with this rotation by positions.

    Raises:
        ValueError: the kind takes neither several heads nor a rotation.
    """
    check_integer("num_heads", num_heads)
    if config.attention != "global":
        if num_heads > 1:
            raise ValueError(
                f"num_heads must be 1 with attention {config.attention!r}; got {num_heads}"
            )
        if rotation is not None:
            raise ValueError(
                f"attention must be global with rotary positions; got {config.attention!r}"
            )
    match config.attention:
        case "global":
            return kinds.Global() if num_heads == 1 else kinds.MultiHead(num_heads, rotation)
        case "local-m":
            return kinds.LocalM(config.radius, config.alignment)
        case "local-p":
            return kinds.LocalP(config.radius)
        case "coverage":
            return kinds.Coverage()
        case "monotonic":
            return kinds.Monotonic()


class CrossAttention(DropoutModule):
    """Attention of a decoder to a memory, projected to the size of the decoder's tokens.

    Args:
        score: a name in `SCORES`, "module:Name", a `Score`, or a function of (q, k).
        dim: size of the decoder's tokens.
        memory_dim: size of the memory's tokens.
        config: the kind and its settings.
        num_heads: of "global" attention. One head has no projections, as in Bahdanau 2014 and Luong
            2015; several are multi-head attention.
        output_gate: of "global" attention with several heads, see `MultiHeadAttention`.
        rotary_wavelength: of "global" attention: the `max_wavelength` with which `rotary` rotates
            queries and keys by their position ids. With one head it rotates the tokens, as keys but
            not as values. None for no rotation.
        num_position_ids: position ids of each token, 1 or 2.
        dropout_rate: probability that a weight is dropped; "coverage" and "monotonic" attention
            drop no weights.
        deterministic, keep_rngs: as in `MultiHeadAttention`.
        rngs: the streams of the initial parameters and of "dropout".
        options: `dtype`, `param_dtype` and, of projections, `kernel_init`; see
            `parameters.LayerOptions`.

    Raises:
        ValueError: there is no such score, it cannot pair the two sizes, or settings do not go
            together.

    >>> config = ModelConfig(attention="local-m", radius=1, alignment="monotonic")
    >>> attend = CrossAttention("dot", 4, 4, config, rngs=nnx.Rngs(0))
    >>> query, memory, lengths = jnp.ones((1, 2, 4)), jnp.ones((1, 5, 4)), jnp.array([5])
    >>> _, weights, _ = attend(query, memory, source_lengths=lengths, return_weights=True)
    >>> (weights > 0).astype(int).tolist()  # query i sees the keys around i
    [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]
    """

    def __init__(
        self,
        score: str | Score,
        dim: int,
        memory_dim: int,
        config: ModelConfig,
        *,
        num_heads: int = 1,
        output_gate: bool = False,
        rotary_wavelength: float | None = None,
        num_position_ids: int = 1,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        **options: Unpack[LayerOptions],
    ):
        self.rotation: Rotation | None = None
        if rotary_wavelength is not None:
            self.rotation = Rotation(rotary_wavelength, num_position_ids)
        self.kind = kind_of(config, num_heads, self.rotation)
        settings: Any = {**options} if self.kind.has_projections else {**dtypes_of(options)}
        if self.kind.has_projections:
            settings["output_gate"] = output_gate
        if config.attention == "global":
            settings["normalizer"] = get_normalizer(config.cross_normalizer)
        if self.kind.has_dropout:  # this module hands it the keys
            settings |= {"dropout_rate": dropout_rate, "keep_rngs": False}
        if self.rotation is not None and not self.kind.has_projections:
            self.rotation.check_dim("dim", dim)
            self.rotation.check_dim("memory_dim", memory_dim)
        self.attention: Any = self.kind.make(score, dim, memory_dim, rngs=rngs, **settings)
        self.output = (
            None
            if self.kind.has_projections
            else nnx.Linear(memory_dim, dim, use_bias=False, rngs=rngs, **options)
        )
        self._set_dropout(dropout_rate, deterministic, keep_rngs, rngs)

    def __call__(
        self,
        query: Array,
        memory: Array | Memory,
        *,
        source_lengths: Array | None = None,
        mask: Mask | Array | None = None,
        first: Array | int = 0,
        position_ids: PositionIds | None = None,
        memory_position_ids: PositionIds | None = None,
        carry: Carry = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        return_weights: bool = False,
    ) -> tuple[Array, Array | None, Carry]:
        """Attends.

        Args:
            query: float [*B, T, dim].
            memory: float [*B, S, memory_dim]; or the `Memory` that `remember` made of it.
            source_lengths: int [*B], how many memory tokens are real; None for all.
            mask: the memory tokens to which each query may attend; must exclude padding.
            first: position of the first query: the number of queries that have attended before.
            position_ids: of the queries, for rotation; None for `first` and on.
            memory_position_ids: of the memory's tokens, for rotation; None for 0, 1, 2, ...
            carry: from the call with the previous queries; None for the first call.
            deterministic: True for neither dropout nor noise ("monotonic"), False for both; None
                for the module's setting.
            dropout_rng: one PRNG key, which enables dropout and noise whatever the module's
                setting; None for the next key of the module's stream, if they are enabled.
            return_weights: whether to compute the weights.

        Returns:
            (output [*B, T, dim]; weights [*B, T, S] averaged over heads, or None without
            `return_weights`; carry).

        Raises:
            ValueError: an argument has the wrong shape or dtype; or a module with dropout lacks
                `deterministic` or a PRNG key.
        """
        rng = self._dropout_rng(dropout_rng, deterministic, also_random=self.kind.has_noise)
        if self.rotation is not None:
            if position_ids is None:
                position_ids = self.rotation.consecutive_ids(query.shape[-2], first)
            if not isinstance(memory, Memory):
                memory = self.remember(memory, position_ids=memory_position_ids)
            if not self.kind.has_projections:
                query = self.rotation(query, position_ids)
        inputs = Inputs(
            query, memory, mask, source_lengths, first, position_ids, carry, rng, return_weights
        )
        output, weights, new_carry = self.kind.attend(self.attention, inputs)
        if carry is not None and new_carry is not None:
            new_carry = new_carry.astype(carry.dtype)  # as loops need, whatever the parameters have
        if self.output is not None:
            output = project_rows(self.output, output, feature_ndim=1)
        return output, weights, new_carry

    def remember(self, memory: Array, *, position_ids: PositionIds | None = None) -> Memory:
        """Projects the memory once, for many calls that take the result as `memory`.

        `position_ids` are those of the memory's tokens, for rotation; None for 0, 1, 2, ...
        """
        if self.rotation is None:
            return self.attention.remember(memory)
        if self.kind.has_projections:
            return self.attention.remember(memory, position_ids=position_ids)
        keys = self.rotation(memory, position_ids)
        return self.attention.remember(keys, memory)

    def first_carry(
        self, batch_shape: tuple[int, ...], source_length: int, dtype: Any = jnp.float32
    ) -> Carry:
        """The carry before the first query; None if this kind carries nothing.

        All carries have its dtype: float64 for tokens of that `dtype`, else float32.
        """
        wide = accumulator_dtype(jnp.zeros((), dtype))
        return self.kind.first_carry((*batch_shape, source_length), wide)
