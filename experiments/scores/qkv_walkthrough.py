"""What does each step from token ids to context vectors look like, and how large are its numbers?

Answer:   The variances are those that the source prints (806.30 after scaling), but they show two
          mistakes: its softmax runs over columns, and its projections are √32 times too large. With
          projections of variance 1/D the scaled logits have variance 1.
Source:   walkthrough ("Scaled Dot-Product Attention"): tokens, embedding, Q, K, V, compatibility,
          scale, softmax, context. Topic 7: the asymmetry "disappears" in self-attention.
Command:  .venv/bin/python -m experiments.scores.qkv_walkthrough   # 10 seconds on 2 CPU cores

11 token ids (9 occurs twice) become vectors of 32 features, which are projected without a bias. The
experiment reproduces the source's numbers, which show three of its choices:

- Its softmax is over dim 0. Then columns sum to 1, that is, the weights of all queries on one key,
  and a context is not a weighted mean of values: rows sum to anything from 0 to 5, and 7 of the 11
  queries get nothing. The source's text says "for each row", which is right.
- Its projections have entries of variance 1, so that Q and K have variance D and not 1. Dividing by
  sqrt(D) then leaves a variance of D^2, 1024 on average over draws, and rows of weights are nearly
  one-hot. The factor 1 / sqrt(D) is meant for queries and keys of unit variance, whose logits it
  gives variance 1; projections preserve unit variance if their entries have variance 1 / D.
- It seeds twice with 42, so that the first 32 embeddings equal the query projection.

Without positions, equal tokens have equal rows in all steps, whatever stands between them.

The walkthrough follows scaled dot products alone, so there is no option --scores.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax import SCORES, attention, masked_softmax
from attention_jax.reports import plotting
from experiments.lab import Claim, Row, main, markdown, significant, where
from experiments.torch_random import TorchRandom

Array = jax.Array

TOKEN_IDS = (0, 5, 4, 9, 7, 2, 9, 10, 1, 6, 3)
TOKENS = [str(token) for token in TOKEN_IDS]
DIM, SOURCE_SEED = 32, 42
PRINTED = {"Q": 34.12, "K": 26.70, "compatibility": 25801.72, "scaled": 806.30}
RECIPES = {"source": 1.0, "ours": 1.0 / DIM}  # variance of the entries of three projections
TITLES = {
    "embedding": "1. embeddings X",
    "Q": "2. queries Q = X W_q",
    "K": "2. keys K = X W_k",
    "V": "2. values V = X W_v",
    "compatibility": "3. compatibility QKᵀ",
    "scaled": "4. scaled, QKᵀ / √32",
    "weights": "5. weights, softmax of rows",
    "context": "6. context, weights V",
}
CAPTIONS = {
    "qkv_walkthrough": "Eight steps, projections of variance 1/D: weights are soft.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        draws: random embeddings and projections per recipe.
    """

    draws: int = 1000


QUICK = Config(draws=100)


def run(config: Config) -> list[Row]:
    """A row for each step of each recipe: one draw's numbers, the mean variance over many."""
    rng, rows = jax.random.key(0), []
    drawn = {"source": steps(*source_arrays()), "ours": steps(*fresh_arrays(rng, RECIPES["ours"]))}
    for index, (recipe, variance) in enumerate(RECIPES.items()):
        rngs = jax.random.split(jax.random.fold_in(rng, index), config.draws)
        many = _variances(rngs, variance)
        for step in TITLES:
            values = np.asarray(drawn[recipe][step])
            mean = np.asarray(many[step], np.float64).mean()
            numbers = {"variance": float(values.var(ddof=1)), "mean_variance": significant(mean)}
            row = {"recipe": recipe, "step": step, **numbers}
            rows.append(row | {"values": np.float64(values).round(3).tolist()})
    embedding, (projection, _, _) = (np.asarray(each) for each in source_arrays())
    difference = float(np.abs(embedding - projection[list(TOKEN_IDS)]).max())
    columns = masked_softmax(drawn["source"]["scaled"], axis=0)
    table = np.float64(columns).round(4).tolist()
    return [*rows, {"columns": table, "difference": difference}]


def source_arrays() -> tuple[Array, Array]:
    """Returns the source's own embeddings of the tokens [S, D] and projections [3, D, D]."""
    embedding, random = TorchRandom(SOURCE_SEED).randn(2000, DIM), TorchRandom(SOURCE_SEED)
    projections = np.stack([random.randn(DIM, DIM) for _ in range(3)])
    return jnp.asarray(embedding[list(TOKEN_IDS)]), jnp.asarray(projections)


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


