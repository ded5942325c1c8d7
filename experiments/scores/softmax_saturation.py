"""At which scale of the scores does the softmax's gradient peak, and how does it vanish?

Answer:   The chapter's curve peaks at scale 5.86, not near 1, and still has 84 % of its peak at 10.
          For random scores the mean gradient falls as 1/scale, while that of most queries vanishes.
Source:   chapter 38 ("Attention Variants"), §38.3-38.4: the gradient of the largest weight against
          score scale, and softmax curves, raw and scaled, for d_k from 16 to 1024; §38.5: the
          gradient is largest when the distribution is uniform.
Command:  .venv/bin/python -m experiments.scores.softmax_saturation   # 20 seconds on 2 CPU cores

The experiment is about the softmax, and about dot products with and without their factor, so there
is no option --scores.

Why 5.86. The gradient of the largest weight a_m in its row's scores is a_m (e_m - a), of norm
    a_m sqrt((1 - a_m)² + sum_{j != m} a_j²),
which is small where a_m is near 1, and also where it is near 1/T: attention that looks everywhere
moves each single weight only a little. In between it peaks where the largest weight is about one
half. For T scores evenly from -1 to 1, times c, the weights are geometric,
a_m = (1 - r) / (1 - r^T) with r = exp(-2c / (T - 1)), and with r^T neglected the norm is
(1 - r) r sqrt(2 / (1 + r)). Its derivative vanishes where 3 r² + 3 r = 2, r = (sqrt(33) - 3) / 6
= 0.457, whence c = (T - 1)/2 log(1/r) = 5.87 for T = 16, and more for more keys. "Unit variance" is
not scale 1 either: the standard deviation of these scores is sqrt((T + 1) / (3 (T - 1))) = 0.61, so
that they have unit variance at scale 1.63.

One row says little. Scores of random queries and keys are normal; the gap between their two largest
has a density at 0 of m_T, the expected largest of T standard normal numbers. At a large scale c
only rows with a gap of order 1/c have a gradient left, sqrt(2) a (1 - a) with a = sigmoid(c g), so
    mean norm -> m_T / (sqrt(2) c),
no exponential decay: as 1 / sqrt(d_k). The median row does decay exponentially. Saturation takes
the gradient from most rows, and leaves it to the few rows that happen to be undecided.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from attention_jax import attention_weights
from attention_jax.analysis import logit_scale_sweep, softmax_jacobian_norm
from attention_jax.reports import plotting
from experiments.entropy_limits import expected_maximum
from experiments.lab import Claim, Row, column, main, markdown, significant, where

Array = jax.Array

CURVE_KEYS = 10  # T of the softmax curves
NO_GRADIENT = 0.01 * math.sqrt(2) / 4  # 1 % of the largest possible norm
QUANTILES = (0.1, 0.5, 0.9)
CAPTIONS = {
    "softmax_saturation": "Gradient of the largest weight against scale: even and random scores.",
    "softmax_saturation_curves": "Ten weights in falling order: raw ones become one-hot as d_k"
    " grows, scaled ones coincide.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        keys: T of the gradient curves.
        largest_scale: the largest scale of these curves, at least 10.
        scales: number of scales, evenly from 0.1.
        dim: d_k of the random queries and keys.
        samples: random queries, each with keys of its own.
        curve_dims: d_k of the softmax curves, rising.
        seed: seed of all samples.
    """

    keys: int = 16
    largest_scale: float = 20.0
    scales: int = 60
    dim: int = 256
    samples: int = 4096
    curve_dims: tuple[int, ...] = (16, 64, 256, 1024)
    seed: int = 0


QUICK = Config(samples=256, dim=64, curve_dims=(16, 256))


def run(config: Config) -> list[Row]:
    """The chapter's curve, the same for random scores, and softmax curves."""
    rngs = jax.random.split(jax.random.key(config.seed), 1 + len(config.curve_dims))
    scales = np.linspace(0.1, config.largest_scale, config.scales)
    rows = [_even(config.keys, scales), _random(rngs[0], config, scales)]
    for rng, dim in zip(rngs[1:], config.curve_dims, strict=True):
        for arm, drawn in _weights(jax.random.split(rng, config.samples), dim).items():
            falling = -np.sort(-np.asarray(drawn, np.float64), axis=-1)
            numbers = {"mean": falling.mean(0), "jacobian": softmax_jacobian_norm(drawn).mean()}
            numbers["quantiles"] = np.quantile(falling, QUANTILES, axis=0)
            rows.append({"arm": arm, "dim": dim, **significant(numbers)})
    return rows


