"""How spread is attention over random keys as their dimension grows, raw and scaled?

Answer:   The entropy of raw dot products goes to 0 as 1/sqrt(d_k) (16 keys: 0.19 nats at d_k =
          256). That of scaled ones is the same at every d_k from 16 on, but half a nat below
          uniform for many keys, instead of close to it.
Source:   chapter 38 ("Attention Variants"), §38.5 and exercise 38.3; day 11, E11.2 and the scaling
          test of §11.7; the notebook's cell "Effect of Scaling Factor".
Command:  .venv/bin/python -m experiments.scores.entropy_vs_dimension   # 2 minutes on 2 CPU cores

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
from d_k = 4 to 256, where the source's curve falls: in nats, and as a share of log T. Each slope
comes from ten independent groups of queries, for the 95 % interval of the difference between the
most keys and the fewest.

`--scores` measures other scores, with fresh parameters for each query; the claims are about dot
("raw") and scaled.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax import attention, attention_weights
from attention_jax.reports import plotting
from attention_jax.scores import get_score
from attention_jax.training.metrics import student_t
from experiments import entropy_limits as limits
from experiments.lab import Claim, Row, ScoreNames, column, main, markdown, where

DAY_11_KEYS, DAY_11_DIM = 10, 512
GROUPS = 10  # independent groups of queries, for the error of a slope
CAPTIONS = {
    "entropy_vs_dimension": "Entropy over d_k and over the number of keys, raw and scaled.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dims: d_k, rising.
        keys: values of T; dimensions are swept for each.
        samples: queries per number, each with keys of its own.
        more_keys: values of T at which the distance from uniform is measured, at d_k = 64.
        seed: seed of all samples.
        scores: scores to compare.
    """

    dims: tuple[int, ...] = tuple(2**n for n in range(13))
    keys: tuple[int, ...] = (16, 64)
    samples: int = 2000
    more_keys: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
    seed: int = 0
    scores: ScoreNames = ("dot", "scaled")


QUICK = Config(dims=(4, 256), samples=200, more_keys=(256,))


def run(config: Config) -> list[Row]:
    """A row for each score, number of keys and dimension."""
    rngs = iter(jax.random.split(jax.random.key(config.seed), 1000))
    points = [("sweep", *point) for point in itertools.product(config.keys, config.dims)]
    points += [("keys", keys, 64) for keys in config.more_keys]
    rows = []
    for part, keys, dim in [*points, ("day 11", DAY_11_KEYS, DAY_11_DIM)]:
        drawn = _samples(config.scores, dim, keys, jax.random.split(next(rngs), config.samples))
        for score in config.scores:
            entropy, largest, day_11 = (np.asarray(each, np.float64) for each in drawn[score])
            low, high = np.quantile(entropy, (0.1, 0.9))
            groups = [group.mean() for group in np.array_split(entropy, GROUPS)]
            row = {"entropy": entropy.mean(), "low": low, "high": high, "groups": groups}
            row |= {"largest": largest.mean(), "nan_in_day_11": np.isnan(day_11).mean()}
            row = jax.tree.map(lambda number: round(float(number), 6), row)
            rows.append({"part": part, "score": score, "keys": keys, "dim": dim, **row})
    return rows


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _samples(scores: tuple[str, ...], dim: int, keys: int, rngs: jax.Array) -> Any:
    """{score: entropy, largest weight, day 11's -(w log w).sum(), [samples] each}."""

    def sample(rng: jax.Array) -> Any:
        query_rng, key_rng = jax.random.split(rng)
        query = jax.random.normal(query_rng, (1, dim))
        key = jax.random.normal(key_rng, (keys, dim))
        measured = {}
        for score in scores:
            params = get_score(score).init(jax.random.fold_in(rng, 0), dim, dim)
            inputs: Any = {"score": score, "params": params}
            _, statistics = attention(query, key, key, **inputs, return_statistics=True)
            weights = attention_weights(query, key, **inputs)
            day_11 = -jnp.sum(weights * jnp.log(weights))  # NaN where a weight underflows to 0
            measured[score] = statistics.entropy[0], weights.max(), day_11
        return measured

    return jax.lax.map(sample, rngs, batch_size=25)  # all keys at once would be gigabytes


