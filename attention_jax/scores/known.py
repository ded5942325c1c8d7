"""`known_score`: a score of a user, traced and checked, in a form that is equal by its program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.core.arrays import cast_floats
from attention_jax.core.programs import (
    Known,
    Part,
    PartError,
    checked_array,
    close,
    is_of_library,
    is_of_this_package,
    named,
    on_numbers,
    trace,
    users_errors,
)
from attention_jax.scores.contract import Params, Score, init_shapes
from attention_jax.scores.function import FunctionScore
from attention_jax.scores.wrapped import WrappedScore

_TOKENS = 130
_CONTRACT = "pair must give logits [t, s] of q_features [t, ...] and k_features [s, ...]"


def known_score(
    score: Score, params: Params | None, query_dim: int, key_dim: int, dtype: Any = jnp.float32
) -> Score:
    """The score, traced for tokens of these sizes; one of this library is returned unchanged.

    The result is equal to another only if the two programs are equal, the numbers of closures,
    globals and attributes included. A program that was not seen before is run on a few random
    tokens: a logit must not depend on positions or on other tokens, and a `pair_vjp` must be the
    derivative of `pair`.

    Args:
        score: from `get_score`.
        params: its parameters, of which only the shapes are read; None for those of `init`.
        query_dim: Dq.
        key_dim: Dk.
        dtype: float32 or float64, in which the score computes.

    Raises:
        ValueError: a method fails or breaks the contract of `Score`; one line names it.
    """
    if type(score) is Known or is_of_library(score):
        return score
    if type(score).pair is Score.pair:
        raise ValueError(f"score {score} must define pair(params, q_features, k_features)")
    part = Part(
        named("score", score),
        "take it as a parameter, and give attention params=",
    )
    try:
        return _traced(part, score, params, query_dim, key_dim, dtype)
    except Exception:
        if isinstance(score, WrappedScore) and type(score).init is WrappedScore.init:
            known_score(score.score, params, query_dim, key_dim, dtype)  # names the part inside
        raise


def _traced(
    part: Part, score: Score, params: Params, query_dim: int, key_dim: int, dtype: Any
) -> Score:
    shapes = _param_shapes(part, score, params, query_dim, key_dim)
    target, source = [size for size in (3, 5, 7, 11) if size not in (query_dim, key_dim)][:2]
    shapes, query, key = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        (shapes, np.empty((target, query_dim)), np.empty((source, key_dim))),
    )

    def run(params: Any, query: Any, key: Any) -> Any:
        """The logits, and what the other methods of the user make of them."""
        q_features, k_features = (
            _features(part, name, getattr(score, name), params, tokens)
            for name, tokens in (("project_query", query), ("project_key", key))
        )
        features = f"{_shapes(q_features)} and {_shapes(k_features)}"
        with users_errors(part, f"pair of {features}", _CONTRACT):
            logits = score.pair(params, q_features, k_features)
        expected = f"pair must return float logits {[target, source]} of {features}"
        logits = checked_array(logits, expected)
        if logits.shape != (target, source) or not jnp.issubdtype(logits.dtype, jnp.floating):
            raise PartError(f"{expected}; got {_shapes(logits)}")
        calls = {
            "pair_vjp": (params, q_features, k_features, logits),
            "round": (q_features, jnp.bfloat16),
        }
        results = []
        for name in filter(functools.partial(_is_users, score), calls):
            with users_errors(part, f"{name} of {features}"):
                results.append(getattr(score, name)(*calls[name]))
        return logits, results

    def digest() -> str:
        return trace(part, run, shapes, query, key)

    known: Any = Known(score, digest(), digest)
    leaves, structure = jax.tree.flatten(shapes)
    _check_pairs(known, structure, tuple(leaves), query_dim, key_dim, dtype)
    return known


def _param_shapes(part: Part, score: Score, params: Params, query_dim: int, key_dim: int) -> Any:
    try:
        with users_errors(part, "init"):
            if params is None:
                return init_shapes(score, query_dim, key_dim)
            return score.param_shapes(params, query_dim, key_dim)
    except PartError as error:
        raise ValueError(f"{part.name}: {error}") from error.__cause__


def _features(part: Part, name: str, project: Callable[..., Any], params: Any, tokens: Any) -> Any:
    """The features of tokens; a `PartError` unless there is one row per token."""
    with users_errors(part, f"{name} of {_shapes(tokens)}"):
        features = project(params, tokens)
    if any(jnp.shape(leaf)[:1] != tokens.shape[:1] for leaf in jax.tree.leaves(features)):
        raise PartError(
            f"{name} must return one row per token, [{tokens.shape[0]}, ...], of"
            f" {_shapes(tokens)}; got {_shapes(features)}"
        )
    return features


def _is_users(score: Score, name: str) -> bool:
    """Whether a user wrote a method of a score, or of the score inside of it."""
    owner = next(cls for cls in score.__class__.__mro__ if name in vars(cls))
    inner = isinstance(score, WrappedScore) and _is_users(score.score, name)
    return not is_of_this_package(owner) or inner


@functools.lru_cache(maxsize=512)
def _check_pairs(
    known: Known, structure: Any, shapes: tuple[Any, ...], query_dim: int, key_dim: int, dtype: Any
) -> None:
    """Raises ValueError unless logits and derivatives of random tokens are as they must be.

    The logits of all pairs must be those of their four corners.
    """
    score: Score = known.part

    def random(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
        return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)

    params = jax.tree.unflatten(structure, [random(3, leaf.shape, 0.3) for leaf in shapes])
    if not isinstance(score, FunctionScore):  # `init` gives numbers that are valid, such as > 0

        def init() -> Params:
            return cast_floats(score.init(jax.random.key(0), query_dim, key_dim), dtype)

        params = on_numbers(init)
        noise = [random(3, leaf.shape, 0.1) for leaf in jax.tree.leaves(params)]
        structure = jax.tree.structure(params)
        params = jax.tree.map(np.add, params, jax.tree.unflatten(structure, noise))
    # More tokens than a tile may have, so that a position beyond them is seen.
    query, key = random(1, (_TOKENS, query_dim)), random(2, (_TOKENS, key_dim))
    halves = (slice(0, _TOKENS // 2), slice(_TOKENS // 2, _TOKENS))
    logits_of = jax.jit(lambda params, query, key: score(params, query, key))
    logits = on_numbers(logits_of, params, query, key)
    corners = [[on_numbers(logits_of, params, query[i], key[j]) for j in halves] for i in halves]
    if not close(logits, np.block(corners)):
        raise ValueError(
            f"{named('score', score)} must give each pair a logit that depends on its query and its"
            " key alone; it depends on positions or on other tokens: use a bias for positions, and"
            " params for what all tokens share"
        )
    if not _is_users(score, "pair_vjp"):
        return

    def derivatives(params: Any, query: Any, key: Any, dlogits: Any) -> Any:
        features = score.project_query(params, query), score.project_key(params, key)
        _, pull_back = jax.vjp(score.pair, params, *features)
        return score.pair_vjp(params, *features, dlogits), pull_back(dlogits)

    dlogits = random(4, (5, 7))
    own, expected = on_numbers(derivatives, params, query[:5], key[:7], dlogits)
    same = jax.tree.structure(own) == jax.tree.structure(expected)  # type: ignore[operator]
    if not same or not all(map(close, jax.tree.leaves(own), jax.tree.leaves(expected))):
        raise ValueError(
            f"{named('score', score)} must have a pair_vjp that is the derivative of its pair; this"
            " one gives other numbers, or another structure"
        )


def _shapes(arrays: Any) -> str:
    """The dtypes and shapes of a pytree of arrays: "float32 [3, 8]"."""
    shapes = [(jnp.result_type(leaf), jnp.shape(leaf)) for leaf in jax.tree.leaves(arrays)]
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes) or "no array"