def _even(keys: int, scales: np.ndarray) -> Row:
    """Norms for evenly spaced scores, and their peak on a finer grid."""
    query, key = jnp.ones((1, 1)), jnp.linspace(-1, 1, keys)[:, None]
    top = jax.nn.one_hot(jnp.array([keys - 1]), keys)
    fine = np.linspace(scales[0], max(scales[-1], 1.2 * even_peak(keys)), 2000)
    sweeps = [
        logit_scale_sweep(query, key, jnp.eye(keys), top, jnp.asarray(at, jnp.float32), score="dot")
        for at in (scales, fine)
    ]
    norm = np.asarray(sweeps[1].gradient_norm, np.float64)
    unit = 1 / np.std(np.linspace(-1, 1, keys))  # the scale at which the scores have variance 1
    at: dict[str, float] = {"1": 1.0, "unit variance": float(unit), "10": 10.0, "20": 20.0}
    numbers = {
        "scales": scales,
        "gradient": sweeps[0].gradient_norm,
        "jacobian": sweeps[0].jacobian_norm,
        "peak_scale": fine[norm.argmax()],
        **{f"at {name}": np.interp(scale, fine, norm) / norm.max() for name, scale in at.items()},
    }
    return {"scores": "even", "keys": keys, **significant(numbers)}


def _random(rng: Array, config: Config, scales: np.ndarray) -> Row:
    """Norms for random scores: scaled dot products times c, or raw ones with d_k = c²."""

    @jax.jit
    def norms(rngs: Array) -> Array:
        def norm_of_sample(rng: Array) -> Array:
            query, key = _drawn(rng, config.dim, config.keys)
            top = jnp.argmax(attention_weights(query, key), axis=-1)
            wanted = jax.nn.one_hot(top, config.keys)
            at = jnp.asarray(scales, jnp.float32)
            return logit_scale_sweep(query, key, jnp.eye(config.keys), wanted, at).gradient_norm

        return jax.lax.map(norm_of_sample, rngs, batch_size=64)

    norm = np.asarray(norms(jax.random.split(rng, config.samples)), np.float64)
    numbers = {"scales": scales, "mean": norm.mean(0)}
    numbers["quantiles"] = np.quantile(norm, QUANTILES, axis=0)
    numbers["without_gradient"] = (norm < NO_GRADIENT).mean(0)
    return {"scores": "random", "keys": config.keys, **significant(numbers)}


@functools.partial(jax.jit, static_argnums=1)
def _weights(rngs: Array, dim: int) -> dict[str, Array]:
    """{arm: weights of one query per sample, [samples, keys]}."""

    def weights_of_sample(rng: Array) -> dict[str, Array]:
        query, key = _drawn(rng, dim, CURVE_KEYS)
        arms = {"raw": "dot", "scaled": "scaled"}
        return {arm: attention_weights(query, key, score=s)[0] for arm, s in arms.items()}

    return jax.lax.map(weights_of_sample, rngs, batch_size=64)


def _drawn(rng: Array, dim: int, keys: int) -> tuple[Array, Array]:
    query_rng, key_rng = jax.random.split(rng)
    return jax.random.normal(query_rng, (1, dim)), jax.random.normal(key_rng, (keys, dim))


def even_norm(keys: int, scale: float) -> float:
    """Returns the norm for evenly spaced scores, from sums of geometric series."""
    r = math.exp(-2 * scale / (keys - 1))
    top = (1 - r) / (1 - r**keys)
    others = top**2 * r**2 * (1 - r ** (2 * (keys - 1))) / (1 - r**2)
    return top * math.sqrt((1 - top) ** 2 + others)


def even_peak(keys: int) -> float:
    """Returns the scale of the peak for evenly spaced scores, with r^T neglected."""
    return (keys - 1) / 2 * math.log(6 / (math.sqrt(33) - 3))


def claims(rows: list[Row]) -> list[Claim]:
    """The true shape of the source's curve, and its claims for random scores."""
    even, random = where(rows, scores="even")[0], where(rows, scores="random")[0]
    mean, median = np.array(random["mean"]), random["quantiles"][1]
    scales, keys = np.array(random["scales"]), even["keys"]
    peak, peak_norm = even_peak(keys), even_norm(keys, even_peak(keys))
    found = []
    text = "even scores: scale at which the gradient of the largest weight peaks"
    bounds = peak - 0.02995, peak + 0.02995
    found.append(Claim(text, even["peak_scale"], *bounds, "near 1 (unit variance)", True))
    for scale, words in ((1, "at its peak"), (10, "near zero"), (20, "near zero")):
        share = even_norm(keys, scale) / peak_norm
        text = f"even scores: gradient at scale {scale}, share of the peak"
        found.append(Claim(text, even[f"at {scale}"], share - 1e-3, share + 1e-3, words, True))
    jacobian = max(even["jacobian"]) / even["jacobian"][0]
    text = "even scores: largest norm of the Jacobian over that of uniform weights"
    found.append(Claim(text, jacobian, 1.1, math.inf, "1: largest when uniform", True))
    at_ten = mean[np.abs(scales - 10).argmin()] / mean.max()
    text = "random scores: mean gradient at scale 10, share of the largest"
    found.append(Claim(text, at_ten, 0.389638, 0.667362, "near zero", True))
    ratio = mean[-1] * math.sqrt(2) * scales[-1] / expected_maximum(keys)
    text = f"random scores: mean gradient at scale {scales[-1]:g} over its limit, m_T / (√2 c)"
    found.append(Claim(text, ratio, 0.796209, 1.20379))
    text = f"random scores: median over mean gradient at scale {scales[-1]:g}"
    found.append(Claim(text, median[-1] / mean[-1], 0, 0.1, "near zero"))
    tops = [row["mean"][0] for row in where(rows, arm="scaled")]
    off = max(abs(top - tops[-1]) for top in tops)
    text = "scaled: largest weight, largest difference from that at the largest d_k"
    return [*found, Claim(text, off, 0, 0.01156, "all curves overlap")]


