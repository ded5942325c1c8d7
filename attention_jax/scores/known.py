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
    named,
    on_numbers,
    trace,
    users_errors,
)
from attention_jax.scores.contract import Params, Score, init_shapes
from attention_jax.scores.function import FunctionScore
from attention_jax.scores.wrapped import WrappedScore

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
    if isinstance(score, WrappedScore) and type(score).init is WrappedScore.init:
        known_score(score.score, params, query_dim, key_dim, dtype)  # its errors name the part
    if type(score).pair is Score.pair:
        raise ValueError(f"score {score} must define pair(params, q_features, k_features)")
    part = Part(
        named("score", score),
        "take it as a parameter, and give attention params=",
    )
    shapes = _param_shapes(part, score, params, query_dim, key_dim)
    target, source = [size for size in (3, 5, 7, 11) if size not in (query_dim, key_dim)][:2]
    shapes, query, key = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
        (shapes, np.empty((target, query_dim)), np.empty((source, key_dim))),
    )

    def run(params: Any, query: Any, key: Any) -> Any:
        """The logits, and what a `pair_vjp` of the score's own makes of them."""
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
        if not _has_own_vjp(score):
            return logits
        with users_errors(part, f"pair_vjp of {features}"):
            return logits, score.pair_vjp(params, q_features, k_features, logits)

    known: Any = Known(score, trace(part, run, shapes, query, key).digest)
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


def _has_own_vjp(score: Score) -> bool:
    return score.__class__.pair_vjp is not Score.pair_vjp


@functools.lru_cache(maxsize=512)
def _check_pairs(
    score: Score, structure: Any, shapes: tuple[Any, ...], query_dim: int, key_dim: int, dtype: Any
) -> None:
    """Raises ValueError unless logits and derivatives of four random tokens are as they must be.

    The logits of 4 x 4 tokens must be those of their corners of 2 x 2 tokens.
    """

    def random(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
        return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)

    params = jax.tree.unflatten(structure, [random(3, leaf.shape, 0.3) for leaf in shapes])
    if not isinstance(score, FunctionScore):  # whose parameters may have to be positive

        def init() -> Params:
            return cast_floats(score.init(jax.random.key(0), query_dim, key_dim), dtype)

        params = on_numbers(init)
        noise = [random(3, leaf.shape, 0.1) for leaf in jax.tree.leaves(params)]
        structure = jax.tree.structure(params)
        params = jax.tree.map(np.add, params, jax.tree.unflatten(structure, noise))
    query, key = random(1, (4, query_dim)), random(2, (4, key_dim))
    halves = (slice(0, 2), slice(2, 4))
    logits = on_numbers(score, params, query, key)
    corners = [[on_numbers(score, params, query[i], key[j]) for j in halves] for i in halves]
    if not close(logits, np.block(corners)):
        raise ValueError(
            f"{named('score', score)} must give each pair a logit that depends on its query and its"
            " key alone; it depends on positions or on other tokens: use a bias for positions, and"
            " params for what all tokens share"
        )
    if not _has_own_vjp(score):
        return

    def derivatives(params: Any, query: Any, key: Any) -> Any:
        features = score.project_query(params, query), score.project_key(params, key)
        logits, pull_back = jax.vjp(score.pair, params, *features)
        return score.pair_vjp(params, *features, logits), pull_back(logits)

    own, expected = on_numbers(derivatives, params, query, key)
    if not all(map(close, jax.tree.leaves(own), jax.tree.leaves(expected))):
        raise ValueError(
            f"{named('score', score)} must have a pair_vjp that is the derivative of its pair; this"
            " one gives other numbers"
        )


def _shapes(arrays: Any) -> str:
    """The dtypes and shapes of a pytree of arrays: "float32 [3, 8]"."""
    shapes = [(jnp.result_type(leaf), jnp.shape(leaf)) for leaf in jax.tree.leaves(arrays)]
    return " and ".join(f"{dtype} {list(shape)}" for dtype, shape in shapes) or "no array"
