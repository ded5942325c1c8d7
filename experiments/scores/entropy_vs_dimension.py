"""How spread is attention over random keys as their dimension grows, raw and scaled?

Source:   chapter 38 ("Attention Variants"), §38.5 and exercise 38.3; day 11, E11.2 and the scaling
          test of §11.7; the notebook's cell "Effect of Scaling Factor".
Command:  .venv/bin/python -m experiments.scores.entropy_vs_dimension
Time:     3 minutes on 2 CPU cores; 7 beside other work.
Expected: raw entropy falls to about 0 by d_k = 256; scaled entropy hugs log T, 2.77 for T = 16 and
          4.16 for T = 64; raw falls faster for T = 64.

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
raw entropy does not collapse, it falls as 1 / sqrt(d_k); and since m_T grows with T, more keys keep
more of it.

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
from experiments.experiment import JSON, Expectation, near, run_experiment
from experiments.scores.entropy_vs_dimension_figures import CAPTIONS, DRAWN, DRAWN_KEYS, plot

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array

ARMS = {"raw": "dot", "scaled": "scaled"}  # arm -> score
MEASURES = ("entropy", "max_weight")
DAY_11_KEYS, DAY_11_DIM = 10, 512


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
    """

    dims: tuple[int, ...] = tuple(2**n for n in range(13))
    keys: tuple[int, ...] = (16, 64)
    samples: int = 2000
    more_keys: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    more_keys_dim: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.dims) < 2 or list(self.dims) != sorted(set(self.dims)) or self.dims[0] < 1:
            raise ValueError(f"dims must be at least two, rising from 1 or more; got {self.dims}")
        for name in ("keys", "more_keys"):
            sizes = getattr(self, name)
            if not sizes or min(sizes) < 2:
                raise ValueError(f"{name} must be at least one number of 2 or more; got {sizes}")
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2; got {self.samples}")
        if self.more_keys_dim < 1:
            raise ValueError(f"more_keys_dim must be at least 1; got {self.more_keys_dim}")


QUICK = Config(dims=(1, 256), keys=(16,), samples=400, more_keys=(256,))


def run(config: Config) -> JSON:
    """Draws queries and keys, and measures their entropy and largest weight."""
    rngs = iter(jax.random.split(jax.random.key(config.seed), 1000))
    sweeps: JSON = {}
    for keys in config.keys:
        by_dim = [_measured(next(rngs), dim, keys, config.samples) for dim in config.dims]
        sweeps[str(keys)] = {
            arm: {
                measure: _columns([measured[arm][measure] for measured in by_dim])
                for measure in MEASURES
            }
            for arm in ARMS
        } | {"nan_in_day_11_formula": [numbers["nan_in_day_11_formula"] for numbers in by_dim]}
    distances = [
        _measured(next(rngs), config.more_keys_dim, keys, config.samples)["scaled"]["entropy"]
        for keys in config.more_keys
    ]
    return {
        "sweeps": sweeps,
        "more_keys": _columns(distances),
        "day_11": _measured(next(rngs), DAY_11_DIM, DAY_11_KEYS, config.samples),
        "heatmaps": _heatmaps(next(rngs)),
    }


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def _measured(rng: Array, dim: int, keys: int, samples: int) -> JSON:
    """Returns mean, deviation and quantiles over samples, by arm and measure."""
    values = _samples(dim, keys, jax.random.split(rng, samples))
    numbers: JSON = {
        arm: {measure: _summary(np.asarray(values[arm][measure])) for measure in MEASURES}
        for arm in ARMS
    }
    share = np.isnan(np.asarray(values["day_11_formula"])).mean()
    return numbers | {"nan_in_day_11_formula": round(float(share), 4)}


