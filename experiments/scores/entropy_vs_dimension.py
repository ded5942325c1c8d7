"""How spread is attention over random keys as their dimension grows, raw and scaled?

Source:   chapter 38 ("Attention Variants"), §38.5 and exercise 38.3; day 11, E11.2 and the scaling
          test of §11.7; the notebook's cell "Effect of Scaling Factor".
Command:  .venv/bin/python -m experiments.scores.entropy_vs_dimension
Time:     3 minutes on 2 CPU cores; 7 beside other work.
Expected: by the source, raw entropy crashes to about 0 by d_k = 256, scaled entropy hugs log T,
          2.77 for T = 16 and 4.16 for T = 64, and raw entropy crashes faster for T = 64. By the
          limits below, scaled entropy stays half a nat below log T.

Queries and keys have independent standard normal components. Given the query q, its logits q . k
are then independent normal numbers of variance |q|², which is d_k on average. All that d_k changes
is their deviation sigma. Two limits predict the results.

Scaled, sigma = 1, many keys. Write a_j = e^{l_j} / Z. By the law of large numbers
    log Z -> log T + log E e^l = log T + sigma²/2,    sum_j a_j l_j -> E[l e^l] / E[e^l] = sigma²,
    H = log Z - sum_j a_j l_j -> log T - sigma²/2:
half a nat below uniform, whatever T and d_k. With few keys both means fluctuate; the delta method
to first order in 1/T gives
    E H = log T - sigma²/2 + (1 + (2 sigma² - 1) e^{sigma²}) / (2 T).

Raw, sigma = sqrt(d_k) large. Only the two largest logits have weight, and the gap g between them
decides how it is divided: a = sigmoid(sigma g). Only gaps of the order of 1 / sigma matter, where
their density is that at 0, which is m_T, the expected largest of T standard normal numbers
(integrate by parts). Let h be the entropy of (a, 1 - a). Over x = sigma g from 0 to infinity the
integral of h is pi²/6, and that of 1 - a is log 2, so that
    E H -> (pi²/6) m_T E[1/|q|],    1 - E max_j a_j -> log 2 m_T E[1/|q|]:
raw entropy falls as 1 / sqrt(d_k), and since m_T grows with T, more keys keep more of it.

"Crashes faster" (exercise 38.3) is measured as the slope of entropy against log2 d_k, a line fitted
from d_k = 4 to 256, where the source's curve falls: in nats, and as a share of log T. Each number
is computed from ten independent groups of queries, and the claim is that the 95 % interval of the
difference between T = 64 and T = 16 lies above 0. At large d_k both fall as 1 / sqrt(d_k), by the
limit: there no number of keys is faster than another.

`--scores` measures other scores, with fresh parameters for each query; the claims are about dot
("raw") and scaled.

The heat maps show what the notebook's cell announces; the cell itself divides by sqrt(d_k) in each
of its panels. All panels use one draw of 512 components, of which each takes the first d_k.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import attention, attention_weights
from experiments.entropy_limits import (
    expected_maximum,
    mean_inverse_norm,
    raw_entropy_limit,
    scaled_entropy_limit,
    second_order,
)
from experiments.experiment import JSON, Expectation, ScoreNames, near, rounded, run_experiment
from experiments.scores.chosen_scores import check_scores, fresh_params
from experiments.scores.entropy_vs_dimension_figures import CAPTIONS, DRAWN, DRAWN_KEYS, plot
from experiments.scores.entropy_vs_dimension_report import DAY_11_DIM, DAY_11_KEYS, report
from experiments.scores.entropy_vs_dimension_slopes import GROUPS, slope_expectations

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

MEASURES = ("entropy", "max_weight")
LARGE_DIM = 256  # from which the limit of raw entropy is compared over all dimensions together
CRASHED_DIM, CRASHED_SHARE = 256, 0.1  # "~0 entropy by d_k = 256": at most a tenth of log T


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dims: d_k, rising; at least two.
        keys: values of T; dimensions are swept for each.
        samples: queries per number, each with keys of its own.
        more_keys: values of T at which the distance from uniform is measured.
        more_keys_dim: d_k there.
        seed: seed of all samples.
        scores: scores to compare.
    """

    dims: tuple[int, ...] = tuple(2**n for n in range(13))
    keys: tuple[int, ...] = (16, 64)
    samples: int = 2000
    more_keys: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    more_keys_dim: int = 64
    seed: int = 0
    scores: ScoreNames = ("dot", "scaled")

    def __post_init__(self) -> None:
        if len(self.dims) < 2 or list(self.dims) != sorted(set(self.dims)) or self.dims[0] < 1:
            raise ValueError(f"dims must be at least two, rising from 1 or more; got {self.dims}")
        for name in ("keys", "more_keys"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 2:
                raise ValueError(f"{name} must be at least one number of 2 or more; got {sizes}")
        if self.samples < 2 * GROUPS:
            raise ValueError(f"samples must be at least {2 * GROUPS}; got {self.samples}")
        if self.more_keys_dim < 1:
            raise ValueError(f"more_keys_dim must be at least 1; got {self.more_keys_dim}")
        check_scores(self.scores, self.dims[0], self.dims[-1])


QUICK = Config(dims=(1, 256), keys=(16,), samples=400, more_keys=(256,))


def run(config: Config) -> JSON:
    """Draws queries and keys, and measures their entropy and largest weight."""
    rngs = iter(jax.random.split(jax.random.key(config.seed), 1000))
    sweeps: JSON = {}
    for keys in config.keys:
        by_dim = [_measured(next(rngs), config, dim, keys) for dim in config.dims]
        sweeps[str(keys)] = {
            score: {
                **{
                    measure: _columns([measured[score][measure] for measured in by_dim])
                    for measure in MEASURES
                },
                "entropy_by_group": [measured[score]["entropy_by_group"] for measured in by_dim],
            }
            for score in config.scores
        }
    by_keys = [
        _measured(next(rngs), config, config.more_keys_dim, keys) for keys in config.more_keys
    ]
    day_11 = _measured(next(rngs), config, DAY_11_DIM, DAY_11_KEYS)
    return {
        "sweeps": sweeps,
        "more_keys": {
            score: _columns([measured[score]["entropy"] for measured in by_keys])
            for score in config.scores
        },
        "day_11": {
            score: {
                name: day_11[score][name] for name in ("entropy", "max_weight", "nan_in_formula")
            }
            for score in config.scores
        },
        "heatmaps": _heatmaps(next(rngs), config.scores),
    }


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _measured(rng: Array, config: Config, dim: int, keys: int) -> JSON:
    """Returns mean, deviation and quantiles over samples, by score and measure."""
    drawn = jax.device_get(
        _samples(config.scores, dim, keys, jax.random.split(rng, config.samples))
    )
    numbers: JSON = {}
    for score, values in drawn.items():
        groups = np.array_split(values["entropy"].astype(np.float64), GROUPS)
        numbers[score] = {measure: _summary(values[measure]) for measure in MEASURES} | {
            "entropy_by_group": [rounded(group.mean()) for group in groups],
            "nan_in_formula": rounded(np.isnan(values["day_11_formula"]).mean(), 4),
        }
    return numbers


def _summary(values: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(values, (0.1, 0.9))
    numbers = {
        "mean": values.mean(dtype=np.float64), "sd": values.std(ddof=1, dtype=np.float64),
        "low": low, "high": high,
    }  # fmt: skip
    return {name: round(float(number), 6) for name, number in numbers.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _samples(scores: tuple[str, ...], dim: int, keys: int, rngs: Array) -> JSON:
    """Entropy and largest weight of one query per sample, [samples] each, by score."""

    def sample(rng: Array) -> JSON:
        query_rng, key_rng = jax.random.split(rng)
        query = jax.random.normal(query_rng, (1, dim))
        key = jax.random.normal(key_rng, (keys, dim))
        measures: JSON = {}
        for score in scores:
            params = fresh_params(score, jax.random.fold_in(rng, 0), dim)
            _, statistics = attention(
                query, key, key, score=score, params=params, return_statistics=True
            )
            weights = attention_weights(query, key, score=score, params=params)
            measures[score] = {
                "entropy": statistics.entropy[0],
                "max_weight": weights.max(),
                # NaN, from 0 log 0, where a weight underflows to 0
                "day_11_formula": -jnp.sum(weights * jnp.log(weights)),
            }
        return measures

    # In chunks: all samples at once would be gigabytes of keys. A smaller last chunk would be
    # compiled separately; there is none if 25 divides the samples.
    return jax.lax.map(sample, rngs, batch_size=25)


def _heatmaps(rng: Array, scores: tuple[str, ...]) -> JSON:
    query, key = np.asarray(jax.random.normal(rng, (2, DRAWN_KEYS, max(DRAWN))))
    return {
        score: [
            rounded(
                attention_weights(
                    query[:, :dim],
                    key[:, :dim],
                    score=score,
                    params=fresh_params(score, jax.random.fold_in(rng, dim), dim),
                ),
                3,
            )
            for dim in DRAWN
        ]
        for score in scores
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """Both curves, compared with the sources and with theory."""
    config, checks = numbers["config"], []
    for keys, by_score in numbers["sweeps"].items():
        if "dot" in by_score:
            checks += _raw_expectations(config, int(keys), by_score["dot"]["entropy"])
        if "scaled" in by_score:
            checks += _scaled_expectations(config, int(keys), by_score["scaled"]["entropy"])
    if "scaled" in numbers["more_keys"]:
        checks += _more_keys_expectations(config, numbers["more_keys"]["scaled"])
    if "dot" in numbers["day_11"]:
        checks += [*slope_expectations(numbers), _day_11(numbers)]
        if config["dims"][-1] >= LARGE_DIM:
            checks.append(_power_law(numbers))
    return checks


def _raw_expectations(config: JSON, keys: int, raw: JSON) -> list[Expectation]:
    last, uniform = config["dims"][-1], math.log(keys)
    errors = 4 * raw["sd"][-1] / config["samples"] ** 0.5
    limit = raw_entropy_limit(last, keys)
    checks = [
        Expectation(
            f"T = {keys}: raw entropy at d_k = {last}, share of log T", "goes to 0",
            raw["mean"][-1] / uniform, 0, (limit + errors) / uniform,
            "the limit for large d_k, and 4 standard errors; corrections lower it",
        ),
        near(
            f"T = {keys}: raw entropy at d_k = {last} / ((π²/6) m_T E[1/|q|])", "",
            raw["mean"][-1] / limit, 1, errors / limit + 2 / last**0.5,
            "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
        ),
    ]  # fmt: skip
    if CRASHED_DIM in config["dims"]:
        share = raw["mean"][config["dims"].index(CRASHED_DIM)] / uniform
        checks.append(
            Expectation(
                f"T = {keys}: raw entropy at d_k = {CRASHED_DIM}, share of log T", "about 0",
                share, 0, CRASHED_SHARE, "about 0 is read as at most a tenth",
            )
        )  # fmt: skip
    return checks


def _scaled_expectations(config: JSON, keys: int, scaled: JSON) -> list[Expectation]:
    expected, uniform = scaled_entropy_limit(keys), math.log(keys)
    large = [
        (dim, mean, deviation)
        for dim, mean, deviation in zip(config["dims"], scaled["mean"], scaled["sd"], strict=True)
        if dim >= 16
    ]
    checks = [
        near(
            f"T = {keys}: scaled entropy at d_k = {dim}",
            f"hugs log T = {uniform:.2f}", mean, expected,
            4 * deviation / config["samples"] ** 0.5 + second_order(keys) + 1 / (2 * dim),
            "4 standard errors; next orders of 1/T and 1/d_k", contradicts=True,
        )
        for dim, mean, deviation in large
    ]  # fmt: skip
    if len(large) > 1:
        means = [mean for _, mean, _ in large]
        checks.append(
            Expectation(
                f"T = {keys}: scaled entropy, largest minus smallest over d_k >= 16, in log T",
                "the same at every d_k", (max(means) - min(means)) / uniform, 0, 0.02,
                "2 % of log T; sampling and the next order of 1/d_k",
            )
        )  # fmt: skip
    return checks


def _more_keys_expectations(config: JSON, distances: JSON) -> list[Expectation]:
    checks = []
    for count, mean, deviation in zip(
        config["more_keys"], distances["mean"], distances["sd"], strict=True
    ):
        if count >= 64:
            checks.append(
                near(
                    f"T = {count}: log T - scaled entropy", "", math.log(count) - mean,
                    0.5 - (1 + math.e) / (2 * count),
                    4 * deviation / config["samples"] ** 0.5 + second_order(count)
                    + 1 / (2 * config["more_keys_dim"]),
                    "4 standard errors; next orders of 1/T and 1/d_k",
                )
            )  # fmt: skip
    return checks


def _day_11(numbers: JSON) -> Expectation:
    weight = numbers["day_11"]["dot"]["max_weight"]
    missing = 1 - weight["mean"]
    limit = math.log(2) * expected_maximum(DAY_11_KEYS) * mean_inverse_norm(DAY_11_DIM)
    errors = 4 * weight["sd"] / numbers["config"]["samples"] ** 0.5
    return near(
        "day 11, d_k = 512, 10 keys: 1 - largest raw weight, over its limit",
        "near one-hot", missing / limit, 1, errors / limit + 2 / DAY_11_DIM**0.5,
        "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
    )  # fmt: skip


def _power_law(numbers: JSON) -> Expectation:
    """The limit of raw entropy, over all large dimensions together; samples are independent."""
    config = numbers["config"]
    ratios, errors = [], []
    for keys, by_score in numbers["sweeps"].items():
        raw = by_score["dot"]["entropy"]
        for dim, mean, deviation in zip(config["dims"], raw["mean"], raw["sd"], strict=True):
            if dim >= LARGE_DIM:
                limit = raw_entropy_limit(dim, int(keys)) * config["samples"] ** 0.5
                ratios.append(mean / raw_entropy_limit(dim, int(keys)))
                errors.append(deviation / limit)
    # Errors of a mean of n: the root of the sum of their squares, over n.
    sampling = 4 * math.hypot(*errors) / len(errors)
    return near(
        f"raw entropy / ((π²/6) m_T E[1/|q|]), mean over all T and d_k >= {LARGE_DIM}", "",
        float(np.mean(ratios)), 1, sampling + 2 / LARGE_DIM**0.5,
        "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
    )  # fmt: skip


if __name__ == "__main__":
    run_experiment(__name__)