def table(rows: list[Row]) -> str:
    """Largest of ten random weights, and norm of the softmax's Jacobian, by d_k."""
    lines, measures = [], ("largest weight", "norm of the Jacobian")
    for dim in dict.fromkeys(column(rows, "dim")):
        raw, scaled = where(rows, dim=dim)
        weights = [f"{row['mean'][0]:.3f}" for row in (raw, scaled)]
        lines.append([dim, *weights, *(f"{row['jacobian']:.3f}" for row in (raw, scaled))])
    head = ["d_k", *(f"{what}, {arm}" for what in measures for arm in ("raw", "scaled"))]
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The gradient norms and the softmax curves."""
    even, random = where(rows, scores="even")[0], where(rows, scores="random")[0]
    scales, peak = even["scales"], even["peak_scale"]
    color, other_color, median_color = plotting.COLORS[4:]  # of no score
    figure, (left, right) = plotting.new_figure(11, 4.5, columns=2, grid=True, sharey=True)
    left.plot(scales, even["gradient"], color=color, label="norm for the largest weight")
    left.plot(scales, even["jacobian"], "--", color=other_color, label="norm of the whole Jacobian")
    marks = {peak: f"{peak:.1f}: peak", 1: "1: the chapter's peak", 10: '10: its "near zero"'}
    for at in (at for at in marks if at <= scales[-1]):
        height = np.interp(at, scales, even["gradient"])
        left.plot(at, height, "o", color=color)
        beside = {"xytext": (8, 4 if at >= peak else -10), "textcoords": "offset points"}
        left.annotate(marks[at], (at, height), **beside)
    left.set_title(f"{even['keys']} scores evenly from -1 to 1, times the scale")
    left.set(xlabel="scale c of the scores", ylabel="norm of the gradient in the scores")
    low, median, high = random["quantiles"]
    label = "10 to 90 % of the queries"
    right.fill_between(scales, low, high, color=color, alpha=0.2, linewidth=0, label=label)
    right.plot(scales, random["mean"], color=color, label="mean")
    right.plot(scales, median, color=median_color, ls="--", label="median")
    limit = expected_maximum(random["keys"]) / math.sqrt(2)
    tail = [scale for scale in scales if limit / scale < 0.3]
    label = "limit of the mean, m_T / (√2 c)"
    right.plot(tail, [limit / c for c in tail], ":", color=other_color, lw=2.5, label=label)
    right.set_title(f"random queries, {random['keys']} keys each")
    right.set_xlabel("scale c, the scores' standard deviation: √dₖ of raw dot products")
    curves, axes = plotting.new_figure(10, 4.2, columns=2, grid=True, sharey=True)
    for ax, arm in zip(axes, ("raw", "scaled"), strict=True):
        of_arm = where(rows, arm=arm)
        colors = colormaps["viridis"](np.linspace(0, 0.88, len(of_arm)))
        for index, row in enumerate(of_arm):
            look = {"marker": "o", "ms": 11 - 2.5 * index, "label": f"dₖ = {row['dim']}"}  # nested
            ax.plot(range(1, CURVE_KEYS + 1), row["mean"], color=colors[index], **look)
        ax.set(xlabel="key, by falling weight", title=f"{arm} dot products", ylim=(0, 1.05))
    axes[0].set_ylabel("attention weight")
    curves.suptitle(f"Attention over {CURVE_KEYS} random keys, means over the queries")
    for ax in (left, right, *axes):
        ax.legend(fontsize=9, loc="upper right")
    left.set_ylim(0, 0.6)
    return {"softmax_saturation": figure, "softmax_saturation_curves": curves}


if __name__ == "__main__":
    main(__name__)
