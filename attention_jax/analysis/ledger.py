"""The cost of attention without running it: parameters, operations, memory.

Operations are counted by XLA on the traced program, before compilation for a device, the body of a
loop once per iteration. An addition and a multiplication each count as one, so that a product of
[m, k] and [k, n] has 2 m k n; tanh, exp, log and roots are counted separately. Memory is what the
compiled program requests. Scores of your own are counted too.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters import partial_eval

from attention_jax.analysis.jaxpr_evaluation import IN_LINE, WITH_OWN_RULE, bind_eqn, programs_of
from attention_jax.core.checks import check_integer
from attention_jax.functional.attention import attention
from attention_jax.functional.checks import score_of_sizes
from attention_jax.scores import Score
from attention_jax.scores.contract import init_shapes
from attention_jax.tiles import BlockSizes

Array = jax.Array


class Operations(NamedTuple):
    """Numbers of operations."""

    flops: float  # additions, multiplications, comparisons
    transcendentals: float  # tanh, exp, log, roots


class ScoreCost(NamedTuple):
    """The cost of a score: its number of parameters, and operations per query, key and pair."""

    parameters: int  # number of floats
    query: Operations  # to project a query
    key: Operations  # to project a key, once for all queries
    pair: Operations  # to compute the logit of a projected query and a projected key

    def flops_per_query(self, source_length: int, target_length: int = 1) -> float:
        """Operations for the logits of a query, without transcendentals.

            query + (S / T) key + S pair

        Args:
            source_length: S, the number of keys.
            target_length: T, the number of queries that share the projected keys.
        """
        shared = self.key.flops / target_length
        return self.query.flops + source_length * (shared + self.pair.flops)


class ProgramMemory(NamedTuple):
    """The memory of a compiled program, in bytes."""

    temporary: int  # peak, in addition to arguments and results
    arguments: int  # of all arguments
    results: int  # of all results


def score_cost(score: str | Score, query_dim: int, key_dim: int) -> ScoreCost:
    """The cost of a score, counted by XLA as in `operation_count`; nothing is compiled or run.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        query_dim: Dq, at least 1.
        key_dim: Dk, at least 1.

    Returns:
        `ScoreCost`. Operations on parameters alone, whose number does not grow with the number of
        tokens, are left out.

    Raises:
        ValueError: a size is not a positive integer, or the score does not support the two sizes.

    >>> cost = score_cost("additive", query_dim=64, key_dim=64)
    >>> cost.query.flops, cost.key.flops, cost.pair
    (8192.0, 8192.0, Operations(flops=192.0, transcendentals=64.0))
    >>> cost.flops_per_query(source_length=16), cost.parameters
    (142336.0, 8256)

    Source: "Attention Variants", §38.6, the complexity ledger, which counts a multiplication and
    its addition as one operation, and the projection of a key again for each query.
    """
    score, query_dim, key_dim = score_of_sizes(score, query_dim, key_dim)
    params = init_shapes(score, query_dim, key_dim)

    def tokens(count: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, dim), jnp.float32)

    def of_tokens(count: int) -> tuple[Operations, ...]:
        queries, keys = tokens(count, query_dim), tokens(count, key_dim)
        q_features = jax.eval_shape(score.project_query, params, tokens(1, query_dim))
        k_features = jax.eval_shape(score.project_key, params, keys)
        return (
            operation_count(score.project_query, params, queries),
            operation_count(score.project_key, params, keys),
            operation_count(score.pair, params, q_features, k_features),
        )

    counts = zip(of_tokens(2), of_tokens(1), strict=True)
    query, key, pair = (Operations(*map(operator.sub, *both)) for both in counts)
    return ScoreCost(sum(leaf.size for leaf in jax.tree.leaves(params)), query, key, pair)


def operation_count(function: Callable[..., Any], *arguments: Any) -> Operations:
    """The operations of `function`, counted by XLA; nothing is compiled or run.

    The bookkeeping of a loop is left out. Of several branches, the most expensive one counts.
    Kernels that XLA calls but does not compile, such as cuDNN's, count as nothing.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: its arguments, or a `jax.ShapeDtypeStruct` in place of each array.

    Returns:
        `Operations`.

    Raises:
        NotImplementedError: the number of iterations of a loop is known only when it runs, as in a
            `while_loop`, and in attention in tiles with a mask; or a loop is inside of a Pallas
            kernel or a `shard_map`.

    >>> matrix = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> operation_count(lambda x: jnp.tanh(x @ x), matrix)
    Operations(flops=1024.0, transcendentals=64.0)
    >>> ten = lambda x: jax.lax.fori_loop(0, 10, lambda _, power: power @ x, x)
    >>> operation_count(ten, matrix).flops
    10240.0
    """
    program = jax.make_jaxpr(function)(*arguments)
    # Without operations whose results are not used, as JAX lowers it.
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.out_avals), True)
    return Operations(*_count(ClosedJaxpr(jaxpr, program.consts)).tolist())


def _count(program: ClosedJaxpr) -> np.ndarray:
    """The numbers of operations of a program: [2], as in `Operations`."""
    total = _count_by_xla(jaxpr_as_fun(program), program.in_avals)
    for equation in _with_loops(program):
        # XLA counts the body of a loop once.
        total -= _count_by_xla(
            lambda *values, equation=equation: bind_eqn(equation, values),
            [atom.aval for atom in equation.invars],
        )
        inner = np.max([_count(each) for each in programs_of(equation)], axis=0)
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


def _count_by_xla(function: Callable[..., Any], avals: Iterable[Any]) -> np.ndarray:
    types = (jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals)
    counts = jax.jit(function).lower(*types).cost_analysis() or {}
    # The analysis omits operations that do not occur.
    return np.array([counts.get(name, 0) for name in Operations._fields], float)


# Operations of which JAX shows no program, and the function that computes them.
_FUNCTIONS = {"kept_call": "impl", "call_hi_primitive": "to_lojax"}


def _with_loops(program: ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The outermost loops of a program, and its conditionals with a loop in a branch."""
    for equation in program.jaxpr.eqns:
        name, inner = equation.primitive.name, programs_of(equation)
        if name == "while":
            raise NotImplementedError(
                "function must have loops whose number of iterations is known before they run;"
                " got a while loop"
            )
        if name in _FUNCTIONS and not inner:
            evaluate = getattr(equation.primitive, _FUNCTIONS[name])
            evaluate = functools.partial(evaluate, **equation.params)
            inner = [jax.make_jaxpr(evaluate)(*(atom.aval for atom in equation.invars))]
        if name == "scan":
            yield equation
        elif name in (*IN_LINE, *WITH_OWN_RULE, *_FUNCTIONS):
            for each in inner:
                yield from _with_loops(each)
        elif any(True for each in inner for _ in _with_loops(each)):
            if name != "cond":
                raise NotImplementedError(f"function must have no loop inside of {name}")
            yield equation


