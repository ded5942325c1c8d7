"""Stand-ins for hidden pairs whose slope is infinite; attention calls `pair` through this file.

A distance sqrt(|q - k|^2) has an infinite slope where q = k, an angle where q and k are parallel.
If a mask hides such a pair, its logit has the cotangent 0, and 0 times infinity is NaN, which the
sum over the pairs of a query then contains. So a hidden pair must not be computed from its own
tokens, but from a pair of stand-ins whose slope is finite.

This costs a selection for each pair and feature, so only scores that may need it pay for it. The
program of `pair` decides: most operations (sums, products, tanh, ...) have a finite slope at every
finite input. Overflow is not detected: a hidden pair whose product exceeds the largest float still
sends NaN.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from attention_jax.core.products import blocks_of, cut_in_blocks, for_each_block
from attention_jax.scores.contract import Params, Score

Array = jax.Array

# Of `needs_stand_ins`, for scores while they exist: a user's may hold large arrays.
_ANSWERS: weakref.WeakKeyDictionary[Score, dict[Any, bool]] = weakref.WeakKeyDictionary()

# Operations whose slope is finite at every finite input. A missing operation costs time only.
_FINITE_SLOPES = """
    abs add add_any and argmax argmin atan broadcast_in_dim ceil clamp concatenate
    convert_element_type copy cos cumsum dot_general dynamic_slice eq erf expand_dims floor
    gather ge gt iota is_finite le logistic lt max min mul ne neg not or pad reduce_and
    reduce_max reduce_min reduce_or reduce_sum reshape rev round select_n sign sin slice split
    square squeeze stop_gradient sub tanh transpose
