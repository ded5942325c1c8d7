"""How spread is attention over random keys as their dimension grows, raw and scaled?

Source:   chapter 38 ("Attention Variants"), §38.5 and exercise 38.3; day 11, E11.2 and the scaling
          test of §11.7; the notebook's cell "Effect of Scaling Factor".
Command:  .venv/bin/python experiments/entropy_vs_dimension.py
Time:     3 minutes on 2 CPU cores; 7 beside other work.
Expected: raw entropy falls to about 0 by d_k = 256; scaled entropy hugs log T, 2.77 for T = 16 and
          4.16 for T = 64; raw falls faster for T = 64.

Queries and keys have independent standard normal components. Given the query q, its logits q . k
are then independent normal numbers of variance |q|², which is d_k on average, whatever their law
for other inputs: all that d_k changes is this sigma. Two limits say what must come out.

Scaled, sigma = 1, many keys. Write a_j = e^{l_j} / Z. By the law of large numbers
    log Z -> log T + log E e^l = log T + sigma²/2,    sum_j a_j l_j -> E[l e^l] / E[e^l] = sigma²,
    H = log Z - sum_j a_j l_j -> log T - sigma²/2:
half a nat below uniform, whatever T and d_k. With few keys both means fluctuate; the delta method
to first order in 1/T gives
    E H = log T - sigma²/2 + (1 + (2 sigma² - 1) e^{sigma²}) / (2 T).

Raw, sigma = sqrt(d_k) large. All but the two largest logits are out of the race, and the gap g
between those decides: a = sigmoid(sigma g). Only gaps of the order of 1 / sigma matter, where their
density is what it is at 0, which is m_T, the expected largest of T standard normal numbers (one
integration by parts). With h the entropy of (a, 1 - a), of which the integral over x = sigma g from
0 to infinity is pi²/6, and log 2 that of 1 - a,
    E H -> (pi²/6) m_T E[1/|q|],    1 - E max_j a_j -> log 2 m_T E[1/|q|]:
raw entropy does not crash, it falls as 1 / sqrt(d_k); and as m_T grows with T, more keys keep more
of it.

The heat maps do what the notebook's cell announces; the cell itself divides by sqrt(d_k) in each
of its panels. One draw of 512 components, of which each panel takes the first d_k.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from entropy_limits import (
    expected_maximum,
    mean_inverse_norm,
    raw_entropy_limit,
    scaled_entropy_limit,
    second_order,
)
from experiment import JSON, Expectation, near, run_experiment
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attention_jax import attention, attention_weights
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder

Array = jax.Array

ARMS = {"raw": "dot", "scaled": "scaled"}  # arm -> score
MEASURES = ("entropy", "max_weight")
DAY_11_KEYS, DAY_11_DIM = 10, 512
DRAWN = (1, 16, 64, 256, 512)  # the notebook's, with DRAWN_KEYS queries and keys
DRAWN_KEYS = 4

CAPTIONS = {
    "entropy_vs_dimension": (
        "Entropy of attention over 16 and over 64 random keys against their dimension, from 1 to "
        "4096. Scaled, it stays at one level, 0.4 to 0.5 nats below the logarithm of the number of "
        "keys. Raw, it falls as one over the square root of the dimension. In a third panel the "
        "distance of scaled attention from uniform rises with the number of keys to half a nat."
    ),
    "entropy_vs_dimension_weights": (
        "Mean largest weight against dimension. Raw attention goes from 0.2 (16 keys) and 0.1 (64 "
        "keys) at dimension 1 to 0.98 at 4096; scaled attention stays near one quarter and one "
        "tenth."
    ),
    "entropy_vs_dimension_heatmaps": (
        "Attention weights of four queries over four keys, of dimension 1 to 512. Upper row, raw: "
        "rows become one-hot. Lower row, scaled: they stay spread at every dimension."
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dims: d_k, rising; at least two.
        keys: T, for each of which dimensions are swept.
        samples: pairs of a query and its keys for each number.
        more_keys: T for the distance from uniform, at d_k = `more_keys_dim`.
        more_keys_dim: that dimension.
        seed: of all samples.
        results: folder of the numbers and figures.
    """

    dims: tuple[int, ...] = tuple(2**n for n in range(13))
    keys: tuple[int, ...] = (16, 64)
    samples: int = 2000
    more_keys: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    more_keys_dim: int = 64
    seed: int = 0
    results: Path = Path("experiments/results")

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
        check_folder("results", self.results)


