"""Scores from the literature by name, with the constants of their papers.

Each one changes the logit alone. Where a paper also changes the normaliser, the values or the
layers around attention, the docstring says so: the paper's claims are about the whole.
"""

from attention_jax.scores.additive import Neural
from attention_jax.scores.contract import Score
from attention_jax.scores.cosine import NGPT
from attention_jax.scores.differences import Hyperbolic, Manhattan, Tropical, Yat
from attention_jax.scores.distance import L2, Elliptical
from attention_jax.scores.indexer import Indexer
from attention_jax.scores.wrapped import Power, Softplus

LITERATURE: dict[str, Score] = {
    "elliptical": Elliptical(),
    "hyperbolic": Hyperbolic(),
    "indexer": Indexer(),
    "l2": L2(),
    "manhattan": Manhattan(),
    "neural": Neural(),
    "ngpt": NGPT(),
    "power": Power(),
    "softplus": Softplus(),
    "tropical": Tropical(),
    "yat": Yat(),
}
