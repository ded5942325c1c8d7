"""How attention calls a score: tokens become features, and pairs of features become logits.

A token that no allowed pair contains (padding) is replaced before it is projected, so that no
operation reads a NaN that a mask hides.

A hidden pair of real tokens remains. A distance sqrt(|q - k|^2) has an infinite slope where q = k,
an angle where q and k are parallel. If a mask hides such a pair, its logit has the cotangent 0, and
0 times infinity is NaN, which the sum over the pairs of a query then contains. So where a logit is
differentiated, a hidden pair must not be computed from its own tokens, but from a pair of stand-ins
whose slope is finite. (Where only its value is wanted, its own tokens serve: it becomes -inf.) This
costs a selection for each pair and feature, so only scores that may need it pay for it. Overflow is
not detected: a hidden pair whose product exceeds the largest float still sends NaN.
"""

import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from attention_jax.core.arrays import cast_floats
from attention_jax.core.products import blocks_of, cut_in_blocks, for_each_block, is_one_row
from attention_jax.parts import Known
from attention_jax.scores import Params, ProjectedKeys, Score
from attention_jax.scores.contract import Features, Side
from attention_jax.scores.origin import origin_of
from attention_jax.tiles.options import Inputs

Array = jax.Array


class Operands(NamedTuple):
    """The tokens of one example as `pair` and the weighted sum read them, and the parameters."""

    queries: Features  # [T, ...]
    keys: Features  # [S, ...]
    values: Array  # [S, Dv]
    params: Params  # of the score, in the compute dtype


def project_tokens(
    score: Score,
    inputs: Inputs,
    lengths: tuple[int, int],
    used: tuple[Array | None, Array | None],
    axis: str | None = None,
) -> Operands:
    """The tokens of one example, projected, without what the mask hides.

    Args:
        score: the score.
        inputs: the arrays of one example.
        lengths: (T, S), to which tokens are padded.
        used: which queries and which keys an allowed pair contains, bool, for each token and
            perhaps for padding; None for all, if nothing is padded.
        axis: the mesh axis of the devices that hold the other tokens of the example, if any.
    """
    params, query, key, values = cast_floats(
        (inputs.params, inputs.query, inputs.key, inputs.value), inputs.compute_dtype
    )
    if score.translation_invariant and not isinstance(key, ProjectedKeys):
        used_keys = None if used[1] is None else used[1][: key.shape[0]]
        origin = origin_of(key, used_keys, axis, short=inputs.token_dtype == jnp.bfloat16)
        query, key = query - origin, key - origin
    # Tokens are padded before the projection, so that the score sees only plausible tokens.
    query = _replace_and_pad(query, lengths[0], used[0], _stand_in(query, "query"))
    key = jax.tree.map(
        lambda leaf: _replace_and_pad(leaf, lengths[1], used[1], _stand_in(leaf, "key")), key
    )
    values = _replace_and_pad(values, lengths[1], used[1], 0).astype(inputs.value_dtype)
    return Operands(*_features(score, inputs, params, query, key), values, params)


def _features(score: Score, inputs: Inputs, params: Any, query: Any, key: Any) -> tuple[Any, Any]:
    """The features of `query` [T, Dq] and `key` [S, Dk], all given in the compute dtype.

    The score projects them in float32. If the tokens of `inputs` are 16 bits wide, it rounds the
    features to their dtype, in which a tensor core multiplies them.
    """
    is_projected, dtype = isinstance(key, ProjectedKeys), inputs.token_dtype
    k_features = key.features if is_projected else score.project_key(params, key)
    return (
        round_features(score, score.project_query(params, query), "query", dtype),
        round_features(score, k_features, "key", dtype),
    )


def round_features(score: Score, features: Features, side: Side, dtype: jnp.dtype) -> Features:
    """The features as `pair` reads them, of tokens that are multiplied in a dtype."""
    return score.round(features, side, dtype) if dtype.itemsize == 2 else features


