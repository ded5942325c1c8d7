"""A trial of a score: its methods are traced once, so that a wrong score fails with one line."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax.core.one_line import one_line
from attention_jax.core.users_code import line_name, users_line
from attention_jax.scores.contract import Score
from attention_jax.scores.function import FunctionScore
from attention_jax.scores.wrapped import WrappedScore

_METHODS = ("init", "project_query", "project_key", "pair")


@functools.lru_cache(maxsize=256)
def check_score_runs(score: Score, query_dim: int, key_dim: int) -> None:
    """Raises ValueError if a method of the score fails for tokens of these sizes.

    The methods are traced on shapes: nothing is computed and nothing is compiled. An error that
    only the code of this library raises is raised unchanged, with its traceback.

    >>> check_score_runs(FunctionScore(lambda q, k: q @ k.T), 8, 8)  # it can be used
    """
    if isinstance(score, WrappedScore) and type(score).init is WrappedScore.init:
        check_score_runs(score.score, query_dim, key_dim)  # the errors of a part name the part
    if type(score).pair is Score.pair:
        raise ValueError(f"score {score} must define pair(params, q_features, k_features)")
    target, source = [size for size in (3, 5, 7, 11) if size not in (query_dim, key_dim)][:2]
    query, key = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((target, query_dim), (source, key_dim))
    )

    def init(rng: Any) -> Any:
        return score.init(rng, query_dim, key_dim)

    params = _traced(score, "init", init, jax.eval_shape(jax.random.key, 0))
    q_features = _traced(score, "project_query", score.project_query, params, query)
    k_features = _traced(score, "project_key", score.project_key, params, key)
    for method, features, tokens in (
        ("project_query", q_features, query),
        ("project_key", k_features, key),
    ):
        if any(leaf.shape[:1] != tokens.shape[:1] for leaf in jax.tree.leaves(features)):
            raise ValueError(
                f"score {score}: {method} must return one row per token, [{tokens.shape[0]}, ...],"
                f" of {_shapes(tokens)}; got {_shapes(features)} ({_definition(score, method)})"
            )
    logits = _traced(score, "pair", score.pair, params, q_features, k_features)
    is_array = isinstance(logits, jax.ShapeDtypeStruct)
    if (
        not is_array
        or logits.shape != (target, source)
        or not jnp.issubdtype(logits.dtype, jnp.floating)
    ):
        if logits is None:
            got = "None, as of a function without return"
        else:
            kind = f"a {type(logits).__name__} of {len(jax.tree.leaves(logits))} arrays"
            got = _shapes(logits) if is_array else kind
        raise ValueError(
            f"score {score}: pair must return float logits {[target, source]} of q_features"
            f" {_shapes(q_features)} and k_features {_shapes(k_features)}; got {got}"
            f" ({_definition(score, 'pair')})"
        )


class _ScoreError(Exception):
    """A mistake in a score; to errors that pass through it, JAX adds lines about itself."""


def _traced(score: Score, name: str, method: Callable[..., Any], *arguments: Any) -> Any:
    """The shapes and dtypes that a method returns; ValueError if the user's code fails."""

    def call(*arrays: Any) -> Any:
        try:
            result = method(*arrays)
        except Exception as error:
            line = users_line(error, frozenset(_files(score)))
            if line is None:
                raise
            given = "" if name == "init" else f" of {_shapes(arguments[1:])}"
            raise _ScoreError(
                f"score {score}: {name}{given} raised {type(error).__name__}: {one_line(error)}"
                f" ({line})"
            ) from error
        for leaf in jax.tree.leaves(result):
            try:
                jnp.result_type(leaf)
            except TypeError:
                raise _ScoreError(
                    f"score {score}: {name} must return arrays; got {leaf!r}"
                    f" ({_definition(score, name)})"
                ) from None
        return result

    try:
        return jax.eval_shape(call, *arguments)
    except _ScoreError as error:
        raise ValueError(str(error)) from error.__cause__


def _shapes(arrays: Any) -> str:
    """The dtypes and shapes of a pytree of arrays: "float32 [3, 8]"."""
    leaves = [f"{leaf.dtype} {list(leaf.shape)}" for leaf in jax.tree.leaves(arrays)]
    return " and ".join(leaves) or "no array"


def _definition(score: Score, name: str) -> str:
    """Where a method of the score is defined."""
    code = _code(getattr(type(score), name))
    return "" if code is None else f"see {line_name(code.co_filename, code.co_firstlineno)}"


def _files(score: Score) -> Iterator[str]:
    """The files that define the score, the scores inside it, and their functions."""
    functions: list[Any] = [getattr(type(score), name) for name in _METHODS]
    if isinstance(score, FunctionScore):
        functions.append(score.function)
    for function in functions:
        code = _code(function)
        if code is not None:
            yield code.co_filename
    for field in dataclasses.fields(score):
        inner = getattr(score, field.name)
        if isinstance(inner, Score):
            yield from _files(inner)


def _code(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__code__", None)