def _summary(values: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(values, (0.1, 0.9))
    numbers = {
        "mean": values.mean(dtype=np.float64), "sd": values.std(ddof=1, dtype=np.float64),
        "low": low, "high": high,
    }  # fmt: skip
    return {name: round(float(number), 6) for name, number in numbers.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _samples(dim: int, keys: int, rngs: Array) -> JSON:
    """Entropy and largest weight of one query per sample, [samples] each."""

    def sample(rng: Array) -> JSON:
        query_rng, key_rng = jax.random.split(rng)
        query = jax.random.normal(query_rng, (1, dim))
        key = jax.random.normal(key_rng, (keys, dim))
        measures: JSON = {}
        for arm, score in ARMS.items():
            _, statistics = attention(query, key, key, score=score, return_statistics=True)
            weights = attention_weights(query, key, score=score)
            measures[arm] = {"entropy": statistics.entropy[0], "max_weight": weights.max()}
            if arm == "raw":  # NaN, from 0 log 0, where a weight underflows to 0
                measures["day_11_formula"] = -jnp.sum(weights * jnp.log(weights))
        return measures

    # In chunks: all samples at once would be gigabytes of keys. A smaller last chunk would be
    # compiled separately; there is none if 25 divides the samples.
    return jax.lax.map(sample, rngs, batch_size=25)


def _heatmaps(rng: Array) -> JSON:
    query, key = np.asarray(jax.random.normal(rng, (2, DRAWN_KEYS, max(DRAWN))))
    return {
        arm: [
            np.asarray(attention_weights(query[:, :dim], key[:, :dim], score=score))
            .round(4)
            .tolist()
            for dim in DRAWN
        ]
        for arm, score in ARMS.items()
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """Both curves, compared with the sources and with theory."""
    config, checks = numbers["config"], []
    dims, root = config["dims"], config["samples"] ** 0.5
    for keys, arms in numbers["sweeps"].items():
        count, uniform = int(keys), math.log(int(keys))
        raw, scaled = arms["raw"]["entropy"], arms["scaled"]["entropy"]
        last, errors = dims[-1], 4 * raw["sd"][-1] / root
        limit = raw_entropy_limit(last, count)
        checks.append(
            Expectation(
                f"T = {count}: raw entropy at d_k = {last}, share of log T", "goes to 0",
                raw["mean"][-1] / uniform, 0, (limit + errors) / uniform,
                "the limit for large d_k, and 4 standard errors; corrections lower it",
            )
        )  # fmt: skip
        checks.append(
            near(
                f"T = {count}: raw entropy at d_k = {last} / ((π²/6) m_T E[1/|q|])", "",
                raw["mean"][-1] / limit, 1, errors / limit + 2 / last**0.5,
                "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
            )
        )  # fmt: skip
        expected = scaled_entropy_limit(count)
        for dim, mean, deviation in zip(dims, scaled["mean"], scaled["sd"], strict=True):
            if dim < 16:
                continue
            checks.append(
                near(
                    f"T = {count}: scaled entropy at d_k = {dim}",
                    f"hugs log T = {uniform:.2f}", mean, expected,
                    4 * deviation / root + second_order(count) + 1 / (2 * dim),
                    "4 standard errors; next orders of 1/T and 1/d_k",
                )
            )  # fmt: skip
    distances = numbers["more_keys"]
    for count, mean, deviation in zip(
        config["more_keys"], distances["mean"], distances["sd"], strict=True
    ):
        if count >= 64:
            checks.append(
                near(
                    f"T = {count}: log T - scaled entropy", "", math.log(count) - mean,
                    0.5 - (1 + math.e) / (2 * count),
                    4 * deviation / root + second_order(count) + 1 / (2 * config["more_keys_dim"]),
                    "4 standard errors; next orders of 1/T and 1/d_k",
                )
            )  # fmt: skip
    checks.append(_power_law(numbers))
    day_11 = numbers["day_11"]
    missing = 1 - day_11["raw"]["max_weight"]["mean"]
    limit = math.log(2) * expected_maximum(DAY_11_KEYS) * mean_inverse_norm(DAY_11_DIM)
    errors = 4 * day_11["raw"]["max_weight"]["sd"] / root
    checks.append(
        near(
            "day 11, d_k = 512, 10 keys: 1 - largest raw weight, over its limit",
            "near one-hot", missing / limit, 1, errors / limit + 2 / DAY_11_DIM**0.5,
            "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
        )
    )  # fmt: skip
    return checks


def _power_law(numbers: JSON) -> Expectation:
    """The limit of raw entropy, over all large dimensions together; samples are independent."""
    config, smallest = numbers["config"], 256
    ratios, errors = [], []
    for keys, arms in numbers["sweeps"].items():
        raw = arms["raw"]["entropy"]
        for dim, mean, deviation in zip(config["dims"], raw["mean"], raw["sd"], strict=True):
            if dim >= smallest:
                limit = raw_entropy_limit(dim, int(keys)) * config["samples"] ** 0.5
                ratios.append(mean / raw_entropy_limit(dim, int(keys)))
                errors.append(deviation / limit)
    # Errors of a mean of n: the root of the sum of their squares, over n.
    sampling = 4 * math.hypot(*errors) / len(errors)
    return near(
        f"raw entropy / ((π²/6) m_T E[1/|q|]), mean over all T and d_k >= {smallest}", "",
        float(np.mean(ratios)), 1, sampling + 2 / smallest**0.5,
        "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
    )  # fmt: skip


if __name__ == "__main__":
    run_experiment(__name__)
