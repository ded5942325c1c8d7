"""What attention costs, known before it is run: parameters, operations, memory.

Operations are XLA's own count, taken of the program as it is traced, before a compiler for one
device has rewritten it: an addition and a multiplication each count as one, so that a product of
[m, k] and [k, n] is 2 m k n, and tanh, exp, log and roots are counted apart. Memory is what the
compiled program asks for. Both hold for a score of your own as for ours.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.functional.attention import attention
from attention_jax.implementations import BlockSizes
from attention_jax.scores import Score, get_score
from attention_jax.scores.contract import init_shapes

Array = jax.Array


class Operations(NamedTuple):
    """How many operations."""

    flops: float  # additions, multiplications, comparisons
    transcendentals: float  # tanh, exp, log, roots


class ScoreCost(NamedTuple):
    """What a score costs: of its parameters, of a query, of a key, and of a pair of them."""

    parameters: int
    query: Operations  # to project one query
    key: Operations  # to project one key: paid once, however many queries look at it
    pair: Operations  # to make one logit of two projected tokens

    def flops_per_query(self, source_length: int, target_length: int = 1) -> float:
        """Operations without transcendentals to make the logits of one query.

            query + (S / T) key + S pair

        Args:
            source_length: S, keys that it looks at.
            target_length: T, queries that share the projected keys.
        """
        shared = self.key.flops / target_length
        return self.query.flops + source_length * (shared + self.pair.flops)


class ProgramMemory(NamedTuple):
    """What a compiled program holds, in bytes."""

    temporary: int  # at its peak, beside arguments and results
    arguments: int
    results: int


def parameter_count(score: str | Score, query_dim: int, key_dim: int) -> int:
    """How many numbers a score learns.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        query_dim: Dq, at least 1.
        key_dim: Dk, at least 1.

    Raises:
        ValueError: a size is not a positive integer, or the score cannot take these two.

    >>> [parameter_count(score, 64, 64) for score in ("additive", "general", "dot", "scaled")]
    [8256, 4096, 0, 0]

    Source: "Attention Variants", §38.6, the complexity ledger.
    """
    score, query_dim, key_dim = _checked(score, query_dim, key_dim)
    return sum(leaf.size for leaf in jax.tree.leaves(init_shapes(score, query_dim, key_dim)))


def score_cost(score: str | Score, query_dim: int, key_dim: int) -> ScoreCost:
    """What a score costs, counted by XLA; nothing is compiled or run.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`; counted as `operation_count` counts.
        query_dim: Dq, at least 1.
        key_dim: Dk, at least 1.

    Returns:
        `ScoreCost`. What does not grow with the number of tokens is not in it.

    Raises:
        ValueError: a size is not a positive integer, or the score cannot take these two.

    >>> cost = score_cost("additive", query_dim=64, key_dim=64)
    >>> cost.query.flops, cost.key.flops, cost.pair
    (8192.0, 8192.0, Operations(flops=192.0, transcendentals=64.0))
    >>> cost.flops_per_query(source_length=16), score_cost("dot", 64, 64).flops_per_query(16)
    (142336.0, 2048.0)

    Source: "Attention Variants", §38.6, the complexity ledger, which counts a multiplication and
    its addition as one, and the projection of a key anew for each query.
    """
    score, query_dim, key_dim = _checked(score, query_dim, key_dim)
    params = init_shapes(score, query_dim, key_dim)

    def tokens(count: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, dim), jnp.float32)

    def projected_queries(count: int) -> Operations:
        return operation_count(score.project_query, params, tokens(count, query_dim))

    def projected_keys(count: int) -> Operations:
        return operation_count(score.project_key, params, tokens(count, key_dim))

    def paired(count: int) -> Operations:
        q_features = jax.eval_shape(score.project_query, params, tokens(1, query_dim))
        k_features = jax.eval_shape(score.project_key, params, tokens(count, key_dim))
        return operation_count(score.pair, params, q_features, k_features)

    query, key, pair = (
        Operations(*map(operator.sub, count_of(2), count_of(1)))
        for count_of in (projected_queries, projected_keys, paired)
    )
    return ScoreCost(parameter_count(score, query_dim, key_dim), query, key, pair)


def operation_count(function: Callable[..., Any], *arguments: Any) -> Operations:
    """What `function` would compute if it ran; nothing is compiled or run.

    Args:
        function: takes and returns pytrees of arrays. Of a loop whose length XLA does not know, one
            pass is counted.
        arguments: as it takes them, or `jax.ShapeDtypeStruct` in place of arrays.

    >>> matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> operation_count(lambda x: jnp.tanh(x @ x), matrix)
    Operations(flops=1024.0, transcendentals=64.0)
    """
    counted = jax.jit(function).lower(*arguments).cost_analysis() or {}
    # What does not occur is left out of the analysis.
    return Operations(*(float(counted.get(name, 0)) for name in Operations._fields))


def program_memory(
    function: Callable[..., Any],
    *arguments: Any,
    compiler_options: Mapping[str, Any] | None = None,
) -> ProgramMemory:
    """What `function` would hold if it ran; it is compiled for JAX's default device, and not run.

    What a kernel of a library allocates by itself when it runs is not in it. XLA:CPU hands some
    programs whole to YNNPACK, and then tells of no temporary memory at all, unless it is compiled
    with {"xla_cpu_experimental_ynn_fusion_type": ""}.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: as it takes them, or `jax.ShapeDtypeStruct` in place of arrays.
        compiler_options: as `jax.stages.Lowered.compile` takes them.

    Raises:
        NotImplementedError: this device's compiler does not tell.

    >>> row = jax.ShapeDtypeStruct((256,), jnp.float32)
    >>> outer = program_memory(lambda x: x[:, None] * x[None], row)
    >>> outer.arguments, outer.results
    (1024, 262144)
    """
    options = None if compiler_options is None else dict(compiler_options)
    memory = jax.jit(function).lower(*arguments).compile(options).memory_analysis()
    if memory is None:
        raise NotImplementedError(f"{jax.default_backend()} does not tell what a program holds")
    return ProgramMemory(
        memory.temp_size_in_bytes, memory.argument_size_in_bytes, memory.output_size_in_bytes
    )


def attention_memory(
    score: str | Score,
    length: int,
    dim: int,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
    backward: bool = False,
) -> ProgramMemory:
    """What `attention` of one float32 example, T = S = length and Dq = Dk = Dv = dim, would hold.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        length: T and S, at least 1.
        dim: Dq, Dk and Dv, at least 1.
        implementation, block_sizes: as in `attention`.
        backward: the gradients of query, key, value and parameters too.

    Raises:
        ValueError: a size is not a positive integer.
        NotImplementedError: this device's compiler does not tell.

    >>> table = 4 * 512 * 512  # bytes of a float32 [T, S]
    >>> attention_memory("scaled", 512, 16, implementation="reference").temporary >= table
    True
    >>> small = BlockSizes(64, 64)
    >>> attention_memory("scaled", 512, 16, implementation="tiled", block_sizes=small).temporary < (
    ...     table / 2
    ... )
    True
    """
    score, dim, _ = _checked(score, dim, dim)
    token = jax.ShapeDtypeStruct((_positive("length", length), dim), jnp.float32)

    def attend(query: Array, key: Array, value: Array, params: Any) -> Array:
        return attention(
            query, key, value, score=score, params=params,
            implementation=implementation, block_sizes=block_sizes,
        )  # fmt: skip

    program: Callable[..., Any] = attend
    inputs = [token, token, token, init_shapes(score, dim, dim)]
    if backward:
        program, inputs = functools.partial(forward_and_backward, attend), [token, *inputs]
    return program_memory(program, *inputs)


def forward_and_backward(function: Callable[..., Array], doutput: Array, *inputs: Any) -> Any:
    """(output, gradients of all inputs) of a function, for a cotangent of its output."""
    output, pull_back = jax.vjp(function, *inputs)
    return output, pull_back(doutput)


def growth_exponent(lengths: Sequence[float], sizes: Sequence[float]) -> float:
    """The p of sizes ~ lengths^p: the slope of a straight line through their logarithms.

    Args:
        lengths: at least two that differ, above 0.
        sizes: one for each, above 0.

    Raises:
        ValueError: there are too few, they do not fit together, or one is not above 0.

    >>> round(growth_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    points = np.array([lengths, sizes], float) if len(lengths) == len(sizes) else np.zeros((2, 0))
    if len(set(points[0])) < 2 or not np.all(points > 0):
        raise ValueError(
            "lengths and sizes must be as many, at least two different lengths, and above 0; got"
            f" {list(lengths)} and {list(sizes)}"
        )
    x, y = np.log(points)
    x = x - x.mean()
    return float(x @ y / (x @ x))


def _checked(score: str | Score, query_dim: int, key_dim: int) -> tuple[Score, int, int]:
    score = get_score(score)
    query_dim, key_dim = _positive("query_dim", query_dim), _positive("key_dim", key_dim)
    if score.needs_equal_dims and query_dim != key_dim:
        raise ValueError(
            f"key_dim must be {query_dim} to match score {score} with query_dim {query_dim};"
            f" got {key_dim}"
        )
    return score, query_dim, key_dim


def _positive(name: str, size: Any) -> int:
    try:
        integer = operator.index(size)
    except TypeError:
        integer = 0
    if integer < 1:
        raise ValueError(f"{name} must be an integer of at least 1; got {size!r}")
    return integer
