"""How large are logits, and what do scaling, means and normalisation of the tokens change?

Answer:   Dot products of D features have the standard deviation √D (32.06 at D = 1024), and scaled
          ones 1. Means of the features raise the variance as exercise 38.2 says, but a mean of the
          keys changes nothing that the softmax sees.
Source:   chapter 38 ("Attention Variants"), §38.3 and exercise 38.2; day 11, §11.4; the
          walkthrough, step 2 (heat maps before and after scaling).
Command:  .venv/bin/python -m experiments.scores.score_variance   # 1 minute on 2 CPU cores

With means ms, mh and variances ss, sh of the features of query and key, logits s . h / sqrt(D) have
the variance ss sh + ss mh² + sh ms² (exercise 38.2, divided by D). The softmax sees only the part
that lies within a row, over the keys of one query. A term that is the same for all keys cancels,
and only sh (ss + ms²) remains: a mean of the keys has no effect, and a mean of the queries sharpens
every row. Dividing tokens by their root mean square bounds the variance for any means, but then a
mean of the keys flattens rows, most of all if the queries' mean points the same way. LayerNorm,
which also subtracts each token's own mean, gives D / (D - 1) times the variance of tokens without
means, if all features share their mean; it does not remove a different mean for each feature.

All of this is about dot and scaled, so there is no option --scores.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax import SCORES, attention_weights
from attention_jax.analysis import logit_variance
from attention_jax.reports import plotting
from experiments.lab import Claim, Row, column, main, markdown, significant, spread, where
from experiments.torch_random import TorchRandom

Array = jax.Array

# §38.3: D -> the printed standard deviation of 10,000 draws, which continue those of §38.1.
PRINTED = {4: 1.98, 16: 4.05, 64: 7.87, 256: 16.00, 1024: 31.99}
CASE_DIM, ROW_LENGTH = 64, 64  # of the cases with means
# Mean and standard deviation of the query's features, and of the key's; None stands for a different
# mean for each feature, drawn from N(0, 1).
CASES: dict[str, tuple[float | None, float, float | None, float]] = {
    "no means": (0, 1, 0, 1),
    "query mean 1": (1, 1, 0, 1),
    "key mean 1": (0, 1, 1, 1),
    "both means 1": (1, 1, 1, 1),
    "query mean 2, key mean -1, key sd 1/2": (2, 1, -1, 0.5),
    "each feature its own mean": (None, 1, None, 1),
}
NORMALISATIONS: dict[str, Callable[[Array], Array]] = {
    "tokens as they are": lambda tokens: tokens,
    "root mean square 1": lambda x: x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True)),
    "LayerNorm": functools.partial(jax.nn.standardize, axis=-1),
}
PRODUCTS = {name: functools.partial(SCORES[name], {}) for name in ("dot", "scaled")}
COLORS = (*plotting.COLORS[4:6], "#999999")  # of no score
CAPTIONS = {
    "score_variance_heatmaps": "Logits and weights of 12 tokens, before and after scaling.",
    "score_variance_means": "Variance of scaled logits where queries or keys have a mean: over all"
    " pairs both raise it; within a row, which the softmax sees, a mean of the keys does not.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dims: values of D for the dot products.
        samples: pairs of a query and a key per draw.
        draws: number of repetitions.
    """

    dims: tuple[int, ...] = tuple(PRINTED)
    samples: int = 10_000
    draws: int = 20


QUICK = Config(dims=(4, 16), samples=2000, draws=8)


def run(config: Config) -> list[Row]:
    """Samples logits and measures their variance."""
    rows = source_deviations(max(config.dims))
    for dim in config.dims:
        rngs = jax.random.split(jax.random.key(dim), config.draws)
        for name, drawn in _deviations(config.samples, dim, rngs).items():
            rows.append({"product": name, "dim": dim, "deviations": significant(drawn)})
    query, key = jax.random.normal(jax.random.key(7), (2, 12, 64))
    for name, product in PRODUCTS.items():
        tables = {"logits": product(query, key)}
        tables["weights"] = attention_weights(query, key, score=name)
        rows.append({"map": name, **significant(tables)})
    for index, name in enumerate(CASES):
        rows += _case(config, jax.random.key(index), name)
    return rows


def source_deviations(largest: int) -> list[Row]:
    """The standard deviation of §38.3's own dot products, up to the largest D."""
    random, rows = TorchRandom(11), []
    for shape in ((4, 4), (4, 8), (4,)):  # of §38.1
        random.randn(*shape)
    for dim in (dim for dim in PRINTED if dim <= largest):
        logits = _of_pairs("dot", random.randn(10_000, dim), random.randn(10_000, dim))
        rows.append({"source": True, "dim": dim, "deviation": significant(logits.std(ddof=1))})
    return rows


