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

from attention_jax.core.products import blocks_of, cut_in_blocks, for_each_block, is_one_row
from attention_jax.parts import Known
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

    def of_tile(q_features: Any, k_features: Any, allowed: Array | None) -> Array:
        return _pair(score, params, q_features, k_features, allowed, stand_ins)

    features = {0: q_features, 1: k_features}
    t, s = (jax.tree.leaves(each)[0].shape[0] for each in features.values())
    one = _one_token(score, t, s)
    if one is not None:
        # So are the sums of the derivative over the tokens of the other side, whatever `pair` is.
        blocks = blocks_of(1, (s, t)[one])
        if blocks is None:
            features[one] = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), features[one])
            if allowed is not None:
                allowed = jnp.concatenate([allowed, allowed], one)
            return of_tile(features[0], features[1], allowed)[:t, :s]
        features[one] = for_each_block(features[one], blocks)
        features[1 - one] = cut_in_blocks(features[1 - one], blocks)
        if allowed is not None:
            allowed = cut_in_blocks(allowed, blocks, axis=1 - one)
        logits = jax.vmap(of_tile)(features[0], features[1], allowed)
        return jnp.moveaxis(logits, 0, 1 - one).reshape(t, s)
    return of_tile(features[0], features[1], allowed)


def _pair(
    score: Score, params: Params, q_features: Any, k_features: Any, allowed: Any, stand_ins: Any
) -> Array:
    """`pair_with_stand_ins`, whose derivative is a single product."""
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
    t, s = dlogits.shape
    if _one_token(score, t, s) is None and (allowed is None or stand_ins is None):
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


def _one_token(score: Score, queries: int, keys: int) -> int | None:
    """The side with one token, 0 for queries, if the other has many; see `is_one_row`.

    None if there is none, or the score is elementwise, whose sums are no products.
    """
    if score.tile_cost == "elementwise":
        return None
    sizes = (queries, keys), (keys, queries)
    return next((side for side, rows in enumerate(sizes) if is_one_row(*rows)), None)


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
        score = score.part if type(score) is Known else score  # its program has just been traced

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