def claims(rows: list[Row]) -> list[Claim]:
    """Both curves, compared with the sources and with the limits."""
    sweep = where(rows, part="sweep")
    raw = [row for row in where(sweep, score="dot") if row["dim"] >= 256]
    shares = [row["entropy"] / math.log(row["keys"]) for row in where(raw, dim=256)]
    ratios = [row["entropy"] / limits.raw_entropy_limit(row["dim"], row["keys"]) for row in raw]
    text = "raw: entropy over its limit, mean over T and d_k >= 256"
    found = [
        Claim("raw: entropy at d_k = 256, largest share of log T", max(shares), 0, 0.1, "about 0"),
        Claim(text, float(np.mean(ratios)), 0.81003, 1.18997),
    ]
    uneven = 0.0
    for keys, bound in ((16, 0.0886), (64, 0.0165)):
        flat = [row for row in where(sweep, score="scaled", keys=keys) if row["dim"] >= 16]
        off = max((row["entropy"] - limits.scaled_entropy_limit(keys) for row in flat), key=abs)
        text = f"T = {keys}: scaled entropy minus log T - 1/2 + (1 + e) / 2T, worst of d_k >= 16"
        found.append(Claim(text, off, -bound, bound, f"hugs log T = {math.log(keys):.2f}", True))
        uneven = max(uneven, float(np.ptp(column(flat, "entropy"))) / math.log(keys))
    text = "scaled entropy over d_k >= 16, largest minus smallest, share of log T, worst T"
    found.append(Claim(text, uneven, 0, 0.02, "the same at every d_k"))
    below = [row for row in where(rows, part="keys", score="scaled") if row["keys"] >= 64]
    off = max((limits.scaled_entropy_limit(row["keys"]) - row["entropy"] for row in below), key=abs)
    text = "64 keys and more, d_k = 64: distance of scaled from uniform minus its limit, worst"
    found.append(Claim(text, off, -0.0165, 0.0165))
    for unit in ("nats", "share of log T"):
        mean, half = faster(rows, unit)
        text = f"raw falls faster with more keys, {unit} per doubling of d_k: low end of 95 %"
        found.append(Claim(text, mean - half, 0, source="crashes faster"))
    (day_11,) = where(rows, part="day 11", score="dot")
    missing = (
        math.log(2) * limits.expected_maximum(DAY_11_KEYS) * limits.mean_inverse_norm(DAY_11_DIM)
    )
    text = "day 11, d_k = 512, 10 keys: 1 - largest raw weight, over its limit"
    ratio = (1 - day_11["largest"]) / missing
    return [*found, Claim(text, ratio, 0.700683, 1.29931, "near one-hot")]


def faster(rows: list[Row], unit: str) -> tuple[float, float]:
    """How much faster raw entropy falls with the most keys than with the fewest.

    The fall is the slope of a line from d_k = 4 to 256, per doubling of d_k, with the sign changed.

    Returns:
        Mean, and half of the 95 % interval, of the difference of the falls.
    """
    falls = []
    for keys in sorted(set(column(rows, "keys", part="sweep"))):
        sweep = where(rows, part="sweep", score="dot", keys=keys)
        falling = [row for row in sweep if 4 <= row["dim"] <= 256]
        groups = np.array(column(falling, "groups")) / (1 if unit == "nats" else math.log(keys))
        falls.append(-np.polyfit(np.log2(column(falling, "dim")), groups, 1)[0])
    few, many = falls[0], falls[-1]  # their groups are independent of each other
    error = math.hypot(few.std(ddof=1), many.std(ddof=1)) / math.sqrt(GROUPS)
    return float(many.mean() - few.mean()), student_t(GROUPS - 1) * error


def table(rows: list[Row]) -> str:
    """Mean entropy by number of keys, score and dimension."""
    sweep = where(rows, part="sweep")
    dims = [dim for dim in (1, 16, 64, 256, 1024, 4096) if where(sweep, dim=dim)]
    lines = []
    for keys, score in dict.fromkeys((row["keys"], row["score"]) for row in sweep):
        of_line = where(sweep, keys=keys, score=score)
        entropies = [f"{where(of_line, dim=dim)[0]['entropy']:.3f}" for dim in dims]
        lines.append((keys, f"{math.log(keys):.2f}", score, *entropies))
    head = "keys T", "log T", "entropy in nats of", *(f"d_k = {dim:,}" for dim in dims)
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """Entropy against d_k, its and its distance from uniform against T."""
    counts = sorted(set(column(rows, "keys", part="sweep")))
    scores = list(dict.fromkeys(column(rows, "score")))
    panels = len(counts) + 1
    figure, axes = plotting.new_figure(4.0 * panels - 0.3, 4.4, columns=panels, grid=True)
    for ax, keys in zip(axes, counts, strict=False):
        for score in scores:
            line = where(rows, part="sweep", keys=keys, score=score)
            dims, look = column(line, "dim"), plotting.style_of(plotting.index_of(score, scores))
            ax.plot(dims, column(line, "entropy"), label=score, markersize=5, **look)
            bounds = column(line, "low"), column(line, "high")
            ax.fill_between(dims, *bounds, color=look["color"], alpha=0.2, linewidth=0)
        large = [dim for dim in dims if dim >= 8]
        limit = [limits.raw_entropy_limit(dim, keys) for dim in large]
        ax.plot(large, limit, "k:", label="limit of dot")
        ax.axhline(math.log(keys), color="gray", ls="--", label="uniform: log T")
        ax.set(xlabel="dₖ", ylabel="entropy (nats)", title=f"{keys} keys", ylim=(0, None))
    for score in (score for score in scores if score != "dot"):
        look = plotting.style_of(plotting.index_of(score, scores))
        line = where(rows, part="keys", score=score)
        below = [math.log(row["keys"]) - row["entropy"] for row in line]
        axes[-1].plot(column(line, "keys"), below, label=score, **look)
    many = [keys for keys in column(rows, "keys", part="keys", score=scores[0]) if keys >= 16]
    limit = [math.log(keys) - limits.scaled_entropy_limit(keys) for keys in many]
    axes[-1].plot(many, limit, "k-.", label="1/2 - (1 + e) / 2T")
    axes[-1].set(xlabel="keys T", ylabel="log T - entropy (nats)", ylim=(0, 0.6))
    axes[-1].set_title("below uniform, dₖ = 64")
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.legend(fontsize=9, loc="lower right" if ax is axes[-1] else "center right")
    figure.suptitle("Entropy of attention over random keys (bands: 10 to 90 % of the queries)")
    return {"entropy_vs_dimension": figure}


if __name__ == "__main__":
    main(__name__)
