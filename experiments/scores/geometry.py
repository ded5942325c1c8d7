"""Which queries and keys make attention uniform, which one-hot, and what gradient is left?

Answer:   Long keys make dot, scaled and general one-hot, and then only a query halfway between two
          keys has a gradient left (norm 1/2). Additive with fresh parameters does not become
          one-hot: its largest weight levels off at 0.37.
Source:   topic 7: identical keys and orthogonal queries flatten attention, orthogonal keys with a
          peaked similarity make it nearly one-hot; watch the gradient when the softmax saturates.
Command:  .venv/bin/python -m experiments.scores.geometry   # 25 seconds on 2 CPU cores

Tokens have D features and, at key scale 1, length sqrt(D), as tokens of unit variance do. With S
orthogonal keys, c times as long, and the query along the first, the first logit is larger than the
others by g = c D (dot) or c sqrt(D) (scaled; general with a rotation W / sqrt(D)), and

    weight of the first = 1 / (1 + (S - 1) e^-g).

The norm of the softmax's Jacobian, the share of a gradient that the softmax passes back, then falls
as e^-g. Additive attention cannot be saturated in this way: |e| <= sum_a |v_a| whatever the keys
are, and with ever longer keys its weights tend to those of v . sign(Wk k). Its softmax goes on to
pass gradients, but its tanh is saturated and lets none through. Scores with parameters have fresh
ones; the bands are over draws of parameters and keys.

Saturated attention still learns where two keys tie: between two long keys, at 45 degrees, the
Jacobian has its largest norm, 1 / 2.

`--scores` measures other scores. The angle is measured for scaled dot alone. What holds by
construction is tested and not claimed: identical keys have weight 1 / S with every score, the
formula above, and that gradients stay finite where attention is saturated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from attention_jax import attention_weights
from attention_jax.analysis import softmax_jacobian_norm
from attention_jax.reports import plotting
from attention_jax.scores import get_score
from experiments import lab
from experiments.lab import Claim, Row, ScoreNames, column, markdown, significant, where

Array = jax.Array

ONE_HOT = {"dot": 1.0, "scaled": 1.0, "general": 0.99}  # the least weight of long keys
CAPTIONS = {
    "geometry_angle": "A query turns from one key to another: long keys switch at 45 degrees.",
    "geometry_scale": "Orthogonal keys grow: all scores but additive become one-hot. Lines are the"
    " means over draws that the table has; a few draws can hold a mean above its band.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dim: D.
        source_length: S, at most D - 1, so that one direction is orthogonal to all S keys.
        scales: number of key scales c in the sweep, from 0.01 to 1000.
        angle_scales: key scales of the sweep over angles.
        angles: number of angles from 0 to 90 degrees, odd so that 45 is among them.
        draws: random sets of keys, queries and parameters.
        scores: scores to compare.
    """

    dim: int = 32
    source_length: int = 16
    scales: int = 61
    angle_scales: tuple[float, ...] = (0.1, 0.5, 2.0, 10.0)
    angles: int = 91
    draws: int = 200
    scores: ScoreNames = ("dot", "scaled", "general", "additive")

    def __post_init__(self) -> None:
        if not 2 <= self.source_length < self.dim:
            raise ValueError(f"source_length must be from 2 to dim - 1; got {self.source_length}")


QUICK = Config(dim=13, source_length=7, scales=11, angles=5, draws=10)


def run(config: Config) -> list[Row]:
    """A row for each score: over key scales; a row for each key scale: over angles."""
    _, basis_rng, param_rng = jax.random.split(jax.random.key(0), 3)
    normal = jax.random.normal(basis_rng, (config.draws, config.dim, config.dim))
    bases = jnp.linalg.qr(normal)[0].mT * math.sqrt(config.dim)
    param_rngs = jax.random.split(param_rng, config.draws)
    keys, scales = bases[:, : config.source_length], jnp.logspace(-2, 3, config.scales)
    rows: list[Row] = []
    for name in config.scores:
        init = functools.partial(get_score(name).init, query_dim=config.dim, key_dim=config.dim)
        params = jax.vmap(init)(param_rngs)
        orthogonal = bases[:, config.source_length :][:, :1]
        weights = attention_weights(orthogonal, keys, score=name, params=params)
        from_uniform = jnp.abs(weights - 1 / config.source_length).max(axis=-1).mean()
        row = {"score": name, "from_uniform": significant(from_uniform)}
        row |= scale_sweep(name, params, keys, scales)
        if name == "additive":
            row["limit"] = significant(additive_limit(params, keys))
        rows.append(row)
    return rows + angle_sweep(keys[0], config)


def scale_sweep(name: str, params: Any, keys: Array, scales: Array) -> Row:
    """Largest weight and Jacobian norm where each query lies along the first of longer keys."""

    @jax.jit
    def measure(params: Any, keys: Array) -> tuple[Array, Array]:
        longer = scales[:, None, None, None] * keys[None]
        query = jnp.broadcast_to(keys[:, :1], (len(scales), *keys[:, :1].shape))
        weights = attention_weights(query, longer, score=name, params=params)[:, :, 0]
        return weights.max(axis=-1), softmax_jacobian_norm(weights)

    row: Row = {"scales": significant(scales)}
    for what, array in zip(("weight", "jacobian"), measure(params, keys), strict=True):
        numbers = np.asarray(array, np.float64)
        row[what] = significant(numbers.mean(axis=1))
        row[f"{what} quantiles"] = significant(np.quantile(numbers, (0.025, 0.5, 0.975), axis=1))
    return row


