"""`known_score`: a score of a user, traced and checked, in a form that is equal by its program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.names import is_of_library
from attention_jax.parts.programs import Known, Part, is_array, is_users, is_wide
from attention_jax.parts.samples import close, on_numbers
from attention_jax.scores.contract import Params, Score
from attention_jax.scores.wrapped import WrappedScore

_FACTS = ("needs_equal_dims", "tile_cost", "finite_slopes", "translation_invariant")
_REMEDY = (
    "take it as a parameter, and give attention params=, or score=jax.tree_util.Partial(f, array)"
    " of a function f(array, q, k)"
)
_CONTRACT = "pair must give logits [t, s] of q_features [t, ...] and k_features [s, ...]"


def known_score(
    score: Score,
    params: Params | None,
    query_dim: int,
    key_dim: int,
    dtype: Any = jnp.float32,
    lengths: tuple[Any, Any] | None = None,
) -> Score:
    """The score, traced for tokens of these sizes; one of this library is returned unchanged.

    The result is equal to another only if the two programs are equal, the numbers of closures,
    globals and attributes included. A program that was not seen before is run on a few random
    tokens: a logit must not depend on positions or on other tokens, a `pair_vjp` must be the
    derivative of `pair`, and a `tile_params` must not change its logits.

    Args:
        score: from `get_score`.
        params: its parameters, of which only the shapes are read; None for those that `init` makes.
        query_dim: Dq.
        key_dim: Dk.
        dtype: float32 or float64, in which the score computes.
        lengths: T and S of the call; None outside of one.

    Raises:
        ValueError: a method fails or breaks the contract of `Score`; one line names it.
    """
    if type(score) is Known or is_of_library(score):
        return score
    part = Part("score", score, _REMEDY)
    part.check_signatures(score)
    arguments = (params, query_dim, key_dim, dtype, lengths)
    try:
        return _traced_score(part, score, *arguments)
    except Exception:
        if isinstance(score, WrappedScore) and type(score).init is WrappedScore.init:
            known_score(score.score, *arguments)  # names the part inside
        raise


def _traced_score(
    part: Part, score: Score, params: Any, query_dim: int, key_dim: int, dtype: Any, lengths: Any
) -> Score:
    # Transposed features and logits have other shapes.
    target, source = [size for size in (3, 5, 7, 11) if size not in (query_dim, key_dim)][:2]
    params = part.call("init", score.param_shapes, params, query_dim, key_dim)
    width = f"{jnp.dtype(dtype)} or more"

    def arguments(queries: Any, keys: Any) -> Any:
        shapes = (queries, query_dim), (keys, key_dim)
        tokens = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), params), *tokens

    def init(rng: Any) -> Params:
        return score.init(rng, query_dim, key_dim)

    def features_of(name: str, params: Any, tokens: Any) -> Any:
        features = part.call(name, getattr(score, name), params, tokens, of=(tokens,))
        contract = f"{name} must return one row per token, [{tokens.shape[0]}, ...], in {width}"
        leaves = jax.tree.leaves(features)
        rows = [np.shape(leaf)[:1] == tokens.shape[:1] and is_wide(leaf, dtype) for leaf in leaves]
        part.require(all(rows), contract, features)
        return features

    def program(params: Any, query: Any, key: Any) -> Any:
        """The logits, and what the other methods of the user make of them."""
        q_features = features_of("project_query", params, query)
        k_features = features_of("project_key", params, key)
        both = (q_features, k_features)
        logits = part.call("pair", score.pair, params, *both, of=both, cure=_CONTRACT)
        target, source = query.shape[0], key.shape[0]
        contract = (
            f"pair must return float logits {[target, source]} of {target} queries, {source} keys,"
            f" in {width}"
        )
        fits = is_array(logits, jnp.floating) and logits.shape == (target, source)
        part.require(fits and is_wide(logits, dtype), contract, logits)
        others = [
            ("pair_vjp", (params, *both, logits)),
            ("tile_params", (params, q_features)),
            ("round", (q_features, "query", jnp.bfloat16)),
            ("round", (k_features, "key", jnp.bfloat16)),
        ]
        return logits, [
            part.call(name, getattr(score, name), *given, of=both)
            for name, given in others
            if _is_users(score, name)
        ]

    def tile_of(name: str, size: Any, _: Any, *arrays: Any) -> tuple[int, int]:
        leaves = jax.tree.leaves(arrays[:2])
        rows, columns = leaves[0].shape[0], leaves[-1].shape[0]
        if name == "project_query":  # of a single token: a stand-in, of which no number counts
            return (size[0] if rows == 1 else rows), size[1]
        if name == "project_key":
            return size[0], (size[1] if columns == 1 else columns)
        return rows, columns

    return part.known(
        program,
        arguments,
        ((target, source), lengths),
        lambda: _check_pairs(part, score, *arguments(7, 5)),
        init,
        ((3, query_dim), (4, key_dim)),
        alone=_is_users(score, "init"),
        tile_of=tile_of,
        facts=tuple(getattr(score, name) for name in _FACTS),
    )


def _is_users(score: Score, method: str) -> bool:
    """Whether a user wrote a method of a score, or of the score inside of it."""
    inside = isinstance(score, WrappedScore) and _is_users(score.score, method)
    return inside or is_users(score, method)


def _check_pairs(part: Part, score: Score, params: Any, query: Any, key: Any) -> None:
    """Raises ValueError unless logits and derivatives of random tokens are as they must be.

    `params`, `query` and `key` are shapes.
    """
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(query.dtype)

    def positive(leaf: Any) -> np.ndarray:  # as a width or a temperature must be
        return random.uniform(0.1, 0.6, leaf.shape).astype(leaf.dtype)

    def logits_of(params: Any, query: Any, key: Any) -> Any:  # unlike score(), without an origin
        features = score.project_query(params, query), score.project_key(params, key)
        return score.pair(params, *features)

    params = jax.tree.map(positive, params)
    query, key = normal(*query.shape), normal(*key.shape)
    rows, columns = random.permutation(7)[:5], random.permutation(5)[:4]
    logits = on_numbers(logits_of, params, query, key)[np.ix_(rows, columns)]
    part.require(
        close(logits, on_numbers(logits_of, params, query[rows], key[columns])),
        "it must give each pair a logit that depends on its query and its key alone; it depends on"
        " positions or on other tokens: use a bias for positions, and params for what all tokens"
        " share",
    )
    if score.translation_invariant:
        offset = np.linspace(-0.5, 0.5, key.shape[1], dtype=key.dtype)
        moved = (tokens + offset for tokens in (query[rows], key[columns]))
        part.require(
            score.needs_equal_dims and close(logits, on_numbers(logits_of, params, *moved)),
            "it must not be translation_invariant: its logits change with an offset of all tokens",
        )
    if not (_is_users(score, "tile_params") or _is_users(score, "pair_vjp")):
        return
    q_features = on_numbers(score.project_query, params, query)
    k_features = on_numbers(score.project_key, params, key)
    if _is_users(score, "tile_params"):

        def logits_of_tile(params: Any, q_features: Any, k_features: Any) -> Any:
            """With what the user adds to the parameters, and without it."""
            both, added = (q_features, k_features), score.tile_params(params, q_features)
            return score.pair(added, *both), score.pair(params, *both)

        part.require(
            close(*on_numbers(logits_of_tile, params, q_features, k_features)),
            "it must have a tile_params that adds what pair would decide by itself; with it, pair"
            " gives other logits",
        )
    if not _is_users(score, "pair_vjp"):
        return

    def derivatives(*arguments: Any) -> Any:
        """By the user's method, and by JAX."""
        return score.pair_vjp(*arguments), Score.pair_vjp(score, *arguments)

    own, expected = on_numbers(derivatives, params, q_features, k_features, normal(7, 5))
    same = jax.tree.structure(own) == jax.tree.structure(expected)  # type: ignore[operator]
    part.require(
        same
        and all(map(close, jax.tree.leaves(own), jax.tree.leaves(expected)))
        and all(is_wide(leaf, query.dtype) for leaf in jax.tree.leaves(own)),
        "it must have a pair_vjp that is the derivative of its pair; this one gives other numbers,"
        f" narrower ones than {query.dtype}, or another structure",
    )
