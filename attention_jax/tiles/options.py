"""The arguments of every implementation: static `Options` and a pytree of arrays, `Inputs`.

An implementation is a pure, traceable function `attend(options, inputs) -> (output, statistics)` of
ONE example, or of a whole batch where `kernels.OF_A_BATCH` names it. The statistics are
`AttentionStatistics`, or None unless they are requested. With all arrays in one argument, batching
is `jax.vmap` over it. The loops over keys leave out a sink, which `results_of_rows` adds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention_jax.core.arrays import accumulator_dtype, cast_floats
from attention_jax.core.checks import check_integer
from attention_jax.core.meshes import explicit_spec, on_automatic_axes, varying_as
from attention_jax.normalizers import AttentionStatistics, Normalizer, Softmax
from attention_jax.positions.contract import Bias, Mask
from attention_jax.scores import Params, ProjectedKeys, Score

Array = jax.Array


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
    """The arrays of a call, with batch axes *B; of one example, without, in an implementation."""

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


def results_of_rows(
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
    sink = options.normalizer.sink_logit(params)
    if sink is not None:
        share, summary = summary.with_sink(sink)
        output = output.astype(share.dtype) * share[:, None]
    statistics = None
    if options.return_statistics:
        statistics = summary.statistics()
    return output.astype(inputs.query.dtype), statistics


# --- batches ---


def vmap_over_batch(
    options: Options,
    function: Callable[..., Any],
    inputs: Inputs,
    *extra: tuple[Array, int],
    by_query: bool = False,
    whole: bool = False,
) -> Any:
    """Applies `function`, of one example or of the `whole` batch, to inputs with batch axes *B.

    A leaf that lacks a batch axis, or has it with size 1, is shared and never copied. On a mesh
    with Explicit axes the compiler shards the computation, and the batch axes of each result are
    sharded like those of query, key and value.

    Args:
        options: those of the call, with the score and the normaliser whose parameters are in
            `inputs`.
        function: takes `Inputs` and the extra arrays without batch axes; returns a pytree of
            arrays. It must not use arrays from a closure.
        inputs: query has exactly the axes *B; key, value and the leaves of the parameters, mask and
            biases have axes that broadcast to *B; so have several keys in dropout_rng; one key is
            split.
        extra: pairs of an array whose leading axes broadcast to *B, and its number of axes
            without them.
        by_query: whether the axis T follows *B in every result, which is then sharded like the
            axis T of the query.
        whole: whether `function` takes inputs with batch axes, and is called once.

    Returns:
        the results of `function`, each leaf with the axes *B in front.
    """
    spec = explicit_batch_spec(inputs)
    if by_query:
        spec = PartitionSpec(*spec, explicit_spec(inputs.query)[-2])

    def batched(inputs: Inputs, *arrays: Array) -> Any:
        # For `jax.shard_map`: an array that became varying inside a loop would, in the gradient, be
        # summed over devices in every step of the loop.
        inputs, arrays = varying_as((inputs, arrays), inputs, arrays)
        batch_shape = inputs.query.shape[:-2]
        if inputs.dropout_rng is not None and inputs.dropout_rng.ndim == 0:
            inputs = inputs._replace(dropout_rng=jax.random.split(inputs.dropout_rng, batch_shape))
        if whole:
            return function(inputs, *arrays)
        ndims = (core_ndims(options, inputs), *(ndim for _, ndim in extra))
        return map_over_batch(function, batch_shape, (inputs, *arrays), ndims)

    return on_automatic_axes(batched, spec, inputs, *(array for array, _ in extra))


def explicit_batch_spec(inputs: Inputs) -> PartitionSpec:
    """The sharding of *B over Explicit axes, taken from query, key and value in that order."""
    batch_ndim = inputs.query.ndim - 2
    cuts: list[Any] = [None] * batch_ndim
    for tokens in (inputs.query, jax.tree.leaves(inputs.key)[0], inputs.value):
        batch_spec = explicit_spec(tokens)[:-2]
        for axis, cut in enumerate(batch_spec, start=batch_ndim - len(batch_spec)):
            if cuts[axis] is None and cut not in cuts:
                cuts[axis] = cut
    return PartitionSpec(*cuts)


def map_over_batch(
    function: Callable[..., Any],
    batch_shape: tuple[int, ...],
    arguments: tuple[Any, ...],
    core_ndims: tuple[Any, ...],
) -> Any:
    """Applies `function`, of one example, to arguments with leading batch axes.

    Args:
        function: takes the arguments without batch axes; returns a pytree of arrays.
        batch_shape: *B.
        arguments: pytrees whose leaves' leading axes broadcast to *B.
        core_ndims: the same pytrees with the number of axes of each leaf without batch axes.

    Returns:
        the results of `function`, each leaf with the axes *B in front.
    """
    axes = [axis for axis, size in enumerate(batch_shape) if size != 1]
    leaves, structure = jax.tree.flatten(arguments)
    in_axes = []
    for index, (leaf, ndim) in enumerate(zip(leaves, jax.tree.leaves(core_ndims), strict=True)):
        core = leaf.shape[leaf.ndim - ndim :]
        sizes = leaf.shape[: leaf.ndim - ndim]
        sizes = (1,) * (len(batch_shape) - len(sizes)) + sizes
        leaves[index] = leaf.reshape([size for size in sizes if size != 1] + list(core))
        in_axes.append([None if sizes[axis] == 1 else 0 for axis in axes])

    def batched(*leaves: Array) -> Any:
        return function(*jax.tree.unflatten(structure, leaves))

    for leaf_axes in reversed(list(zip(*in_axes, strict=True))):  # innermost batch axis first
        batched = jax.vmap(batched, in_axes=leaf_axes)
    return jax.tree.map(
        lambda out: out.reshape(batch_shape + out.shape[len(axes) :]), batched(*leaves)
    )


def core_ndims_of_params(score: Score, params: Params, query_dim: int, key_dim: int) -> Params:
    """`params` with every array replaced by its number of axes without batch axes."""
    shapes = score.param_shapes(params, query_dim, key_dim)
    return jax.tree.map(lambda leaf: len(leaf.shape), shapes)


def core_ndims(options: Options, inputs: Inputs) -> Inputs:
    """`inputs` with every array replaced by its number of axes without batch axes."""
    sizes = inputs.query.shape[-1], inputs.key.shape[-1]
    ndims: Any = (
        2,  # query
        inputs.key.map(lambda _, ndim: ndim) if isinstance(inputs.key, ProjectedKeys) else 2,
        2,  # value
        core_ndims_of_params(options.score, inputs.params, *sizes),
        None if inputs.mask is None else inputs.mask.core_ndims(),
        None if inputs.bias is None else inputs.bias.core_ndims(),
        None if inputs.dropout_rng is None else 0,
        jax.tree.map(lambda leaf: len(leaf.shape), options.normalizer.param_shapes()),
        None if inputs.damping is None else inputs.damping.core_ndims(),
    )
    return Inputs(*ndims)