def _of_pairs(product: str, query: Any, key: Any) -> Array:
    """Logits [n] of each query [n, D] with its own key."""
    return jax.vmap(PRODUCTS[product])(query[:, None], key[:, None])[:, 0, 0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _deviations(samples: int, dim: int, rngs: Array) -> dict[str, Array]:
    def draw(rng: Array) -> dict[str, Array]:
        query, key = jax.random.normal(rng, (2, samples, dim))
        return {name: _of_pairs(name, query, key).std(ddof=1) for name in PRODUCTS}

    return jax.lax.map(draw, rngs)


def _case(config: Config, rng: Array, name: str) -> list[Row]:
    """Variances of scaled logits for one choice of means, per draw and by formula."""
    rng, *mean_rngs = jax.random.split(rng, 3)
    means = [
        jax.random.normal(mean_rng, (CASE_DIM,)) if mean is None else mean * jnp.ones(CASE_DIM)
        for mean_rng, mean in zip(mean_rngs, CASES[name][::2], strict=True)
    ]
    deviations = CASES[name][1::2]
    drawn = _case_variances(config.samples, jax.random.split(rng, config.draws), means, deviations)
    rows = []
    for tokens in NORMALISATIONS:
        formula = variances_by_formula(np.array(means, np.float64), deviations, tokens)
        measured = {"pairs, row": significant(drawn[tokens]), "formula": significant(formula)}
        rows.append({"means": name, "tokens": tokens, **measured})
    return rows


@functools.partial(jax.jit, static_argnums=0)
def _case_variances(samples: int, rngs: Array, means: Any, deviations: Any) -> dict[str, Any]:
    """{normalisation: variances over all pairs and within a row, [2, draws]}."""
    rows = samples // ROW_LENGTH

    def tokens(rng: Array, *counts: int) -> list[Array]:
        drawn = zip(jax.random.split(rng), counts, means, deviations, strict=True)
        return [mean[None] + sd * jax.random.normal(r, (n, CASE_DIM)) for r, n, mean, sd in drawn]

    def draw(rng: Array) -> dict[str, Any]:
        pair_rng, row_rng = jax.random.split(rng)
        pairs = tokens(pair_rng, samples, samples)
        query, key = tokens(row_rng, rows, rows * ROW_LENGTH)
        variances = {}
        for name, normalised in NORMALISATIONS.items():
            of_row = normalised(key).reshape(rows, ROW_LENGTH, CASE_DIM)
            logits = jax.vmap(PRODUCTS["scaled"])(normalised(query)[:, None], of_row)
            over_pairs = _of_pairs("scaled", *map(normalised, pairs)).var(ddof=1)
            variances[name] = jnp.stack([over_pairs, _row_variance(logits)])
        return variances

    return jax.tree.map(jnp.transpose, jax.lax.map(draw, rngs))


def _row_variance(logits: Array) -> Array:
    """Mean over rows of the unbiased variance over keys."""
    length = logits.shape[-1]
    return logit_variance(logits, per_row=True).mean() * length / (length - 1)


def variances_by_formula(
    means: Any, deviations: tuple[float, float], normalisation: str
) -> tuple[float, float]:
    """Returns the variance of q . k / sqrt(D) over all pairs and within a row.

    Tokens divided by their root mean square have features of mean square 1, in the limit of large
    D; the means contribute the shares a (query) and b (key). Across the direction of the mean their
    variance is 1 - a. Along it the variance is smaller, since the length no longer varies:

        (1 - a) ((1 - a)² + a (1 - a) / 2) = (1 - a)² (1 - a / 2),

    where the last 1 / 2 is the variance of the length of a vector from N(0, 1).

    Args:
        means: of the query's and of the key's features, [D] each.
        deviations: of the query's and of the key's features.
        normalisation: one of `NORMALISATIONS`.
    """
    if normalisation == "LayerNorm":
        means = [mean - mean.mean() for mean in means]
    squares = [np.mean(mean**2) for mean in means]
    query_variance, key_variance = (deviation**2 for deviation in deviations)
    if normalisation == "tokens as they are":
        row = key_variance * (query_variance + squares[0])
        return row + query_variance * squares[1], row
    a = squares[0] / (squares[0] + query_variance)
    b = squares[1] / (squares[1] + key_variance)
    aligned = 0.0  # cos² of the angle between the means
    if a > 0 and b > 0:
        aligned = np.mean(means[0] * means[1]) ** 2 / (squares[0] * squares[1])

    def along_the_other_mean(share: float) -> float:
        return (1 - share) * (aligned * (1 - share) * (1 - share / 2) + 1 - aligned)

    row = (1 - a) * (1 - b) + a * along_the_other_mean(b)
    return row + b * along_the_other_mean(a), row


def claims(rows: list[Row]) -> list[Claim]:
    """The sources' numbers and formulas, and ours."""
    draws = [(row["deviation"], row["dim"]) for row in where(rows, source=True)]
    printed = max(abs(deviation - PRINTED[dim]) for deviation, dim in draws)
    of_source = max(abs(deviation / math.sqrt(dim) - 1) for deviation, dim in draws)
    dots = where(rows, product="dot")
    of_dot = max(abs(float(np.mean(row["deviations"])) / math.sqrt(row["dim"]) - 1) for row in dots)
    cases = where(rows, "means")
    off = np.array([np.mean(row["pairs, row"], axis=1) / row["formula"] for row in cases]) - 1
    plain = np.arange(len(off)) % len(NORMALISATIONS) == 0  # tokens as they are
    (pairs, within_rows), normalised = abs(off[plain]).max(axis=0), abs(off[~plain]).max()
    words, within = "within a percent of √D", "largest difference from its formula, as a share"
    return [
        Claim("the source's draws: largest difference from the printed", printed, 0, 0.0051, "0"),
        Claim(
            "the source's draws: largest difference from √D", of_source, 0.01, math.inf, words, True
        ),
        Claim("deviation of dot: largest difference from √D", of_dot, 0, 0.0063, "√D"),
        Claim(f"exercise 38.2: {within}", float(pairs), 0, 0.02, "0"),
        Claim(f"within rows, tokens as they are: {within}", float(within_rows), 0, 0.02),
        Claim(f"normalised tokens: {within}", float(normalised), 0, 0.0247),
    ]


def table(rows: list[Row]) -> str:
    """Deviations by D, and variances by means."""
    head = ["D", "deviation of dot products", "of scaled ones", "of the source's own dot products"]
    lines = []
    for dot, scaled in zip(where(rows, product="dot"), where(rows, product="scaled"), strict=True):
        source = [f"{x:.4g}" for x in column(rows, "deviation", dim=dot["dim"])] or [""]
        ours = (spread(row["deviations"]) for row in (dot, scaled))
        lines.append([dot["dim"], *ours, *source])
    by_dim = markdown(head, lines)
    head, lines = ["variance of scaled logits over pairs / within a row", "by formula"], []
    for name in CASES:
        cases = where(rows, means=name)
        numbers = [cases[0]["formula"], *(np.mean(row["pairs, row"], axis=1) for row in cases)]
        lines.append([name, *("{:.2f} / {:.2f}".format(*each) for each in numbers)])
    return f"{by_dim}\n\n{markdown([*head, *NORMALISATIONS], lines)}"


def plot(rows: list[Row]) -> dict[str, Figure]:
    """Heat maps, and variances by means."""
    return {"score_variance_heatmaps": _maps(rows), "score_variance_means": _means(rows)}


def _maps(rows: list[Row]) -> Figure:
    figure, axes = plotting.new_figure(8.4, 7.6, rows=2, columns=2)
    limit = np.abs(where(rows, map="dot")[0]["logits"]).max()
    for place, (name, when) in enumerate({"dot": "before", "scaled": "after"}.items()):
        (row,) = where(rows, map=name)
        logits, weights = np.array(row["logits"]), np.array(row["weights"])
        top, bottom = axes[place], axes[2 + place]
        image = top.imshow(logits, cmap="RdBu_r", vmin=-limit, vmax=limit)
        weight_image = bottom.imshow(weights, cmap="viridis", vmin=0, vmax=1)
        top.set_title(f"logits {when} scaling\nvariance {logits.var():.2f}")
        largest = weights.max(axis=1).mean()
        bottom.set_title(f"weights {when} scaling\nlargest of a row: {largest:.2f} on average")
    for ax in axes:
        ax.set(xlabel="key", ylabel="query", xticks=range(0, 12, 2), yticks=range(0, 12, 2))
    figure.colorbar(image, ax=axes[:2], label="logit", shrink=0.9)
    figure.colorbar(weight_image, ax=axes[2:], label="attention weight", shrink=0.9)
    figure.suptitle("Unit-variance queries and keys of 64 features")
    return figure


def _means(rows: list[Row]) -> Figure:
    """Of the two cases that tell the means of queries and keys apart; the table has all."""
    names = ["query mean 1", "key mean 1"]
    figure, axes = plotting.new_figure(8.4, 3.8, columns=2, sharey=True)
    for place, (ax, title) in enumerate(zip(axes, ("over all pairs", "within a row"), strict=True)):
        for index, (tokens, color) in enumerate(zip(NORMALISATIONS, COLORS, strict=True)):
            cases = [where(rows, tokens=tokens, means=name)[0] for name in names]
            x = np.arange(len(cases)) + 0.26 * (index - 1)
            heights = [np.mean(row["pairs, row"][place]) for row in cases]
            ax.bar(x, heights, 0.24, color=color, label=tokens)
            label = "formula" if index == 2 else None
            ax.plot(x, [row["formula"][place] for row in cases], "k_", ms=13, mew=2, label=label)
        ax.axhline(1, color="black", linestyle=":", zorder=0, label="no means")
        ax.set(title=f"variance of the logits {title}", xticks=range(len(names)))
        ax.set_xticklabels(names)
        ax.grid(alpha=0.3, axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    main(__name__)
