"""What do masks let through, and what does a query without keys get?

Answer:   A masked logit has gradient 0, although topic 7 says that it keeps one. A query whose keys
          are all masked by -1e9 attends uniformly to what it must not see; this library gives it an
          output and gradients of 0.
Source:   day 11 ("Scaled Dot-Product Attention"), §11.7-11.8: a causal mask, 1 = attend; the
          notebook's attention, True = masked, and its `nan_to_num`; topic 7: masked logits get
          weight 0 and send gradient 0 to their values, and "-1e9 at forbidden entries".
Command:  .venv/bin/python -m experiments.scores.attention_masks   # 20 seconds on 2 CPU cores

Here a mask is a function of positions, True = may attend; masks combine with &, | and ~.
`materialize` makes a table of a mask.

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

LENGTH = 24
CAPTIONS = {"attention_masks": "Nine masks of 24 tokens; allowed pairs are blue."}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        samples: random queries, keys and values on which gradients are measured.
    """

    samples: int = 256


QUICK = Config(samples=8)


def masks() -> dict[str, Mask]:
    """Returns the masks by name."""
    causal, window, padding = causal_mask(), local_mask(3, 0), padding_mask(jnp.array(16))
    # Three sequences packed into one.
    segments = jnp.searchsorted(jnp.array([6, 14]), jnp.arange(LENGTH), side="right")
    packed = segment_mask(segments, segments)
    first_keys = padding_mask(jnp.array(2))
    return {
        "causal": causal,
        "local, to the left": window,
        "padding": padding,
        "segments": packed,
        "causal & padding": causal & padding,
        "causal & segments": causal & packed,
        "window & padding": local_mask(3, 3) & padding,
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
    arrays = jax.random.normal(jax.random.key(0), (4, config.samples, LENGTH, 8))

    @jax.jit  # takes a mask's table, so that one compilation serves all masks
    def largest(table: Array) -> Array:
        dlogits = attention_gradients(*arrays, mask=table).dlogits
        return jnp.abs(jnp.where(table, 0, dlogits)).max()

    for name, mask in masks().items():
        table = mask.materialize(LENGTH, LENGTH)
        row = {"mask": name, "table": np.asarray(table).astype(int).tolist()}
        rows.append(row | {"masked_dlogit": float(largest(table))})
    return rows + [{"way": name, **without_keys(weigh)} for name, weigh in WAYS.items()]


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
    """A query without keys by the way it is masked."""
    measured = ("weights", "dlogits", "dvalues")
    lines = [
        (row["way"], *("NaN" if row[f"nan {what}"] else f"{row[what]:.4g}" for what in measured))
        for row in where(rows, "way")
    ]
    gradients = "largest gradient of a logit", "of a value"
    of_ways = ("a query without keys, masked by", "largest weight", *gradients)
    return markdown(of_ways, lines)


def plot(rows: list[Row]) -> dict[str, Figure]:
    """The masks' tables."""
    figure, axes = plotting.new_figure(9.6, 10.4, rows=3, columns=3, sharex=True, sharey=True)
    for ax, row in zip(axes, where(rows, "mask"), strict=True):
        ax.imshow(row["table"], cmap=ListedColormap(["white", plotting.COLORS[5]]), vmin=0, vmax=1)
        share = 100 * np.mean(row["table"])
        ax.set_title(f"{row['mask']}\n{share:.0f} % of the pairs", fontsize=11)
        ax.set(xlabel="key position", ylabel="query position")
        ax.label_outer()
    figure.suptitle("Who may attend to whom (blue)")
    return {"attention_masks": figure}


if __name__ == "__main__":
    main(__name__)