QUICK = Config(dims=(1, 256), keys=(16,), samples=400, more_keys=(256,))


def run(config: Config) -> JSON:
    """Draws and measures."""
    rngs = iter(jax.random.split(jax.random.key(config.seed), 1000))
    sweeps: JSON = {}
    for keys in config.keys:
        by_dim = [_measured(next(rngs), dim, keys, config.samples) for dim in config.dims]
        sweeps[str(keys)] = {
            arm: {
                measure: _columns([found[arm][measure] for found in by_dim]) for measure in MEASURES
            }
            for arm in ARMS
        } | {"nan_in_day_11_formula": [found["nan_in_day_11_formula"] for found in by_dim]}
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
    """Mean, deviation and quantiles over samples, by arm and measure."""
    values = _samples(dim, keys, jax.random.split(rng, samples))
    found: JSON = {
        arm: {measure: _summary(np.asarray(values[arm][measure])) for measure in MEASURES}
        for arm in ARMS
    }
    share = np.isnan(np.asarray(values["day_11_formula"])).mean()
    return found | {"nan_in_day_11_formula": round(float(share), 4)}


def _summary(values: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(values, (0.1, 0.9))
    numbers = {
        "mean": values.mean(dtype=np.float64), "sd": values.std(ddof=1, dtype=np.float64),
        "low": low, "high": high,
    }  # fmt: skip
    return {name: round(float(number), 6) for name, number in numbers.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _samples(dim: int, keys: int, rngs: Array) -> JSON:
    """Entropy and largest weight of one query a sample, [samples] each."""

    def one(rng: Array) -> JSON:
        query_rng, key_rng = jax.random.split(rng)
        query = jax.random.normal(query_rng, (1, dim))
        key = jax.random.normal(key_rng, (keys, dim))
        found: JSON = {}
        for arm, score in ARMS.items():
            _, statistics = attention(query, key, key, score=score, return_statistics=True)
            weights = attention_weights(query, key, score=score)
            found[arm] = {"entropy": statistics.entropy[0], "max_weight": weights.max()}
            if arm == "raw":  # 0 log 0 where a weight is too small for a float
                found["day_11_formula"] = -jnp.sum(weights * jnp.log(weights))
        return found

    # In chunks: all samples at once would be gigabytes of keys. What is left over of the last chunk
    # would be compiled a second time, so there is none if 25 divides the samples.
    return jax.lax.map(one, rngs, batch_size=25)


def _heatmaps(rng: Array) -> JSON:
    query, key = jax.random.normal(rng, (2, DRAWN_KEYS, max(DRAWN)))
    return {
        arm: [
            np.asarray(attention_weights(query[:, :dim], key[:, :dim], score=score))
            .round(4)
            .tolist()
            for dim in DRAWN
        ]
        for arm, score in ARMS.items()
    }


def plot(numbers: JSON) -> dict[str, Figure]:
    """Entropies, largest weights, heat maps."""
    return {
        "entropy_vs_dimension": _entropy_figure(numbers),
        "entropy_vs_dimension_weights": _weights_figure(numbers),
        "entropy_vs_dimension_heatmaps": _heatmap_figure(numbers),
    }


def _entropy_figure(numbers: JSON) -> Figure:
    config = numbers["config"]
    dims, sweeps = config["dims"], numbers["sweeps"]
    panels = len(sweeps) + 1
    figure, axes = plotting.new_figure(4.0 * panels - 0.3, 4.4, columns=panels)
    for ax, (keys, arms) in zip(axes, sweeps.items(), strict=False):
        count = int(keys)
        for index, arm in enumerate(ARMS):
            _band(ax, dims, arms[arm]["entropy"], index, f"{arm}, mean (band: 10 to 90 %)")
        uniform = math.log(count)
        ax.axhline(uniform, color="gray", ls="--", label=f"uniform: log T = {uniform:.2f}")
        beyond = [dim for dim in dims if dim >= 8]
        ax.plot(
            beyond, [raw_entropy_limit(dim, count) for dim in beyond], color="black", ls=":",
            label=r"$(\pi^2/6)\,m_T/\sqrt{d_k}$",
        )  # fmt: skip
        _log_axis(ax, dims)
        ax.set_ylim(-0.05, uniform * 1.55)
        ax.set(xlabel="$d_k$", ylabel="entropy (nats)", title=f"{count} keys")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc="upper right")
    ax, found = axes[-1], numbers["more_keys"]
    counts = config["more_keys"]
    log_keys = np.log(counts)
    color, errors = plotting.COLORS[1], 1.96 * np.array(found["sd"]) / config["samples"] ** 0.5
    ax.errorbar(
        counts, log_keys - found["mean"], errors, color=color, marker=plotting.MARKERS[1],
        markersize=5, label="scaled, mean ± 1.96 standard errors",
    )  # fmt: skip
    ax.plot(
        counts, log_keys - [scaled_entropy_limit(count) for count in counts], "k:",
        label=r"$\frac{1}{2}-(1+e)/(2T)$",
    )  # fmt: skip
    ax.axhline(0.5, color="gray", ls="--", label="1/2")
    _log_axis(ax, counts)
    ax.set_ylim(0, 0.75)
    ax.set(
        xlabel="number of keys T", ylabel="log T - entropy (nats)",
        title="scaled: distance from uniform",
    )  # fmt: skip
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, loc="lower right")
    figure.suptitle("Entropy of attention over random keys, against their dimension")
    return figure