def _replace_and_pad(
    tokens: Array, length: int, used: Array | None, filler: Array | float
) -> Array:
    """Tokens [length, ...]: `filler`, [1, ...] or a number, replaces unused tokens and pads.

    Args:
        tokens: at most `length` of them.
        length: the length of whole tiles.
        used: bool, for each of these tokens and perhaps for padding; None if all are used, and
            nothing is padded.
        filler: what stands in.
    """
    if used is None:
        return tokens
    # Replace before padding, so that no operation reads a NaN that a mask hides.
    count, *rest = tokens.shape
    filler = jnp.broadcast_to(jnp.asarray(filler, tokens.dtype), (1, *rest))
    tokens = jnp.where(used[:count].reshape(count, *[1] * len(rest)), tokens, filler)
    return jnp.concatenate([tokens, jnp.broadcast_to(filler, (length - count, *rest))])


def stand_in_features(score: Score, inputs: Inputs) -> tuple[Any, Any] | None:
    """The features [Fq], [Fk] that replace those of masked pairs; None if the score needs none."""
    params, query, key = inputs.params, inputs.query, inputs.key
    if not may_have_infinite_slopes(score, params, query.shape[-1], key.shape[-1]):
        return None
    params, query, key = cast_floats((params, query, key), inputs.compute_dtype)
    query, key = _stand_in(query, "query"), jax.tree.map(lambda leaf: _stand_in(leaf, "key"), key)
    features = _features(score, inputs, params, query, key)
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf[0]), features)


def _stand_in(tokens: Array, side: Side) -> Array:
    """The token that replaces those that no allowed pair contains: [length, D] -> [1, D].

    The query (1, 2, 1, 2, ...) and the key (3, 1, 3, 1, ...) are not 0, not equal and not parallel:
    a norm, a distance and an angle are smooth there.
    """
    even, odd = (1, 2) if side == "query" else (3, 1)
    shape = (1, *tokens.shape[1:])
    numbers = np.where(np.arange(math.prod(shape)) % 2 == 0, even, odd)
    return jnp.asarray(numbers.reshape(shape), tokens.dtype)


# --- pairs of features ---


def pair_logits(
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
        return _pair_with_stand_ins(score, params, q_features, k_features, allowed, stand_ins)

    features = {0: q_features, 1: k_features}
    t, s = (jax.tree.leaves(each)[0].shape[0] for each in features.values())
    one = _one_token(score, t, s)
    if one is not None:
        # A product of one row, and its derivative's sum over the other side's tokens, need blocks.
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


def _pair_with_stand_ins(
    score: Score, params: Params, q_features: Any, k_features: Any, allowed: Any, stand_ins: Any
) -> Array:
    """`pair_logits` of a tile in which no side has one token alone."""
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


def pair_logits_vjp(
    score: Score,
    params: Params,
    q_features: Any,
    k_features: Any,
    allowed: Array | None,
    stand_ins: tuple[Any, Any] | None,
    dlogits: Array,
) -> tuple[Params, Any, Any]:
    """Pulls `dlogits` [t, s] back through `pair_logits`.

    The score's `pair_vjp` does it. JAX differentiates `pair` instead where stand-ins replace hidden
    pairs, and where a product of one row is computed in blocks.

    Returns:
        (dparams, dq_features, dk_features); zeros for integer features.
    """
    primals = (params, q_features, k_features)
    t, s = dlogits.shape
    if _one_token(score, t, s) is None and (allowed is None or stand_ins is None):
        cotangents = score.pair_vjp(*primals, dlogits)
    else:
        pair = functools.partial(pair_logits, score, allowed=allowed, stand_ins=stand_ins)
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


# --- whether a slope may be infinite ---

# Of `may_have_infinite_slopes`, for scores while they exist: a user's may hold large arrays.
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


def may_have_infinite_slopes(score: Score, params: Params, query_dim: int, key_dim: int) -> bool:
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
