"""What do masks let through, which tiles do they skip, and what does a query without keys get?

Answer:   A causal mask skips 496 of 1,024 tiles. A masked logit has gradient 0, although topic 7
          says that it keeps one. A query whose keys are all masked by -1e9 attends uniformly to
          what it must not see; this library gives it an output and gradients of 0.
Source:   day 11 ("Scaled Dot-Product Attention"), §11.7-11.8: a causal mask, 1 = attend; the
          notebook's attention, True = masked, and its `nan_to_num`; topic 7: masked logits get
          weight 0 and send gradient 0 to their values, and "-1e9 at forbidden entries"; chapter 38,
          §38.7: the figure of three masks of 16 queries and 20 keys.
Command:  .venv/bin/python -m experiments.scores.attention_masks   # 20 seconds on 2 CPU cores

Here a mask is a function of positions, True = may attend; masks combine with &, | and ~.
`materialize` makes a table of a mask. At full length `tile_status` tells for each tile whether it
is empty (and skipped), full (and not masked), or partial (and masked pair by pair).

A mask read the wrong way round is a legal mask: no error, no NaN, the wrong pairs. A causal mask
then lets each query see only the future, and the last query sees nothing.

Five ways to mask a query that has no key left, and what it sends back through its weights:

    zeros                    this library: output 0, gradients 0
    -inf                     softmax of -inf everywhere is 0 / 0: output NaN, values' gradients NaN
    -inf, nan_to_num         the notebook's: output 0, gradients 0, because `where` and
                             `masked_fill` send no gradient to the logits that they replace
    -inf added, nan_to_num   the mask as a summand: the softmax's own NaN weights make a gradient,
                             which now passes on; NaN behind an output of 0
    -1e9                     the largest logit is subtracted: uniform attention to masked keys

Topic 7 adds that masked logits "still receive gradients that keep them negative". They do not: the
gradient of a logit is a_j (da_j - sum_k a_k da_k), which is 0 where a_j is 0.

A mask acts on the logits of every score alike, so there is no option --scores: the score is scaled
dot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from attention_jax import Mask, causal_mask, local_mask, masked_softmax, padding_mask, segment_mask
from attention_jax.analysis import attention_gradients
from attention_jax.reports import plotting
from experiments.lab import Claim, Row, column, main, markdown, significant, where

Array = jax.Array

LENGTH, TILE = 24, 4  # of the drawn tables
CAPTIONS = {
    "attention_masks": "Nine masks of 24 tokens in tiles of 4 x 4; allowed pairs are blue.",
    "attention_masks_windows": "All keys, a window around the diagonal, and one around centers with"
    " noise of deviation 2, which stand for predicted ones: the figure of §38.7.",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        length: T = S of the tile counts; a multiple of `tile`.
        tile: rows and columns of a tile.
        samples: random queries, keys and values on which gradients are measured.
        seed: seed of the samples.
    """

    length: int = 4096
    tile: int = 128
    samples: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tile < 1 or self.length < 16 or self.length % self.tile:
            raise ValueError(f"length must be 16 or more, a multiple of tile; got {self.length}")


QUICK = Config(length=64, tile=16, samples=8)