@jax.jit
def _variances(rngs: Array, variance: float) -> dict[str, Array]:
    def draw(rng: Array) -> dict[str, Array]:
        arrays = steps(*fresh_arrays(rng, variance))
        return {name: array.var(ddof=1) for name, array in arrays.items()}

    return jax.vmap(draw)(rngs)


def claims(rows: list[Row]) -> list[Claim]:
    """The printed variances, the source's softmax and seeds, and the expected variances."""
    (source,) = where(rows, "columns")
    sums = np.sum(source["columns"], axis=1)
    variances = {row["step"]: row["variance"] for row in where(rows, recipe="source")}
    printed_off = max(  # as a share of what rounding explains
        abs(variances[name] - x) / max(0.0051, 2e-6 * x) for name, x in PRINTED.items()
    )
    off = 0.0
    for recipe, entry in RECIPES.items():
        projected = DIM * entry
        expected = {"embedding": 1.0, "Q": projected, "K": projected, "V": projected}
        expected |= {"compatibility": DIM * projected**2, "scaled": projected**2}
        for step, variance in expected.items():
            mean = where(rows, recipe=recipe, step=step)[0]["mean_variance"]
            off = max(off, abs(mean / variance - 1))
    # Entries e_ij and e_ji of independent projections are independent: half of the squares off the
    # diagonal are antisymmetric, 10 / 22 of all.
    logits = np.array(where(rows, recipe="ours", step="scaled")[0]["values"])
    antisymmetric = float(np.sum((logits - logits.T) ** 2) / 4 / np.sum(logits**2))
    turned = "ours: antisymmetric share of the squares of the logits"
    first = "source: variances minus the printed ones, largest share of their rounding"
    uneven, same = float(np.ptp(sums)), source["difference"]
    text = "both recipes: mean variance up to step 4 over its expected one, largest - 1"
    return [
        Claim(first, printed_off, 0, 1, ", ".join(map(str, PRINTED.values()))),
        Claim("source: sums of rows, largest - smallest", uneven, 0.5, math.inf, "0", True),
        Claim("source: embeddings minus rows of the query projection, largest", same, 0, 0),
        Claim(text, off, 0, 0.06),
        Claim(turned, antisymmetric, 0.3, 0.6, "0: no asymmetry in self-attention", True),
    ]


def table(rows: list[Row]) -> str:
    """Variance at each step: the source's draw, its recipe, and projections of variance 1 / D."""
    lines = []
    for step in TITLES:
        source, ours = where(rows, step=step)
        numbers = (source["variance"], source["mean_variance"], ours["mean_variance"])
        lines.append((step, *(f"{number:,.5g}" for number in numbers)))
    head = ["variance of", "the source's own draw", "mean over draws like it"]
    head.append("mean with projections of variance 1 / D")
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The steps of our recipe."""
    figure, axes = plotting.new_figure(10, 5.8, rows=2, columns=4)
    for ax, row in zip(axes, where(rows, recipe="ours"), strict=True):
        values = np.array(row["values"])
        limit = np.abs(values).max()
        style: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
        if row["step"] == "weights":
            style = {"cmap": "viridis", "vmin": 0, "vmax": 1}
        image = ax.imshow(values, aspect="auto", interpolation="nearest", **style)
        shape, digits = [*values.shape], 2 if row["variance"] >= 1 else 4
        name = f"{TITLES[row['step']]}\n{shape}, variance {row['variance']:,.{digits}f}"
        ax.set_title(name, fontsize=10)
        ax.set_yticks(range(len(TOKENS)), TOKENS)
        ax.set_xlabel("feature")
        if values.shape[1] == len(TOKENS):
            ax.set_xticks(range(len(TOKENS)), TOKENS, fontsize=8)
            ax.set_xlabel("key (token id)")
        figure.colorbar(image, ax=ax, shrink=0.8)
    for ax in axes[::4]:
        ax.set_ylabel("token id, in order")
    largest = np.max(where(rows, recipe="ours", step="weights")[0]["values"], axis=1).mean()
    title = "From token ids to context; projections with entries of variance 1 / D"
    figure.suptitle(f"{title}\nlargest weight of a row: {largest:.2f} on average")
    return {"qkv_walkthrough": figure}


if __name__ == "__main__":
    main(__name__)
