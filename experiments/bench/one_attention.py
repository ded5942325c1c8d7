"""Relations between a query and a key, and the attention that learns which key is right.

A sample is a query in R^4, S keys, and the index of the right one; `relations.py` trains.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import Score

Array = jax.Array
INPUT = 4  # features of a query and a key, before the projections
MATRIX = np.random.default_rng(0).standard_normal((INPUT, INPUT)).astype(np.float32)

# The value of each of the keys [S, 4] for a query [4]; the right key has the largest.
RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "inner": lambda query, keys: keys @ query,
    "bilinear": lambda query, keys: keys @ (query @ MATRIX.astype(query.dtype)),
    "cosine": lambda query, keys: keys @ query / _length(keys),
    "nearest": lambda query, keys: -_length(keys - query[None]),
    "farthest": lambda query, keys: _length(keys - query[None]),
    "manhattan": lambda query, keys: -jnp.abs(keys - query[None]).sum(-1),
    "longest": lambda query, keys: _length(keys),
    "predecessor": lambda query, keys: jnp.where(keys[:, 0] < query[0], keys[:, 0], -jnp.inf),
    "parity": lambda query, keys: query[:2].prod() * keys[:, :2].prod(-1),
}


def _length(x: Array) -> Array:
    return jnp.sqrt(jnp.square(x).sum(-1))


def sample(relation: str, normal: Array) -> tuple[Array, Array, Array]:
    """(query [4], keys [S, 4], index of the right key []) of normal numbers [1 + S, 4]."""
    query, keys = normal[0], normal[1:]
    if relation == "predecessor":  # a query below all keys trades first features with the first
        low = jnp.minimum(query[0], keys[0, 0])
        trade = query[0] < keys[:, 0].min()
        high = jnp.maximum(query[0], keys[0, 0])
        query = query.at[0].set(jnp.where(trade, high, query[0]))
        keys = keys.at[0, 0].set(jnp.where(trade, low, keys[0, 0]))
    if relation == "parity":  # the key with the largest third feature is the right one
        bits = jnp.where(normal[:, :2] < 0, -1, 1).astype(normal.dtype)
        right = keys[:, 2] == keys[:, 2].max()
        parities = jnp.where(right, 1, -1).astype(normal.dtype) * bits[0].prod()
        keys = jnp.zeros_like(keys).at[:, 0].set(bits[1:, 0]).at[:, 1].set(bits[1:, 0] * parities)
        query = jnp.zeros_like(query).at[:2].set(bits[0])
    return query, keys, jnp.argmax(RELATIONS[relation](query, keys))


def samples(rng: Array, size: int, keys: int) -> tuple[Array, Array, Array]:
    """`size` samples of each relation [R, size, ...], all from the same normal numbers."""
    normal = jax.random.normal(rng, (size, 1 + keys, INPUT))
    of_each = [jax.vmap(functools.partial(sample, name))(normal) for name in RELATIONS]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *of_each)


def init(score: Score, rng: Array, dim: int) -> Any:
    """The parameters of an attention: two projections and those of the score."""
    query_rng, key_rng, score_rng = jax.random.split(rng, 3)
    params = {"score": score.init(score_rng, dim, dim)}
    for side, side_rng in (("query", query_rng), ("key", key_rng)):
        kernel = jax.random.normal(side_rng, (INPUT, dim)) * INPUT**-0.5
        params[side] = {"kernel": kernel, "bias": jnp.zeros(dim)}
    return params


def logits_of(score: Score, params: Any, query: Array, keys: Array) -> Array:
    """The logits [S] of a query [4] and keys [S, 4]."""
    query, keys = (
        x @ params[side]["kernel"] + params[side]["bias"][None]
        for side, x in (("query", query[None]), ("key", keys))
    )
    return score(params["score"], query, keys)[0]


def measure(score: Score, params: Any, factor: Array, batch: Any) -> tuple[Array, Array]:
    """Cross entropy, and the share of right samples; a tie of n keys counts 1 / n."""
    query, keys, right = batch
    logits = jax.vmap(functools.partial(logits_of, score, params))(query, keys) * factor
    is_right = jax.nn.one_hot(right, keys.shape[1], dtype=logits.dtype)
    largest = (logits == logits.max(axis=-1, keepdims=True)).astype(logits.dtype)
    share = (is_right * largest).sum(-1) / jnp.maximum(largest.sum(-1), 1)  # 0 for NaN
    return -(is_right * jax.nn.log_softmax(logits)).sum(-1).mean(), share.mean()
