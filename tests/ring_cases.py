"""Meshes, masks, inputs and a loss for comparing ring attention with the reference."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from derivative_cases import numbers_of
from jax.sharding import Mesh
from score_cases import DK, SCORE_CASES, ScoreCase

import attention_jax as aj
from attention_jax import BlockSizes

B, DV = 2, 13
PART = (9, 13)  # queries and keys of a device, odd
TILE = BlockSizes(query=2, key=3)  # divides neither


def mesh_of(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("context",))


def lengths_of(devices):
    return tuple(devices * length for length in PART)


def mask_of(name, target, source):
    rng = np.random.default_rng(3)
    segments = aj.segment_mask(*(np.sort(rng.integers(0, 4, (B, n))) for n in (target, source)))
    padding = aj.padding_mask(jnp.array([source - 3, 2]), jnp.array([3, target - 1]))
    return {
        "none": None,
        "causal": aj.causal_mask(),
        "offset": aj.causal_mask(-3),  # the first three queries see nothing
        "local": aj.local_mask(4, 2),
        "padding": padding,
        "segments": segments,
        "combination": (segments | (aj.causal_mask(-1) & ~aj.local_mask(2, 0))) & padding,
        "dense": jnp.asarray(rng.random((B, target, source)) < 0.3),
    }[name]


MASKS = ("none", "causal", "offset", "local", "padding", "segments", "combination", "dense")


@dataclasses.dataclass(frozen=True)
class MeanOfScores(aj.Score):
    """The mean of the logits of all scores, each with its own derivative rule for a tile."""

    needs_equal_dims = True

    def init(self, rng, query_dim, key_dim):
        return self.each(lambda name, score: score.init(rng, query_dim, key_dim))

    def project_query(self, params, query):
        return self.each(lambda name, score: score.project_query(params[name], query))

    def project_key(self, params, key):
        return self.each(lambda name, score: score.project_key(params[name], key))

    def pair(self, params, q, k):
        logits = self.each(lambda name, score: score.pair(params[name], q[name], k[name]))
        return sum(logits.values()) / len(logits)

    def pair_vjp(self, params, q, k, dlogits):
        share = dlogits / len(SCORE_CASES)
        pulled = self.each(
            lambda name, score: score.pair_vjp(params[name], q[name], k[name], share)
        )
        return tuple({name: of_score[i] for name, of_score in pulled.items()} for i in range(3))

    @staticmethod
    def each(function):
        return {name: function(name, case.score) for name, case in SCORE_CASES.items()}


CASES = {**SCORE_CASES, "all": ScoreCase("all", MeanOfScores(), None)}


def point_of(score_name, target, source):
    case, rng = CASES[score_name], np.random.default_rng(5)
    params = case.score.init(jax.random.key(1), case.query_dim, DK)
    return {
        "query": rng.normal(size=(B, target, case.query_dim)),
        "key": rng.normal(size=(B, source, DK)) / 2,
        "value": rng.normal(size=(B, source, DV)),
        "params": jax.tree.map(np.float64, params),
        "slopes": rng.random(B),
        "distances": rng.normal(size=11),
    }


def table_of(mask, target, source):
    """Returns the mask's table, bool [B, target, source]."""
    if mask is None:
        mask = np.ones((1, 1), bool)
    table = mask.materialize(target, source) if isinstance(mask, aj.Mask) else mask
    return np.broadcast_to(table, (B, target, source))


def with_padding_of_nan(point, allowed):
    """Returns the point with NaN and Inf in every token that is in no allowed pair."""
    queries, keys = ~allowed.any(2)[..., None], ~allowed.any(1)[..., None]
    return {
        **point,
        "query": np.where(queries, np.nan, point["query"]),
        "key": np.where(keys, np.inf, point["key"]),
        "value": np.where(keys, np.nan, point["value"]),
    }


def results_of(attend, score_name, **options):
    """Returns the function (point, mask, further bias) -> (output, statistics)."""

    def results(point, mask, bias=None):
        point = dict(point)
        functions = aj.alibi_bias(point.pop("slopes")) + aj.relative_bias(point.pop("distances"))
        bias = functions if bias is None else functions + bias
        score = CASES[score_name].score
        return attend(**point, score=score, mask=mask, bias=bias, return_statistics=True, **options)

    return results


def loss_of(attend, score_name, **options):
    results = results_of(attend, score_name, **options)
    return lambda *args: numbers_of(results(*args))


reference = functools.partial(aj.attention, implementation="reference")