def _weights_figure(numbers: JSON) -> Figure:
    dims, sweeps = numbers["config"]["dims"], numbers["sweeps"]
    figure, axes = plotting.new_figure(4.2 * len(sweeps), 3.9, columns=len(sweeps), sharey=True)
    for ax, (keys, arms) in zip(axes, sweeps.items(), strict=True):
        for index, arm in enumerate(ARMS):
            _band(ax, dims, arms[arm]["max_weight"], index, f"{arm}, mean (band: 10 to 90 %)")
        ax.axhline(1 / int(keys), color="gray", ls="--", label=f"uniform: 1/{keys}")
        _log_axis(ax, dims)
        ax.set_ylim(0, 1.5)
        ax.set_yticks(np.linspace(0, 1, 6))
        ax.set(xlabel="$d_k$", ylabel="largest attention weight", title=f"{keys} keys")
        ax.label_outer()
        ax.grid(alpha=0.3)
        ax.legend(fontsize=9, loc="upper left")
    return figure


def _heatmap_figure(numbers: JSON) -> Figure:
    figure, axes = plotting.new_figure(
        2.1 * len(DRAWN) + 0.8, 4.7, rows=2, columns=len(DRAWN), sharex=True, sharey=True
    )
    ticks = [str(n + 1) for n in range(DRAWN_KEYS)]
    panels = [(arm, n) for arm in ARMS for n in range(len(DRAWN))]
    for ax, (arm, n) in zip(axes, panels, strict=True):
        image = plotting.draw_weights(ax, np.array(numbers["heatmaps"][arm][n]), ticks, ticks)
        ax.set(title=f"{arm}, $d_k$ = {DRAWN[n]}", xlabel="key", ylabel="query")
        ax.label_outer()
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8)
    return figure


def _log_axis(ax: Axes, sizes: list[int]) -> None:
    """Marked at every fourfold."""
    ticks = [4**n for n in range(12) if sizes[0] <= 4**n <= sizes[-1]]
    ax.set_xscale("log")
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.minorticks_off()


def _band(ax: Axes, x: list[int], found: dict[str, list[float]], index: int, label: str) -> None:
    color = plotting.COLORS[index]
    marker = plotting.MARKERS[index]
    ax.plot(x, found["mean"], color=color, marker=marker, markersize=5, label=label)
    ax.fill_between(x, found["low"], found["high"], color=color, alpha=0.2, linewidth=0)


def expectations(numbers: JSON) -> list[Expectation]:
    """Both curves against the sources and against theory."""
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
                "its limit in large d_k, and 4 standard errors; corrections lower it",
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
    """All large dimensions together, whose samples are independent."""
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
