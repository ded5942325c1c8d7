"""The arguments of every implementation: static `Options` and a pytree of arrays, `Inputs`.

An implementation is a pure, traceable function `attend(options, inputs) -> (output, statistics)` of
ONE example, or of a whole batch where `kernels.OF_A_BATCH` names it. The statistics are
`AttentionStatistics`, or None unless they are requested. With all arrays in one argument, batching
is `jax.vmap` over it. The loops over keys leave out a sink, which `results` adds at the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from attention_jax.core.arrays import accumulator_dtype, cast_floats
from attention_jax.core.checks import check_integer
from attention_jax.normalizers import AttentionStatistics, Normalizer, Softmax
from attention_jax.normalizers.contract import sink_logit
from attention_jax.positions.biases import Bias
from attention_jax.positions.masks import Mask
from attention_jax.scores import Params, Score

Array = jax.Array
Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """The largest size of a tile; it changes time and memory, never a result.

    Attributes:
        query: queries in a tile, at least 1.
        key: keys in a tile, at least 1.

    >>> from attention_jax import attention
    >>> tokens, blocks = jnp.ones((4, 2)), BlockSizes(query=2, key=3)
    >>> attention(tokens, tokens, tokens, implementation="tiled", block_sizes=blocks).shape
    (4, 2)
    """

    query: int = 512
    key: int = 512

    def __post_init__(self) -> None:
        for name in ("query", "key"):
            check_integer(f"BlockSizes {name}", getattr(self, name))


@dataclasses.dataclass(frozen=True)
class Options:
    """The static options of an implementation."""

    score: Score
    block_sizes: Any = None  # `BlockSizes` of "tiled" and "mosaic_tpu"; None until they are chosen
    dropout_rate: float = 0.0  # 0 <= rate < 1
    return_statistics: bool = False  # whether to return `AttentionStatistics`
    normalizer: Normalizer = Softmax()


class Inputs(NamedTuple):
    """The arrays of one example."""

    query: Array  # [T, Dq]
    key: Any  # [S, Dk], or `ProjectedKeys`
    value: Array  # [S, Dv]
    params: Params  # of the score
    mask: Mask | None  # without batch axes
    bias: Bias | None  # without batch axes
    dropout_rng: Any  # [] a typed PRNG key; None without dropout
    normalizer_params: Params = None  # of the normaliser
    # A function of positions, without batch axes, whose exponential multiplies the weights.
    damping: Bias | None = None

    @property
    def token_dtype(self) -> jnp.dtype:
        """The dtype of queries and keys if both are bfloat16 or both float16, else compute dtype.

        The score rounds its features to this dtype, see `Score.round`.
        """
        dtypes = {leaf.dtype for leaf in (self.query, *jax.tree.leaves(self.key))}
        return narrow_or(self.compute_dtype, dtypes)

    @property
    def value_dtype(self) -> jnp.dtype:
        """The dtype of values if it is bfloat16 or float16, else the compute dtype."""
        return narrow_or(self.compute_dtype, {self.value.dtype})

    @property
    def compute_dtype(self) -> jnp.dtype:
        """float64 if any float input is, else float32."""
        params = (self.params, self.normalizer_params)
        floats = (self.query, self.key, self.value, self.bias, params)
        return accumulator_dtype(*jax.tree.leaves(floats))


def narrow_or(compute_dtype: jnp.dtype, dtypes: set[Any]) -> jnp.dtype:
    """The only dtype in the set if it is narrower than a float32 `compute_dtype`, else that."""
    (*_, dtype) = dtypes
    narrow = len(dtypes) == 1 and compute_dtype == jnp.float32 and dtype.itemsize == 2
    return jnp.dtype(dtype) if narrow else compute_dtype


def results(
    options: Options, inputs: Inputs, output: Array, summary: Any
) -> tuple[Array, AttentionStatistics | None]:
    """The results of an implementation, from its rows without a sink.

    Args:
        options: the static options.
        inputs: the arrays of one example.
        output: [T, Dv], in the compute dtype.
        summary: of rows [T]; None unless the weights are a softmax.
    """
    params = cast_floats(inputs.normalizer_params, inputs.compute_dtype)
    sink = sink_logit(options.normalizer, params)
    if sink is not None:
        share, summary = summary.with_sink(sink)
        output = output.astype(share.dtype) * share[:, None]
    statistics = None
    if options.return_statistics:
        statistics = summary.statistics()
    return output.astype(inputs.query.dtype), statistics
