"""What does each step from token ids to context vectors look like, and how large are its numbers?

Source:   walkthrough ("Scaled Dot-Product Attention"): tokens, embedding, Q, K, V, compatibility,
          scale, softmax, context.
Command:  .venv/bin/python -m experiments.scores.qkv_walkthrough
Time:     15 seconds on 2 CPU cores.
Expected: with the source's random numbers, variances of Q 34.12, K 26.70, compatibility 25801.72,
          scaled 806.30, as printed. With projections of variance 1 / D: 1 after scaling.

11 token ids (9 occurs twice) become vectors of 32 features, which are projected without a bias. The
experiment reproduces the source's numbers, which show three of its choices:

- Its softmax is over dim 0. Then columns sum to 1, that is, the weights of all queries on one key,
  and a context is no weighted mean of values: rows sum to anything from 0 to 5, and 7 of the 11
  queries get nothing. The source's text says "for each row", which is right, and is drawn here.
- Its projections have entries of variance 1, so that Q and K have variance D and not 1. Dividing by
  sqrt(D) then leaves a variance of D^2, 1024 on average over draws, and rows of weights are nearly
  one-hot. The factor turns queries and keys of unit variance into logits of variance 1; projections
  preserve unit variance if their entries have variance 1 / D.
- It seeds twice with 42: the first 32 embeddings are the query projection, number for number.

Without positions, equal tokens have equal rows in all steps, whatever stands between them.

The walkthrough is about scaled dot products, step by step: there is no choice of scores. Shapes,
sums of weights and equal rows hold by construction and are tested, not claimed.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import SCORES, attention, masked_softmax
from attention_jax.analysis import attention_summary
from experiments.experiment import JSON, Expectation, near, rounded, run_experiment
from experiments.scores.qkv_walkthrough_figures import CAPTIONS, plot
from experiments.scores.qkv_walkthrough_report import report
from experiments.setting_checks import check_least
from experiments.torch_random import TorchRandom

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

TOKEN_IDS = (0, 5, 4, 9, 7, 2, 9, 10, 1, 6, 3)
DIM, SOURCE_SEED = 32, 42
PRINTED = {"Q": 34.12, "K": 26.70, "compatibility": 25801.72, "scaled": 806.30}
STEPS = ("embedding", "Q", "K", "V", "compatibility", "scaled", "weights", "context")

_rounded = functools.partial(rounded, decimals=4)

# Recipe -> variance of the entries of its three projections.
RECIPES = {"source": 1.0, "ours": 1.0 / DIM}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        draws: random embeddings and projections per recipe.
    """

    draws: int = 1000

    def __post_init__(self) -> None:
        check_least(self, draws=2)


QUICK = Config(draws=100)


def run(config: Config) -> JSON:
    """Computes the steps of two single draws, and the variances of many draws."""
    of_source = jax.device_get(steps(*source_arrays()))
    rng = jax.random.key(0)
    return {
        "token_ids": list(TOKEN_IDS),
        "source": _described(of_source),
        "ours": _described(jax.device_get(steps(*fresh_arrays(rng, RECIPES["ours"])))),
        "source_reuses": _source_reuses(),
        "axis": _both_axes(of_source),
        "draws": {
            recipe: _many(jax.random.fold_in(rng, index), variance, config.draws)
            for index, (recipe, variance) in enumerate(RECIPES.items())
        },
    }


def source_arrays() -> tuple[Array, Array]:
    """Returns the source's own embeddings of the tokens [S, D] and projections [3, D, D]."""
    embedding = TorchRandom(SOURCE_SEED).randn(2000, DIM)
    projections = TorchRandom(SOURCE_SEED)
    return jnp.asarray(embedding[list(TOKEN_IDS)]), jnp.asarray(
        np.stack([projections.randn(DIM, DIM) for _ in range(3)])
    )


def _source_reuses() -> float:
    """Largest difference between the source's embeddings and rows of its query projection."""
    embedding, (query_projection, _, _) = jax.device_get(source_arrays())
    return float(np.abs(embedding - query_projection[list(TOKEN_IDS)]).max())


@jax.jit
def fresh_arrays(rng: Array, variance: float | Array) -> tuple[Array, Array]:
    """Returns new embeddings and projections, whose entries have the given variance."""
    embedding_rng, projection_rng = jax.random.split(rng)
    embedding = jax.random.normal(embedding_rng, (max(TOKEN_IDS) + 1, DIM))
    projections = variance**0.5 * jax.random.normal(projection_rng, (3, DIM, DIM))
    return embedding[jnp.array(TOKEN_IDS)], projections