"""
# Not "custom_jvp_call": its rule may give another slope than its program has.
_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call", "checkpoint"])


def pair_with_stand_ins(
    score: Score,
    params: Params,
    q_features: Any,
    k_features: Any,
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
) -> Array:
    """The logits [t, s] of a tile; hidden pairs cannot make their derivatives NaN.

        logits_ij = pair(q_i, k_j) where allowed_ij, pair(stand-in, stand-in) elsewhere

    It hides nothing: the caller sets the logits of hidden pairs to -inf.

    Args:
        score: the score.
        params: its parameters.
        q_features, k_features: projected tokens, [t, Fq] and [s, Fk] or pytrees of such arrays.
        allowed: bool [t, s], True for allowed pairs; None if all are.
        stand_ins: the features of one query and one key, [Fq] and [Fk], that take the place of
            those of a hidden pair; None if all slopes are finite, in which case this is `pair`.
    """
    side, blocks = _blocks(score, q_features, k_features)
    if blocks is not None:
        sides: list[Any] = [for_each_block(each, blocks) for each in (q_features, k_features)]
        sides[side] = cut_in_blocks((q_features, k_features)[side], blocks)
        if allowed is not None:
            allowed = cut_in_blocks(allowed, blocks, axis=side)
        shape = [jax.tree.leaves(each)[0].shape[0] for each in (q_features, k_features)]

        def of_block(q_block: Any, k_block: Any, allowed: Array | None) -> Array:
            return pair_with_stand_ins(score, params, q_block, k_block, allowed, stand_ins)

        logits = jax.vmap(of_block)(sides[0], sides[1], allowed)
        logits = jnp.moveaxis(logits, 0, side)
        padded = *logits.shape[:side], -1, *logits.shape[side + 2 :]
        return logits.reshape(padded)[: shape[0], : shape[1]]
    if allowed is None or stand_ins is None:
        return score.pair(params, q_features, k_features)

    def pair_logit(query, key, allowed):
        query, key = jax.tree.map(
            lambda feature, stand_in: jnp.where(allowed, feature, stand_in)[None],
            (query, key),
            stand_ins,
        )
        return score.pair(params, query, key)[0, 0]

    over_keys = jax.vmap(pair_logit, in_axes=(None, 0, 0))
    return jax.vmap(over_keys, in_axes=(0, None, 0))(q_features, k_features, allowed)


def pair_vjp_with_stand_ins(
    score: Score,
    params: Params,
    q_features: Any,
    k_features: Any,
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
    dlogits: Array,
) -> tuple[Params, Any, Any]:
    """Pulls `dlogits` [t, s] back through `pair_with_stand_ins`; by `pair_vjp` without stand-ins.

    Returns:
        (dparams, dq_features, dk_features); zeros for integer features.
    """
    primals = (params, q_features, k_features)
    in_blocks = _blocks(score, q_features, k_features)[1] is not None
    if not in_blocks and (allowed is None or stand_ins is None):
        cotangents = score.pair_vjp(*primals, dlogits)
    else:
        pair = functools.partial(pair_with_stand_ins, score, allowed=allowed, stand_ins=stand_ins)
        logits, pull_back = jax.vjp(pair, *primals)
        cotangents = pull_back(dlogits.astype(logits.dtype))
    return jax.tree.map(
        lambda cotangent, primal: (
            jnp.zeros_like(primal) if cotangent.dtype == jax.dtypes.float0 else cotangent
        ),
        cotangents,
        primals,
    )


def _blocks(score: Score, q_features: Any, k_features: Any) -> tuple[int, Any]:
    """Which side's tokens are cut, 0 for queries, and the blocks of `core/products.py` or None.

    The derivative of `pair` sums over the tokens of the other side. Blocks of their own keep these
    sums exact, whatever `pair` is. (The sums of elementwise scores are no products.)
    """
    t, s = (jax.tree.leaves(each)[0].shape[0] for each in (q_features, k_features))
    if score.tile_cost == "elementwise":
        return 0, None
    by_key = blocks_of(t, s)
    return (1, by_key) if by_key else (0, blocks_of(s, t))


def needs_stand_ins(score: Score, params: Params, query_dim: int, key_dim: int) -> bool:
    """Whether a slope of the score's `pair` may be infinite at finite features.

    The score's `finite_slopes` decides; if that is None, the operations of its program do.

    Args:
        score: the score.
        params: its parameters, of which only the shapes are read; they may have batch axes.
        query_dim: Dq.
        key_dim: Dk.
    """
    if score.finite_slopes is not None:
        return not score.finite_slopes
    shapes, structure = jax.tree.flatten(score.param_shapes(params, query_dim, key_dim))
    answers = _ANSWERS.setdefault(score, {})
    sizes = structure, *shapes, query_dim, key_dim
    if sizes not in answers:

        def float32(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        params = jax.tree.unflatten(structure, [float32(*leaf.shape) for leaf in shapes])
        q_features = jax.eval_shape(score.project_query, params, float32(1, query_dim))
        k_features = jax.eval_shape(score.project_key, params, float32(1, key_dim))
        program = jax.make_jaxpr(score.pair)(params, q_features, k_features).jaxpr
        answers[sizes] = not _is_finite(program, program.invars)
    return answers[sizes]


def _is_finite(program: Any, variables: Iterable[Any]) -> bool:
    """Whether every operation that depends on `variables` is known to have a finite slope."""
    dependent = set(variables)
    for equation in program.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, Literal) and v in dependent]
        if not inputs or not equation.outvars:  # `jax.debug.print` has no output
            continue
        name, params = equation.primitive.name, equation.params
        if name in _CALLS:
            callee = params.get("jaxpr", params.get("call_jaxpr"))
            callee = getattr(callee, "jaxpr", callee)
            pairs = zip(equation.invars, callee.invars, strict=True)
            finite = _is_finite(callee, [inner for outer, inner in pairs if outer in inputs])
        else:
            finite = (
                name in _FINITE_SLOPES.split()
                or (name == "div" and equation.invars[1] not in inputs)
                or (name == "integer_pow" and params["y"] >= 0)
            )
        if not finite:
            return False
        dependent.update(equation.outvars)
    return True