def masks(length: int) -> dict[str, Mask]:
    """Returns the masks by name; their windows and segments grow with the length."""
    causal, window = causal_mask(), local_mask(length // 8, 0)
    padding = padding_mask(jnp.array(length * 2 // 3))
    ends = jnp.array([length // 4, length * 7 // 12])
    # Three sequences packed into one.
    segments = jnp.searchsorted(ends, jnp.arange(length), side="right")
    packed = segment_mask(segments, segments)
    first_keys = padding_mask(jnp.array(length // 12))
    return {
        "causal": causal,
        "local, to the left": window,
        "padding": padding,
        "segments": packed,
        "causal & padding": causal & padding,
        "causal & segments": causal & packed,
        "window & padding": local_mask(length // 8, length // 8) & padding,
        "window | first keys, causal": (window | first_keys) & causal,
        "~causal": ~causal,
    }


def _infinity(logits: Array, mask: Array) -> Array:
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))


def _added(logits: Array, mask: Array) -> Array:
    return jax.nn.softmax(logits + jnp.where(mask, 0.0, -jnp.inf))


WAYS: dict[str, Callable[[Array, Array], Array]] = {
    "zeros (ours)": masked_softmax,
    "-inf": _infinity,
    "-inf, nan_to_num": lambda logits, mask: jnp.nan_to_num(_infinity(logits, mask), nan=0.0),
    "-inf added, nan_to_num": lambda logits, mask: jnp.nan_to_num(_added(logits, mask), nan=0.0),
    "-1e9": lambda logits, mask: jax.nn.softmax(jnp.where(mask, logits, -1e9)),
}


def run(config: Config) -> list[Row]:
    """A row for each mask, and for each way to mask a query without keys."""
    rows: list[Row] = []
    arrays = jax.random.normal(jax.random.key(config.seed), (4, config.samples, LENGTH, 8))

    @jax.jit  # takes a mask's table, so that one compilation serves all masks
    def largest(table: Array) -> Array:
        dlogits = attention_gradients(*arrays, mask=table).dlogits
        return jnp.abs(jnp.where(table, 0, dlogits)).max()

    drawn = masks(LENGTH)
    for name, mask in masks(config.length).items():
        table = drawn[name].materialize(LENGTH, LENGTH)
        row = {"mask": name, "table": np.asarray(table).astype(int).tolist()}
        row["masked_dlogit"] = float(largest(table))
        rows.append(row | tile_counts(mask, config.length, config.tile))
    rows += [{"window": name, "table": table.tolist()} for name, table in windows().items()]
    return rows + [{"way": name, **without_keys(weigh)} for name, weigh in WAYS.items()]


def windows() -> dict[str, np.ndarray]:
    """The masks of §38.7: 16 queries, 20 keys, windows of 3 keys on either side of a center."""
    diagonal = np.arange(16) * 20 / 16
    noisy = np.clip(diagonal + np.random.default_rng(2).normal(0, 2, 16), 0, 19)
    masks = {"global": np.ones((16, 20), int)}
    for name, centers in (("local-m", diagonal), ("local-p, noisy centers", noisy)):
        masks[name] = (abs(np.arange(20) - centers.astype(int)[:, None]) <= 3).astype(int)
    return masks


def tile_counts(mask: Mask, length: int, tile: int) -> dict[str, int]:
    """Counts empty, full and partial tiles."""
    starts = np.arange(0, length, tile, dtype=np.int32)
    positions = starts[:, None] + np.arange(tile, dtype=np.int32)[None]
    of_row = jax.vmap(mask.tile_status, in_axes=(None, 0))
    status = jax.jit(jax.vmap(of_row, in_axes=(0, None)))(positions, positions)
    empty, full = int(status.empty.sum()), int((status.full & ~status.empty).sum())
    return {"empty": empty, "full": full, "partial": len(starts) ** 2 - empty - full}


def without_keys(weigh: Callable[[Array, Array], Array]) -> Row:
    """What a query without keys, the second of two, attends to and sends back.

    Returns:
        Of the weights and of the gradients of logits and values: how many are NaN, and the largest
        of the others.
    """
    logits = jnp.array([[0.5, -0.25, 1.0], [0.25, 1.0, -0.5]])
    mask = jnp.array([[True, True, False], [False, False, False]])
    value, doutput = jnp.eye(3), jnp.array([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]])

    def attend(logits: Array, value: Array) -> tuple[Array, Array]:
        weights = weigh(logits, mask)
        return weights @ value, weights

    _, pull_back, weights = jax.vjp(attend, logits, value, has_aux=True)
    parts = zip(("weights", "dlogits", "dvalues"), (weights[1:], *pull_back(doutput)), strict=True)
    row = {}
    for name, array in parts:
        row[f"nan {name}"] = int(jnp.isnan(array).sum())
        row[name] = significant(jnp.abs(jnp.nan_to_num(array, nan=0.0)).max())
    return row


def claims(rows: list[Row]) -> list[Claim]:
    """Gradients of masked logits, and what two ways of masking do to a query without keys."""
    dlogit = max(column(rows, "masked_dlogit"))
    ways = ("-inf", "-inf added, nan_to_num", "-1e9")
    plain, added, finite = (where(rows, way=way)[0] for way in ways)
    weight, dvalue, nan = finite["weights"], finite["dvalues"], added["nan dlogits"]
    text = "query without keys"
    return [
        Claim("nine masks: largest gradient of a masked logit", dlogit, 0, 0, "not 0", True),
        Claim(f"{text}, -1e9: weight of each key", weight, 0.33323, 0.33343, "0", True),
        Claim(f"{text}, -1e9: largest gradient of a value", dvalue, 1.33323, 1.33343, "0", True),
        Claim(f"{text}, -inf: NaN among its 3 weights", plain["nan weights"], 3, 3, "sum 1", True),
        Claim(f"{text}, -inf added, nan_to_num: NaN among the logits' gradients", nan, 3, 3),
    ]


def table(rows: list[Row]) -> str:
    """Tiles by mask, and a query without keys by the way it is masked."""
    statuses = ("empty", "full", "partial")
    lines = [
        (row["mask"].replace("|", "or"), *(row[each] for each in statuses))
        for row in where(rows, "mask")
    ]
    head = ("mask", "tiles empty: skipped", "full: not masked", "partial: masked pair by pair")
    tiles = markdown(head, lines)
    measured = ("weights", "dlogits", "dvalues")
    lines = [
        (row["way"], *("NaN" if row[f"nan {what}"] else f"{row[what]:.4g}" for what in measured))
        for row in where(rows, "way")
    ]
    gradients = "largest gradient of a logit", "of a value"
    of_ways = ("a query without keys, masked by", "largest weight", *gradients)
    return f"{tiles}\n\n{markdown(of_ways, lines)}"


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The masks' tables."""
    figure, axes = plotting.new_figure(9.6, 10.4, rows=3, columns=3, sharex=True, sharey=True)
    for ax, row in zip(axes, where(rows, "mask"), strict=True):
        edges = np.arange(0, LENGTH + 1, TILE) - 0.5
        ax.vlines(edges, -0.5, LENGTH - 0.5, color="gray", lw=0.6)
        ax.hlines(edges, -0.5, LENGTH - 0.5, color="gray", lw=0.6)
        _draw(ax, row["mask"], row["table"])
    figure.suptitle(f"Who may attend to whom (blue), in tiles of {TILE} × {TILE}")
    local, axes = plotting.new_figure(9.6, 3.4, columns=3, sharey=True)
    for ax, row in zip(axes, where(rows, "window"), strict=True):
        _draw(ax, row["window"], row["table"])
    return {"attention_masks": figure, "attention_masks_windows": local}


def _draw(ax: Any, name: str, table: list[list[int]]) -> None:
    ax.imshow(table, cmap=ListedColormap(["white", plotting.COLORS[5]]), vmin=0, vmax=1)
    ax.set_title(f"{name}\n{100 * np.mean(table):.0f} % of the pairs", fontsize=11)
    ax.set(xlabel="key position", ylabel="query position")
    ax.label_outer()


if __name__ == "__main__":
    main(__name__)