@jax.jit
def steps(tokens: Array, projections: Array) -> dict[str, Array]:
    """Returns the result of each step for tokens [S, D] and projections [3, D, D]."""
    query, key, value = (tokens @ projection for projection in projections)
    scaled = SCORES["scaled"]({}, query, key)
    return {
        "embedding": tokens,
        "Q": query,
        "K": key,
        "V": value,
        "compatibility": SCORES["dot"]({}, query, key),
        "scaled": scaled,
        "weights": masked_softmax(scaled),
        "context": attention(query, key, value),
    }


def _described(arrays: dict[str, np.ndarray]) -> JSON:
    summary = jax.jit(attention_summary)(arrays["weights"])
    return {
        "steps": {
            name: {
                "shape": list(arrays[name].shape),
                "variance": _rounded(arrays[name].var(ddof=1)),  # as torch.var
                "values": np.asarray(arrays[name], np.float64).round(3).tolist(),
            }
            for name in STEPS
        },
        "largest_weight": _rounded(summary.largest_weight),
        "entropy": _rounded(summary.entropy),
    }


def _both_axes(arrays: dict[str, np.ndarray]) -> JSON:
    """The softmax over each axis, its sums, and its share of contexts outside of the values."""
    tables = {}
    for name, axis in (("source", 0), ("ours", 1)):
        weights = np.asarray(masked_softmax(jnp.asarray(arrays["scaled"]), axis=axis))
        context = weights @ arrays["V"]
        low, high = arrays["V"].min(axis=0), arrays["V"].max(axis=0)
        outside = (context < low[None] - 1e-3) | (context > high[None] + 1e-3)
        tables[name] = {
            "weights": np.asarray(weights, np.float64).round(3).tolist(),
            "row_sums": _rounded(weights.sum(axis=1)),
            "column_sums": _rounded(weights.sum(axis=0)),
            "outside_values": _rounded(outside.mean()),
        }
    return tables


def _many(rng: Array, variance: float, draws: int) -> JSON:
    """Variance at each step, entropy and largest weight, over draws."""
    arrays = _draws(jax.random.split(rng, draws), variance)
    drawn = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
    return {
        name: {
            "mean": _rounded(values.mean()),
            "standard_error": _rounded(values.std(ddof=1) / math.sqrt(draws)),
            "quantiles": _rounded(np.quantile(values, (0.025, 0.5, 0.975))),
        }
        for name, values in drawn.items()
    }


@jax.jit
def _draws(rngs: Array, variance: Array) -> dict[str, Array]:
    def draw(rng: Array) -> dict[str, Array]:
        arrays = steps(*fresh_arrays(rng, variance))
        summary = attention_summary(arrays["weights"])
        return {
            **{name: array.var(ddof=1) for name, array in arrays.items()},
            "entropy": summary.entropy,
            "largest_weight": summary.largest_weight,
        }

    return jax.vmap(draw)(rngs)


def expected_variances(entry_variance: float) -> dict[str, float]:
    """Returns the expected variance of each step up to scaling, if all tokens were different."""
    projected = DIM * entry_variance
    return {
        "embedding": 1.0,
        "Q": projected,
        "K": projected,
        "V": projected,
        "compatibility": DIM * projected**2,
        "scaled": projected**2,
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """The printed variances, the sums of rows, and the expected variances."""
    checks = [
        near(
            f"variance of {name} in the source's draw", f"{printed:.2f}",
            numbers["source"]["steps"][name]["variance"], printed, max(0.0051, 2e-6 * printed),
            "half of the last digit printed, and float32 rounding",
        )
        for name, printed in PRINTED.items()
    ]  # fmt: skip
    spread = np.ptp(numbers["axis"]["source"]["row_sums"])
    claim = "rows of the source's softmax do not sum to 1: largest sum minus smallest"
    tolerance = "a softmax of columns"
    checks.append(
        Expectation(claim, "sum is 1", spread, 0.5, math.inf, tolerance, contradicts=True)
    )
    claim = "largest difference between the source's embeddings and its query projection"
    checks.append(near(claim, "", numbers["source_reuses"], 0, 0, "the same random numbers"))
    for recipe, entry_variance in RECIPES.items():
        for name, expected in expected_variances(entry_variance).items():
            drawn = numbers["draws"][recipe][name]
            # Two of the 11 tokens are the same: rows, and pairs, are not independent.
            within = 4 * drawn["standard_error"] + 0.05 * expected
            claim = f"mean variance of {name} over draws ({recipe})"
            tolerance = "4 standard errors and 5 %"
            checks.append(near(claim, "", drawn["mean"], expected, within, tolerance))
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
