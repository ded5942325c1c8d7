"""How large the logits of an attention are, and by what to multiply them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.sparse.linalg import cg
from jax.sharding import PartitionSpec

from attention_jax.analysis.statistics import as_pairs, per_query
from attention_jax.core.arrays import bool_array
from attention_jax.core.checks import check_integer, check_real
from attention_jax.core.meshes import explicit_spec, on_automatic_axes, varying_as
from attention_jax.core.serialization import exported
from attention_jax.positions.contract import Mask

Array = jax.Array


@exported
class LogitSize(NamedTuple):
    """The size of the logits of an attention; [*B] each, without the axes that are pooled."""

    deviation: Array  # of the logits within a row
    query_share: Array  # of their variance, what depends on the query; estimates may exceed 1


def logit_size(
    logits: Array,
    mask: Mask | Array | None = None,
    *,
    rows: Array | None = None,
    axis: int | Sequence[int] = (),
) -> LogitSize:
    """The deviation of logits within rows, and the share of the variance that needs the query.

        l_ij = a_i + b_j + c_ij,    a, b by least squares over the allowed pairs of an example
        deviation = sqrt(sum (l_ij - mean_j l_ij)^2 / n)
        query_share = [sum c_ij^2 / (n - T - S + C)] / [sum (l_ij - mean_j l_ij)^2 / (n - T)]

    n counts the allowed pairs, T and S the queries and keys in them, and C the sets of keys that no
    query connects, such as packed documents (1 without a mask). A softmax does not see a. The part
    b ranks the keys equally for all queries, and c alone tells queries apart. Each sum of squares
    is divided by its degrees of freedom: the share is 0 for logits that depend on the key alone,
    and 1 in expectation for independent ones, under every mask. The estimate may exceed 1 for few
    pairs.

    Queries with fewer than two allowed keys do not count. The least squares are solved by conjugate
    gradients, in the memory of the logits: about ten steps under causal and random masks, up to S
    in a window of a few keys.

    Args:
        logits: float [*B, T, S], finite where allowed; -inf counts as masked, so that the logits of
            `capture` need no mask. Masked entries may have any value, including NaN.
        mask: a `Mask`, or bool [*B, T, S] (sizes may be 1) or [T, S]; True = may attend.
        rows: bool [T], or with leading axes that broadcast to *B: True for the queries that count.
            None: all queries count.
        axis: the batch axes to pool: sums of squares and degrees of freedom are added over them,
            and each example keeps its own a and b. 0 for captured logits [B, N, T, S]: the size of
            each head.

    Returns:
        `LogitSize`, in float32 (float64 if the logits are). Its numbers are 0 where no query
        counts, and the share also where no degree of freedom is left, as for a single query.
        Differentiable where the deviation is not 0; entries that do not count send gradient 0.

    Raises:
        ValueError: an argument has the wrong shape, dtype or value.

    >>> of_key = jnp.array([[1.0, 3.0], [1.0, 3.0], [1.0, 3.0]])
    >>> logit_size(of_key)
    LogitSize(deviation=Array(1., dtype=float32), query_share=Array(0., dtype=float32))
    >>> logit_size(jnp.array([[1.0, 3.0], [3.0, 1.0]]))
    LogitSize(deviation=Array(1., dtype=float32), query_share=Array(2., dtype=float32))

    Source: ours; the analysis of variance of two factors without replication (Fisher 1925).
    """
    if logits is None:
        raise ValueError("logits must not be None, as without a softmax or with matrices=False")
    logits, allowed = as_pairs(logits, mask, name="logits")
    allowed &= logits != -jnp.inf
    if rows is not None:
        allowed &= per_query("rows", bool_array("rows", rows, "counts"), logits)
    batch = logits.shape[:-2]
    axes = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    valid = {a % len(batch) for a in axes if check_integer("axis", a, -len(batch)) < len(batch)}
    if len(valid) < len(axes):
        raise ValueError(f"axis must be different axes of the batch {list(batch)}; got {axis!r}")
    sums_of_all = jnp.vectorize(_sums, signature="(t,s),(t,s)->(n)")
    spec = PartitionSpec(*explicit_spec(logits)[:-2])
    sums = on_automatic_axes(sums_of_all, spec, logits, allowed).sum(tuple(valid))
    number, within, of_query, free, free_of_query = jnp.moveaxis(sums, -1, 0)
    is_zero, is_unknown = within == 0, (within == 0) | (free_of_query == 0)  # NaN is neither
    variance = jnp.where(is_zero, 1, within / jnp.maximum(number, 1))
    ratio = of_query / jnp.where(is_zero, 1, within)
    share = ratio * free / jnp.where(is_unknown, 1, free_of_query)
    return LogitSize(jnp.where(is_zero, 0, jnp.sqrt(variance)), jnp.where(is_unknown, 0, share))


def logit_factor(sizes: Mapping[str, LogitSize], deviation: float) -> Array:
    """The factor with which the logits of a model have a wanted deviation within rows.

        factor = deviation / sqrt(mean over attentions of [mean over its sizes of deviation^2])

    The score `Multiplied` applies the factor. Where a layer's tokens depend on the attention before
    it, the factor changes them, too: the deviation is then that of the model without the factor, as
    on the maps of `experiments/bench`. A bias is part of captured logits, and a factor of the score
    does not multiply it.

    Args:
        sizes: the `logit_size` of each attention. Each array may have any shape; pool the examples
            (`axis=0`), so that each counts by its pairs, and leave padding out (`rows=`).
        deviation: the wanted deviation, above 0.

    Returns:
        [] in float32 (float64 if the sizes are); infinite if all logits of each row are equal.

    Raises:
        ValueError: `sizes` is empty or has another value than a `LogitSize`, or `deviation` is not
            a finite number above 0.

    >>> size = logit_size(jnp.array([[4.0, -4.0], [-4.0, 4.0]]))
    >>> logit_factor({"attention": size}, 0.25)
    Array(0.0625, dtype=float32)

    Source: ours.
    """
    check_real("deviation", deviation, above=0)
    types = {type(size) for size in sizes.values()} if isinstance(sizes, Mapping) else type(sizes)
    if types != {LogitSize}:
        raise ValueError(f"sizes must be a dict of LogitSize; got {types}")
    squares = [jnp.mean(jnp.square(size.deviation)) for size in sizes.values()]
    return float(deviation) / jnp.sqrt(jnp.mean(jnp.stack(squares)))


def _sums(logits: Array, allowed: Array) -> Array:
    """Five numbers of one example: its pairs; the squares within rows, and of what depends on the
    query; the degrees of freedom of both.
    """
    allowed &= jnp.sum(allowed, axis=1, keepdims=True) > 1
    links = allowed.astype(logits.dtype)
    keys_of, queries_of = jnp.sum(links, axis=1), jnp.sum(links, axis=0)
    component = _components(allowed)

    def within_rows(pairs: Array) -> Array:
        pairs = jnp.where(allowed, pairs, 0)  # before the sum: NaN would reach the gradient
        means = jnp.sum(pairs, axis=1) / jnp.maximum(keys_of, 1)
        return jnp.where(allowed, pairs - means[:, None], 0)

    def normal_equations(key_part: Array) -> Array:
        means = jnp.dot(links, key_part, precision="highest") / jnp.maximum(keys_of, 1)
        squares = queries_of * key_part - jnp.dot(means, links, precision="highest")
        # The sum of each component is free: this sets it to 0, so that the solution is unique.
        return squares + jnp.zeros_like(key_part).at[component].add(key_part)[component]

    within = within_rows(logits)
    preconditioner = 1 / jnp.maximum(queries_of, 1)
    # `cg` alone has no second derivative in forward mode.
    key_part = jax.lax.custom_linear_solve(
        normal_equations,
        jnp.sum(within, axis=0),
        lambda matvec, b: cg(matvec, b, M=lambda x: preconditioner * x)[0],
        symmetric=True,
    )
    of_query = within - within_rows(jnp.broadcast_to(key_part, within.shape))
    free = jnp.sum(jnp.maximum(keys_of - 1, 0))
    is_tied = (queries_of > 0) & (component != jnp.arange(component.size))
    free_of_query = free - jnp.sum(is_tied, dtype=free.dtype)
    squares = (jnp.sum(jnp.square(part)) for part in (within, of_query))
    return jnp.stack([jnp.sum(links), *squares, free, free_of_query])


def _components(allowed: Array) -> Array:
    """For each key, the first key with which queries connect it, in any number of steps: [S]."""
    keys = varying_as(jnp.arange(allowed.shape[1]), allowed)

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        first, _ = state
        of_query = jnp.min(jnp.where(allowed, first[None], keys.size), axis=1, initial=keys.size)
        of_key = jnp.min(jnp.where(allowed, of_query[:, None], keys.size), 0, initial=keys.size)
        nearer = jnp.minimum(first, of_key).at[first].min(of_key)
        return nearer[nearer], first  # the first key's own first key: few steps for a long chain

    first, _ = jax.lax.while_loop(lambda pair: jnp.any(pair[0] != pair[1]), step, (keys, keys - 1))
    return first
