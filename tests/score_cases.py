"""The scores of the suite in conformance.py, each with its formula for one pair in NumPy.

For the complex step, arrays may be complex and may have a leading axis of perturbations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj
from attention_jax.scores import Concat, Cosine, NegativeSquaredDistance, SoftCap

DQ, DK, A = 3, 11, 17


@dataclasses.dataclass(frozen=True)
class OwnCosine(aj.Score):
    """A score of a user's own, with nested parameters and no gradient at a vector of zeros."""

    def init(self, rng, query_dim, key_dim):
        kernel = jax.random.normal(rng, (query_dim, key_dim))
        return {"projection": {"kernel": kernel}, "temperature": jnp.ones(())}

    def project_query(self, params, query):
        query = jnp.matmul(query, params["projection"]["kernel"], precision="highest")
        return query / jnp.linalg.norm(query, axis=-1, keepdims=True)

    def project_key(self, params, key):
        return key / jnp.linalg.norm(key, axis=-1, keepdims=True)

    def pair(self, params, q_features, k_features):
        return params["temperature"] * jnp.matmul(q_features, k_features.T, precision="highest")


def features_of(score, params, query, key):
    """What a score's `pair` reads of these tokens."""
    return score.project_query(params, query), score.project_key(params, key)


def numpy_params(score, query_dim, key_dim, seed=1):
    """Returns parameters of the score, float32 in NumPy; nothing is compiled for them."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: score.init(jax.random.key(0), query_dim, key_dim))
    return jax.tree.map(
        lambda leaf: np.float32(rng.normal(size=leaf.shape) / (*leaf.shape, 1)[0] ** 0.5), shapes
    )


def _additive(params, q, k):
    query_sum = (q[..., :, None] * params["query_kernel"]).sum(-2)
    key_sum = (k[..., :, None] * params["key_kernel"]).sum(-2)
    return (params["v"] * np.tanh(query_sum + key_sum)).sum(-1)


def _concat(params, q, k):
    query_sum = (q[..., :, None] * params["kernel"][..., : q.shape[-1], :]).sum(-2)
    key_sum = (k[..., :, None] * params["kernel"][..., q.shape[-1] :, :]).sum(-2)
    return (params["v"] * np.tanh(query_sum + key_sum)).sum(-1)


def _cosine(params, q, k):
    cosine = (q * k).sum(-1) / np.sqrt((q * q).sum(-1) * (k * k).sum(-1))
    return np.exp(params["log_scale"]) * cosine


def _distance(params, q, k):
    return -((q - k) ** 2).sum(-1) / (8 * k.shape[-1]) ** 0.5


def _dot(params, q, k):
    return (q * k).sum(-1)


def _general(params, q, k):
    return (q[..., :, None] * params["kernel"] * k[..., None, :]).sum((-2, -1))


def _scaled(params, q, k):
    return (q * k).sum(-1) / k.shape[-1] ** 0.5


def _soft_capped(params, q, k):
    return CAP * np.tanh(_general(params, q, k) / CAP)


def _own_cosine(params, q, k):
    q = (q[..., :, None] * params["projection"]["kernel"]).sum(-2)
    return params["temperature"] * (q * k).sum(-1) / np.sqrt((q * q).sum(-1) * (k * k).sum(-1))


CAP = 1.5  # as large as the logits


@dataclasses.dataclass(frozen=True)
class ScoreCase:
    """A score and what is known of it; a new score joins all properties with one entry."""

    name: str
    score: aj.Score
    logits: Callable  # (params, q [..., Dq], k [..., Dk]) -> logit [...], in NumPy
    params_at_64: int = 0  # numbers in its parameters where Dq = Dk = 64
    mask: str = "combination"  # that it meets as it is, with the mask's own rule for tiles
    made_of_others: bool = False  # its arithmetic is that of other scores: fewer fast tests

    @property
    def pair(self):
        return self.logits

    @property
    def query_dim(self):
        return DK if self.score.needs_equal_dims else DQ


SCORE_CASES = {
    case.name: case
    for case in (
        ScoreCase("additive", aj.Additive(A), _additive, 2193, "padding"),
        ScoreCase("concat", Concat(A), _concat, 2193, "none", made_of_others=True),
        ScoreCase("cosine", Cosine(), _cosine, 1, "dense_shared", made_of_others=True),
        ScoreCase("distance", NegativeSquaredDistance(), _distance, made_of_others=True),
        ScoreCase("dot", aj.Dot(), _dot, mask="local"),
        ScoreCase("general", aj.General(), _general, 4096, "segment"),
        ScoreCase("scaled", aj.ScaledDot(), _scaled),
        ScoreCase(
            "softcap", SoftCap(aj.General(), CAP), _soft_capped, 4096, "dense", made_of_others=True
        ),
        ScoreCase("own", OwnCosine(), _own_cosine, 4097, "causal"),
    )
}