def program_memory(
    function: Callable[..., Any],
    *arguments: Any,
    compiler_options: Mapping[str, Any] | None = None,
) -> ProgramMemory:
    """The memory of `function`, which is compiled for JAX's default device and not run.

    It does not include memory that library kernels allocate at run time. XLA:CPU passes some whole
    programs to YNNPACK, and then reports no temporary memory, unless they are compiled with
    {"xla_cpu_experimental_ynn_fusion_type": ""}.

    Args:
        function: takes and returns pytrees of arrays.
        arguments: its arguments, or a `jax.ShapeDtypeStruct` in place of each array.
        compiler_options: as for `jax.stages.Lowered.compile`.

    Raises:
        NotImplementedError: the device's compiler does not report memory.

    >>> row = jax.ShapeDtypeStruct((256,), jnp.float32)
    >>> outer = program_memory(lambda x: x[:, None] * x[None], row)
    >>> outer.arguments, outer.results
    (1024, 262144)
    """
    options = None if compiler_options is None else dict(compiler_options)
    memory = jax.jit(function).lower(*arguments).compile(options).memory_analysis()
    if memory is None:
        raise NotImplementedError(f"{jax.default_backend()} does not report a program's memory")
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
    """The memory of `attention` for one float32 example, T = S = length and Dq = Dk = Dv = dim.

    Args:
        score: a name in `SCORES`, "module:Name", or a `Score`.
        length: T and S, at least 1.
        dim: Dq, Dk and Dv, at least 1.
        implementation, block_sizes: as in `attention`.
        backward: also compute the gradients of query, key, value and parameters.

    Raises:
        ValueError: a size is not a positive integer.
        NotImplementedError: the device's compiler does not report memory.

    >>> table = 4 * 512 * 512  # bytes of a float32 [T, S]
    >>> attention_memory("scaled", 512, 16, implementation="reference").temporary >= table
    True
    >>> small = BlockSizes(64, 64)
    >>> attention_memory("scaled", 512, 16, implementation="tiled", block_sizes=small).temporary < (
    ...     table / 2
    ... )
    True
    """
    score, dim, _ = score_of_sizes(score, dim, dim)
    token = jax.ShapeDtypeStruct((check_integer("length", length), dim), jnp.float32)
    options: Any = {"implementation": implementation, "block_sizes": block_sizes}

    def attend(query: Array, key: Array, value: Array, params: Any) -> Array:
        return attention(query, key, value, score=score, params=params, **options)

    inputs = [token, token, token, init_shapes(score, dim, dim)]
    if backward:
        return program_memory(functools.partial(forward_and_backward, attend), token, *inputs)
    return program_memory(attend, *inputs)


def forward_and_backward(function: Callable[..., Array], doutput: Array, *inputs: Any) -> Any:
    """(the output of a function, the gradients of all inputs for a cotangent of the output)."""
    output, pull_back = jax.vjp(function, *inputs)
    return output, pull_back(doutput)


def growth_exponent(lengths: Sequence[float], sizes: Sequence[float]) -> float:
    """The exponent p of sizes ~ lengths^p: the slope of a straight line through their logarithms.

    Args:
        lengths: positive numbers, at least two of them different.
        sizes: a positive number for each length.

    >>> round(growth_exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(lengths), np.log(sizes), 1)[0])
