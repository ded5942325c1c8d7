"""The scores of the suite in conformance.py, each with its formula for one pair in NumPy.

For the complex step, arrays may be complex and may have a leading axis of perturbations.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.scores import Concat, Cosine, NegativeSquaredDistance, SoftCap, literature

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


def _without_key_part(pair):
    return lambda params, q, k: pair(params, q, k) - pair(params, 0 * q, k)


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


# --- scores of the literature; real parts decide where a formula has branches ---


def _squared(x):
    return (x * x).sum(-1)


def _projected(x, kernel):
    return (x[..., :, None] * kernel).sum(-2)


def _relu(x):
    return x * (x.real > 0)


def _log_square(x):
    return np.log(x * x + 1e-12)


def _elliptical(params, q, k):
    return -(np.exp(params["log_m"]) * (q - k) ** 2).sum(-1) / k.shape[-1] ** 0.5


def _hyperbolic(params, q, k):
    z = np.sqrt((1 + _squared(q)) * (1 + _squared(k))) - _dot(params, q, k) + 1e-12
    return -np.exp(params["log_beta"]) * np.log(z + np.sqrt(z * z - 1))


def _indexer(params, q, k):
    queries = _projected(q, params["query_kernel"])
    heads = params["weight_kernel"].shape[-1]
    queries = queries.reshape(*queries.shape[:-1], heads, k.shape[-1])
    products = (queries * _projected(k, params["key_kernel"])[..., None, :]).sum(-1)
    return (_projected(q, params["weight_kernel"]) * _relu(products)).sum(-1)


def _l2(params, q, k):
    return -_squared(q - k) / k.shape[-1] ** 0.5


def _manhattan(params, q, k):
    return -((q - k) * np.sign((q - k).real)).sum(-1) / k.shape[-1] ** 0.5


def _neural(params, q, k):
    hidden = _projected(q, params["query_kernel"]) + _projected(k, params["key_kernel"])
    return (params["v"] * _relu(hidden + params["bias"])).sum(-1)


def _multiplied(params, q, k):
    return -0.7 * _without_key_part(_neural)(params, q, k)


def _ngpt(params, q, k):
    lengths = np.sqrt(_squared(q) * _squared(k))
    return k.shape[-1] ** 0.5 * (params["s"] ** 2 * q * k).sum(-1) / lengths


def _power(params, q, k):
    return _log_square(_dot(params, q, k))


def _softplus(params, q, k):
    return np.log(np.log(1 + np.exp(_scaled(params, q, k))))


def _tropical(params, q, k):
    def largest(x):
        return np.take_along_axis(x, x.real.argmax(-1)[..., None], axis=-1)[..., 0]

    return -largest(q - k) - largest(k - q)


def _yat(params, q, k):
    return _log_square(_dot(params, q, k)) - np.log(_squared(q - k) + 1e-5)


CAP = 1.5  # as large as the logits
NO_KEY_PART = literature.Neural(A, key_part=False)


@dataclasses.dataclass(frozen=True)
class ScoreCase:
    """A score and what is known of it; a new score joins all properties with one entry."""

    name: str
    score: aj.Score
    pair: Callable  # (params, q [..., Dq], k [..., Dk]) -> logit [...], in NumPy
    mask: str = "combination"  # that it meets as it is, with the mask's own rule for tiles

    @property
    def query_dim(self):
        return DK if self.score.needs_equal_dims else DQ


SCORE_CASES = {
    case.name: case
    for case in (
        ScoreCase("additive", aj.Additive(A), _additive, mask="padding"),
        ScoreCase("concat", Concat(A), _concat, mask="none"),
        ScoreCase("cosine", Cosine(), _cosine, mask="dense_shared"),
        ScoreCase("distance", NegativeSquaredDistance(), _distance),
        ScoreCase("dot", aj.Dot(), _dot, mask="local"),
        ScoreCase("general", aj.General(), _general, mask="segment"),
        ScoreCase("scaled", aj.ScaledDot(), _scaled),
        ScoreCase("softcap", SoftCap(aj.General(), CAP), _soft_capped, mask="dense"),
        ScoreCase("own", OwnCosine(), _own_cosine, mask="causal"),
        ScoreCase("no_key_part", aj.Additive(A, key_part=False), _without_key_part(_additive)),
        ScoreCase("elliptical", literature.Elliptical(), _elliptical),
        ScoreCase("hyperbolic", literature.Hyperbolic(), _hyperbolic, mask="causal"),
        ScoreCase("indexer", literature.Indexer(), _indexer, mask="padding"),
        ScoreCase("l2", literature.L2(), _l2, mask="local"),
        ScoreCase("manhattan", literature.Manhattan(), _manhattan, mask="segment"),
        ScoreCase("multiplied", aj.Multiplied(NO_KEY_PART, -0.7), _multiplied),
        ScoreCase("neural", literature.Neural(A), _neural, mask="dense"),
        ScoreCase("ngpt", literature.NGPT(), _ngpt, mask="padding"),
        ScoreCase("power", literature.Power(), _power, mask="causal"),
        ScoreCase("softplus", literature.Softplus(), _softplus, mask="arrays"),
        ScoreCase("tropical", literature.Tropical(), _tropical, mask="segment"),
        ScoreCase("yat", literature.Yat(), _yat, mask="none"),
    )
}
# Without those that have no rule of their own: JAX differentiates their `pair`.
CORE_SCORES = [name for name in SCORE_CASES if name not in (*literature.LITERATURE, "multiplied")]


def slow_unless(fast, cases):
    """The cases as parameters of a test, which is slow for those that are not in `fast`."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.slow] * (case not in fast),
        )
        for case in cases
    ]


def each_score(names=tuple(SCORE_CASES), fast=CORE_SCORES):
    """The names as parameters of a test, slow for all others than `fast`."""
    return slow_unless(fast, names)
