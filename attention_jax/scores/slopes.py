"""Infinite slopes: logits of allowed pairs only, for scores that have a slope that is not finite.

A distance sqrt(|q - k|^2) has an infinite slope where q = k, an angle where q and k are parallel.
If a mask hides such a pair, its logit has the cotangent 0, and 0 times infinity is NaN. It is too
late then: the NaN is in the sum over the pairs of a query. So a hidden pair must not be computed
with its own tokens, but with a pair of stand-ins whose slope is finite.

That costs a choice for each pair and feature, so it is done only for a score that may need it. The
program of its `pair` tells: most operations (sums, products, tanh, ...) have a finite slope at all
finite inputs. Overflow is not looked for: a hidden pair whose product is larger than the largest
float still sends NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from attention_jax.core.partial_jvp import partial_jvp
from attention_jax.scores.contract import Params, Score
from attention_jax.scores.projected_keys import key_features

Array = jax.Array

# Operations whose slope is finite at every finite input. What is missing here costs time only.
_FINITE_SLOPES = frozenset({
    "abs", "add", "add_any", "and", "argmax", "argmin", "atan", "broadcast_in_dim", "ceil",
    "clamp", "concatenate", "convert_element_type", "copy", "cos", "cumsum", "dot_general",
    "dynamic_slice", "eq", "erf", "expand_dims", "floor", "gather",
    "ge", "gt", "iota", "is_finite", "le", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "or", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum",
    "rem", "reshape", "rev", "round", "select_n", "sign", "sin", "slice", "split", "square",
    "squeeze", "stop_gradient", "sub", "tanh", "transpose",
})  # fmt: skip
_CALLS = frozenset(["jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "checkpoint"])


def masked_pair(
    score: Score,
    params: Params,
    q_features: Any,
    k_features: Any,
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
) -> Array:
    """Logits [t, s] of the allowed pairs, whose derivatives no hidden pair can make NaN.

        logits_ij = pair(q_i, k_j) where allowed_ij, pair(stand-in, stand-in) elsewhere

    Args:
        score: the score.
        params: its parameters.
        q_features, k_features: projected tokens, [t, Fq] and [s, Fk] or pytrees of such arrays.
        allowed: bool [t, s]; None for all pairs.
        stand_ins: the features of one query and of one key, [Fq] and [Fk], as `stand_ins` makes
            them; None where all slopes are finite, and then this is the plain `pair`.
    """
    if allowed is None or stand_ins is None:
        return score.pair(params, q_features, k_features)

    def of_pair(query, key, allowed):
        query, key = (
            jax.tree.map(lambda feature, other: jnp.where(allowed, feature, other)[None], *tokens)
            for tokens in ((query, stand_ins[0]), (key, stand_ins[1]))
        )
        return score.pair(params, query, key)[0, 0]

    over_keys = jax.vmap(of_pair, in_axes=(None, 0, 0))
    return jax.vmap(over_keys, in_axes=(0, None, 0))(q_features, k_features, allowed)


def masked_pair_vjp(
    score: Score,
    params: Params,
    q_features: Any,
    k_features: Any,
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
    dlogits: Array,
) -> tuple[Params, Any, Any]:
    """Pulls `dlogits` [t, s] back through `masked_pair`; by the score's own `pair_vjp` if it can.

    Returns:
        (dparams, dq_features, dk_features); zeros for integer features.
    """
    primals = (params, q_features, k_features)
    if allowed is None or stand_ins is None:
        cotangents = score.pair_vjp(*primals, dlogits)
    else:
        logits, pull_back = jax.vjp(
            lambda params, q, k: masked_pair(score, params, q, k, allowed, stand_ins), *primals
        )
        cotangents = pull_back(dlogits.astype(logits.dtype))
    return jax.tree.map(
        lambda cotangent, primal: (
            jnp.zeros_like(primal) if cotangent.dtype == jax.dtypes.float0 else cotangent
        ),
        cotangents,
        primals,
    )


def masked_pair_jvp(
    score: Score,
    primals: tuple[Params, Any, Any],
    tangents: tuple[Any, Any, Any],
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
) -> tuple[Array, Array | None]:
    """Logits [t, s] of `masked_pair` and their tangent; by the score's own `pair_jvp` if it can.

    Args:
        score: the score.
        primals: (params, q_features, k_features).
        tangents: of the primals; None in place of each array that does not move.
        allowed, stand_ins: as in `masked_pair`.

    Returns:
        the logits, and their tangent; None if no array moves.
    """
    if allowed is None or stand_ins is None:
        return score.pair_jvp(*primals, *tangents)
    return partial_jvp(
        lambda params, q, k: masked_pair(score, params, q, k, allowed, stand_ins), primals, tangents
    )


def stand_ins(score: Score, params: Params, query: Array, key: Any) -> tuple[Any, Any] | None:
    """What replaces the features of a hidden pair; None if the score's slopes are all finite.

    Args:
        score: the score.
        params: its parameters.
        query: float [T, Dq], of which only shape and dtype matter.
        key: float [S, Dk], or `ProjectedKeys`; the same.
    """
    q_features = score.project_query(params, stand_in_query(query))
    k_features = key_features(score, params, jax.tree.map(stand_in_key, key))
    if has_finite_slopes(score, params, q_features, k_features):
        return None
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), (q_features, k_features))


# Not 0, not equal and not parallel: a score may hold a norm, a distance or an angle.


def stand_in_query(tokens: Array) -> Array:
    """One query (1, 2, 1, 2, ...), [T, Dq] -> [1, Dq], for tokens that no allowed pair contains."""
    return _alternating(tokens, 1, 2)


def stand_in_key(tokens: Array) -> Array:
    """One key (3, 1, 3, 1, ...), [S, Dk] -> [1, Dk], for tokens that no allowed pair contains."""
    return _alternating(tokens, 3, 1)


def _alternating(tokens: Array, even: int, odd: int) -> Array:
    shape = (1, *tokens.shape[1:])
    numbers = jnp.where(jnp.arange(math.prod(shape)) % 2 == 0, even, odd)
    return numbers.reshape(shape).astype(tokens.dtype)


def has_finite_slopes(score: Score, params: Params, q_features: Any, k_features: Any) -> bool:
    """Whether every slope of the score's `pair` is known to be finite at finite features.

    What the score says itself (`finite_slopes`) counts; if it says nothing, its program is read.
    """
    if score.finite_slopes is not None:
        return score.finite_slopes
    program = jax.make_jaxpr(score.pair)(params, q_features, k_features).jaxpr
    return _is_finite(program, program.invars)


def _is_finite(program: Any, moving: Iterable[Any]) -> bool:
    """Whether no operation on what depends on the inputs `moving` can have an infinite slope."""
    moving = set(moving)
    for equation in program.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, Literal) and v in moving]
        if not inputs or not equation.outvars:  # `jax.debug.print` gives nothing
            continue
        name = equation.primitive.name
        if name in _CALLS:
            inner = _program_in(equation.params)
            pairs = zip(equation.invars, inner.invars, strict=True)
            finite = _is_finite(inner, [own for outer, own in pairs if outer in inputs])
        elif name == "div":
            finite = equation.invars[1] not in inputs
        elif name == "integer_pow":
            finite = equation.params["y"] >= 0
        else:
            finite = name in _FINITE_SLOPES
        if not finite:
            return False
        moving.update(equation.outvars)
    return True


def _program_in(params: dict[str, Any]) -> Any:
    """The program that a call runs."""
    program = params.get("jaxpr", params.get("call_jaxpr"))
    return getattr(program, "jaxpr", program)