def additive_limit(params: Any, keys: Array) -> float:
    """Returns the mean largest weight of additive attention for infinitely long keys."""
    signs = np.sign(np.asarray(keys) @ np.asarray(params["key_kernel"]))
    exponentials = np.exp((signs @ np.asarray(params["v"])[..., None])[..., 0])
    return float((exponentials.max(axis=-1) / exponentials.sum(axis=-1)).mean())


def angle_sweep(key: Array, config: Config) -> list[Row]:
    """Weights of scaled dot attention while the query turns from the first key to the second."""
    degrees = np.linspace(0, 90, config.angles)
    angles = jnp.asarray(np.radians(degrees), jnp.float32)[:, None]
    query, rows = jnp.cos(angles) * key[:1] + jnp.sin(angles) * key[1:2], []
    for scale in config.angle_scales:
        weights = attention_weights(query, scale * key)
        curves = {"degrees": degrees, "first": weights[:, 0], "second": weights[:, 1]}
        curves["jacobian"] = softmax_jacobian_norm(weights)
        rows.append({"angle_scale": scale, **significant(curves)})
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """Where topic 7's words hold, and where they do not."""
    longest = {row["score"]: row["weight"][-1] for row in where(rows, "score")}
    (additive,), (turned,) = where(rows, score="additive"), where(rows, angle_scale=10.0)
    norm = turned["jacobian"][len(turned["jacobian"]) // 2]
    flat = "additive, query orthogonal to the keys: largest difference from uniform"
    limit, words = additive["limit"], "nearly one-hot"
    infinite = f"additive, longest keys: largest weight minus {limit:.2f}, of infinite keys"
    text = "longest keys: largest weight, mean over draws"
    return [
        *(Claim(f"{x}, {text}", longest[x], ONE_HOT[x], 1 + 1e-6, words) for x in ONE_HOT),
        Claim(flat, additive["from_uniform"], 0.03125, math.inf, "flat", True),
        Claim(infinite, longest["additive"] - limit, -0.01, 0.01, words, True),
        Claim("key scale 10, 45 degrees: norm of the Jacobian", norm, 0.4999, 0.5001),
    ]


def table(rows: list[Row]) -> str:
    """Largest weight and gradient by score, for keys of unit variance and for the longest."""
    of_scores = where(rows, "score")
    scales = np.array(of_scores[0]["scales"])
    unit, last = int(np.abs(scales - 1).argmin()), len(scales) - 1
    head = ["score"]
    for what in ("largest weight", "norm of the Jacobian"):
        head += [f"{what}, key scale {scales[place]:,.0f}" for place in (unit, last)]
    lines = []
    for row in of_scores:
        weights = [f"{row['weight'][column]:.3f}" for column in (unit, last)]
        norms = [f"{row['jacobian'][column]:.2g}" for column in (unit, last)]
        lines.append([row["score"], *weights, *norms, f"{row['from_uniform']:.1g}"])
    return markdown([*head, "query orthogonal to all keys: largest difference from 1 / S"], lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The sweep over angles, and that over key scales."""
    angles, (top, bottom) = plotting.new_figure(8, 6.8, rows=2, grid=True, sharex=True)
    turning = where(rows, "angle_scale")
    colors = colormaps["viridis"](np.linspace(0, 0.88, len(turning)))
    for color, row in zip(colors, turning, strict=True):
        label = f"key scale {row['angle_scale']:g}"
        top.plot(row["degrees"], row["first"], color=color, label=label)
        top.plot(row["degrees"], row["second"], color=color, linestyle="--")
        bottom.plot(row["degrees"], row["jacobian"], color=color)
    top.set(ylabel="weight of the first key (solid)\nand of the second (dashed)")
    top.set_title("A query turns from one key to another, scaled dot product")
    bottom.set(ylabel="norm of d weights / d logits", xticks=range(0, 91, 15), ylim=(0, 0.53))
    bottom.set_xlabel("angle between the query and the first key (degrees)")
    angles.legend(loc="outside lower center", ncols=len(turning))
    figure, axes = plotting.new_figure(8, 7.4, rows=2, grid=True, sharex=True)
    for shift, row in enumerate(where(rows, "score")):
        look = plotting.style_of(plotting.index_of(row["score"], column(rows, "score")))
        for ax, what in zip(axes, ("weight", "jacobian"), strict=True):
            low, _, high = np.maximum(row[f"{what} quantiles"], 1e-12)
            # Markers at different scales, so that curves that coincide are seen.
            label = row["score"] if what == "weight" else ""
            ax.plot(row["scales"], row[what], markevery=(2 * shift % 6, 6), label=label, **look)
            ax.fill_between(row["scales"], low, high, color=look["color"], alpha=0.2, linewidth=0)
    for row in where(rows, score="additive"):
        axes[0].axhline(row["limit"], color="black", ls="--", lw=1, label="additive, infinite keys")
    axes[0].set(ylabel="largest weight", ylim=(0, 1.03))
    axes[0].set_title("One query, orthogonal keys that grow longer (means; bands: 95 % of draws)")
    axes[1].set(xscale="log", yscale="log", ylim=(1e-8, 1), ylabel="norm of d weights / d logits")
    axes[1].set_xlabel("key scale (1: features of variance 1)")
    figure.legend(loc="outside lower center", ncols=3)
    return {"geometry_angle": angles, "geometry_scale": figure}


if __name__ == "__main__":
    lab.main(__name__)
