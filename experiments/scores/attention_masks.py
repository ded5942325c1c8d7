"""What do masks let through, which tiles do they skip, and what if they are read the wrong way?

Source:   day 11 ("Scaled Dot-Product Attention"), §11.7-11.8: a causal mask, 1 = attend; the
          notebook's attention, True = masked, and its `nan_to_num`; topic 7: masked logits get
          weight 0 and send gradient 0 to their values, and "-1e9 at forbidden entries".
Command:  .venv/bin/python -m experiments.scores.attention_masks
Time:     1 minute on 2 CPU cores.
Expected: rows sum to 1; weights of masked pairs and the gradients of their values are exactly 0; a
          query whose keys are all masked has output 0 and gradient 0.

Here a mask is a function of positions, True = may attend; masks combine with &, | and ~.
`materialize` draws them as tables. At full length they are asked tile by tile: `tile_status` says
which tiles are empty, and skipped, and which are full, and need no masking; the others are masked
pair by pair. A mask may call a tile partial that its table shows to be empty or full: both counts
are kept.

A mask read the wrong way round is a legal mask: no error, no NaN, the wrong pairs. A causal mask
then sees only the future, and its last query sees nothing. Five ways to mask a query that has no
key left, and what the query sends back through its weights:

    zeros                    this library: output 0, gradients 0
    -inf                     softmax of -inf everywhere is 0 / 0: output NaN, values' gradients NaN
    -inf, nan_to_num         the notebook's: output 0, gradients 0, because `where` and
                             `masked_fill` send no gradient to the logits that they replace
    -inf added, nan_to_num   the mask as a summand: the softmax's own NaN weights make a gradient,
                             which now passes on; NaN behind an output of 0
    -1e9                     the largest logit is subtracted: uniform attention to masked keys

Topic 7 adds that masked logits "still receive gradients that keep them negative". They do not: the
gradient of a logit is a_j (da_j - sum_k a_k da_k), which is 0 where a_j is 0.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import (
    Mask,
    attention,
    attention_weights,
    causal_mask,
    local_mask,
    masked_softmax,
    padding_mask,
    segment_mask,
)
from attention_jax.analysis import attention_gradients
from experiments.experiment import JSON, Expectation, near, run_experiment
from experiments.scores.attention_masks_figures import STATUSES, plot

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array

CAPTIONS = {
    "attention_masks": (
        "Nine masks over 24 queries and 24 keys as tables, allowed pairs dark, cut into tiles of "
        "four by four: causal, a window to the left, padding, three segments, and combinations."
    ),
    "attention_masks_tiles": (
        "Share of the tiles that are empty, full and partly masked for nine masks at 4096 "
        "positions. A causal mask leaves nearly half of the tiles empty, a window 85 %."
    ),
    "attention_masks_misread": (
        "Attention weights of six tokens. Upper row: a causal mask and a padding mask, read the "
        "right way and the wrong way round, where queries look only at the future or only at "
        "padding. Lower row: a query without keys, masked in five ways; NaN is drawn in pink."
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        length: T = S of the tile counts; a multiple of `tile`.
        tile: rows and columns of a tile.
        drawn_length: T = S of the drawn tables; a multiple of `drawn_tile`, at least 16.
        drawn_tile: rows and columns of a tile in the drawn tables.
        samples: random queries, keys and values on which weights and gradients are checked.
        seed: seed of the samples.
    """

    length: int = 4096
    tile: int = 128
    drawn_length: int = 24
    drawn_tile: int = 4
    samples: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for length, tile in (("length", "tile"), ("drawn_length", "drawn_tile")):
            size, block = getattr(self, length), getattr(self, tile)
            if size < 16 or block < 1 or size % block:
                raise ValueError(
                    f"{length} must be at least 16 and a multiple of {tile}; got {size} and {block}"
                )
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1; got {self.samples}")


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


def run(config: Config) -> JSON:
    """Draws tables, counts tiles, and measures weights and gradients."""
    return {
        "tables": {
            name: np.asarray(mask.materialize(config.drawn_length, config.drawn_length))
            .astype(int)
            .tolist()
            for name, mask in masks(config.drawn_length).items()
        },
        "tiles": {
            name: tile_counts(mask, config.length, config.tile)
            for name, mask in masks(config.length).items()
        },
        "checks": _checks(config),
        "misread": _misread(config),
        "no_keys": no_keys(),
    }


# --- tiles ---


def tile_counts(mask: Mask, length: int, tile: int) -> dict[str, dict[str, int]]:
    """Counts empty, full and partial tiles: as the mask says, and as its table shows."""
    starts = np.arange(0, length, tile, dtype=np.int32)
    positions = starts[:, None] + np.arange(tile)[None]
    of_row = jax.vmap(mask.tile_status, in_axes=(None, 0))
    status = jax.jit(jax.vmap(of_row, in_axes=(0, None)))(positions, positions)
    count = length // tile
    tables = np.asarray(mask.materialize(length, length)).reshape(count, tile, count, tile)
    return {
        "said": _counts(np.asarray(status.empty), np.asarray(status.full)),
        "shown": _counts(np.asarray(~tables.any((1, 3))), np.asarray(tables.all((1, 3)))),
    }


def _counts(empty: np.ndarray, full: np.ndarray) -> dict[str, int]:
    counts = int(empty.sum()), int((full & ~empty).sum()), int((~empty & ~full).sum())
    return dict(zip(STATUSES, counts, strict=True))


# --- weights and gradients ---


def _checks(config: Config) -> JSON:
    """The largest error of each mask over samples; only the sums of rows are inexact."""
    length, dim = config.drawn_length, 8
    rng = jax.random.key(config.seed)
    query, key, value, doutput = jax.random.normal(rng, (4, config.samples, length, dim))
    checks = {}
    for name, mask in masks(length).items():
        allowed = mask.materialize(length, length)
        weights = np.asarray(attention_weights(query, key, mask=mask))
        dlogits, dvalues = jax.device_get(_derivatives(query, key, value, doutput, allowed))
        table = np.asarray(allowed)
        has_key = table.any(1)
        checks[name] = {
            "weight_where_masked": _largest(np.where(table, 0, weights)),
            "dlogits_where_masked": _largest(np.where(table, 0, dlogits)),
            "value_derivative_where_masked": _largest(np.where(table, 0, dvalues)),
            "value_derivative_error": _largest(dvalues - weights[0]),
            "row_sum_error": _largest(weights.sum(-1) - has_key),
            "queries_without_keys": int((~has_key).sum()),
        }
    return checks


@jax.jit  # takes a mask's table, so that one compilation serves all masks
def _derivatives(
    query: Array, key: Array, value: Array, doutput: Array, table: Array
) -> tuple[Array, Array]:
    """dlogits [B, T, S]; for the first sample |d output_i / d value_j|, [T, S]."""
    dlogits = attention_gradients(query, key, value, doutput, mask=table).dlogits
    attend = functools.partial(attention, query[0], key[0], mask=table)
    return dlogits, jnp.abs(jax.jacrev(attend)(value[0])).max((1, 3))  # of [T, Dv, S, Dv]


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max())


# --- masks misread ---


def _misread(config: Config) -> JSON:
    """Weights under a mask with True = masked, given to a reader of True = may attend."""
    tokens, dim = 6, 8
    query, key = jax.random.normal(jax.random.key(config.seed + 1), (2, tokens, dim))
    numbers = {}
    for name, mask in (
        ("causal", causal_mask()),
        ("padding", padding_mask(jnp.array(tokens - 2))),
    ):
        table = np.asarray(mask.materialize(tokens, tokens))
        misread = np.asarray(attention_weights(query, key, mask=~mask))
        numbers[name] = {
            "read": _table(attention_weights(query, key, mask=mask)),
            "misread": _table(misread),
            "misread_weight_on_masked_keys": [
                round(float(share), 6) for share in np.where(table, 0, misread).sum(-1)
            ],
        }
    return numbers


def no_keys() -> JSON:
    """Weights of two queries, the second without a key, and the gradients that it sends."""
    numbers = {}
    by_way = jax.device_get(_by_way())
    for name in WAYS:
        weights, gradients = by_way[name]
        numbers[name] = {
            "table": _table(weights),
            **{
                what: {
                    "nan": int(np.isnan(array).sum()),
                    "largest": round(float(np.abs(np.nan_to_num(array, nan=0.0)).max()), 4),
                }
                for what, array in ({"weights": weights[1:]} | gradients).items()
            },
        }
    return numbers


@jax.jit
def _by_way() -> dict[str, tuple[Array, dict[str, Array]]]:
    """{way: (weights, gradients of the logits and the values)}."""
    logits = jnp.array([[0.5, -0.25, 1.0], [0.25, 1.0, -0.5]])
    mask = jnp.array([[True, True, False], [False, False, False]])
    value, doutput = jnp.eye(3), jnp.array([[0.0, 0.0, 0.0], [1.0, 2.0, 4.0]])
    results = {}
    for name, weigh in WAYS.items():

        def attend(logits: Array, value: Array, weigh: Way = weigh) -> tuple[Array, Array]:
            weights = weigh(logits, mask)
            return weights @ value, weights

        _, pull_back, weights = jax.vjp(attend, logits, value, has_aux=True)
        gradients = dict(zip(("logits", "values"), pull_back(doutput), strict=True))
        results[name] = weights, gradients
    return results


Way = Callable[[Array, Array], Array]


def _infinity(logits: Array, mask: Array) -> Array:
    return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf), axis=-1)


def _infinity_added(logits: Array, mask: Array) -> Array:
    return jax.nn.softmax(logits + jnp.where(mask, 0.0, -jnp.inf), axis=-1)


WAYS: dict[str, Way] = {
    "zeros (ours)": lambda logits, mask: masked_softmax(logits, mask),
    "-inf": _infinity,
    "-inf, nan_to_num": lambda logits, mask: jnp.nan_to_num(_infinity(logits, mask), nan=0.0),
    "-inf added, nan_to_num": lambda logits, mask: jnp.nan_to_num(
        _infinity_added(logits, mask), nan=0.0
    ),
    "-1e9": lambda logits, mask: jax.nn.softmax(jnp.where(mask, logits, -1e9), axis=-1),
}
# Way -> (how many NaN, largest other number) of the weights, dlogits and dvalues.
WITHOUT_KEYS = {
    "zeros (ours)": ((0, 0), (0, 0), (0, 0)),
    "-inf": ((3, 0), (0, 0), (9, 0)),
    "-inf, nan_to_num": ((0, 0), (0, 0), (0, 0)),
    "-inf added, nan_to_num": ((0, 0), (3, 0), (0, 0)),
    "-1e9": ((0, 1 / 3), (0, 0), (0, 4 / 3)),
}


def _table(array: np.ndarray | Array) -> list[list[float | None]]:
    """Rounded numbers; None stands for NaN, which JSON does not have."""
    return [
        [None if np.isnan(number) else round(float(number), 4) for number in row]
        for row in np.asarray(array)
    ]


def expectations(numbers: JSON) -> list[Expectation]:
    """Exact zeros, sums of rows, and no tile called empty or full that is not."""
    checks = []
    exact = "exact"
    for name, measured in numbers["checks"].items():
        for what, claim in (
            ("weight_where_masked", "largest weight of a masked pair"),
            ("dlogits_where_masked", "largest gradient of a masked logit"),
            ("value_derivative_where_masked", "largest derivative of an output in a masked value"),
        ):
            source = "not 0" if what == "dlogits_where_masked" else "exactly 0"
            checks.append(near(f"{name}: {claim}", source, measured[what], 0, 0, exact))
        for what, claim in (
            ("row_sum_error", "error of the rows' sums (1, or 0 without a key)"),
            ("value_derivative_error", "derivative of an output in a value minus the weight"),
        ):
            checks.append(
                Expectation(f"{name}: {claim}", "", measured[what], 0, 2e-5, "float32 sums")
            )
    for name, counts in numbers["tiles"].items():
        for status in ("empty", "full"):
            said, shown = (counts[side][status] for side in ("said", "shown"))
            checks.append(
                Expectation(
                    f"{name}: {status} tiles, stated / shown {shown}", "", said, 0, shown,
                    "a mask may call fewer tiles empty or full than its table shows, never more",
                )
            )  # fmt: skip
    for name, of_mask in numbers["misread"].items():
        rows = [row for row in of_mask["misread_weight_on_masked_keys"] if row]
        checks.append(
            near(f"{name} misread: weight on masked keys", "", min(rows), 1, 1e-5, "float32 sums")
        )
    for name, expected in WITHOUT_KEYS.items():
        way = numbers["no_keys"][name]
        for what, (nans, largest) in zip(("weights", "logits", "values"), expected, strict=True):
            claim = f"no key, {name}: {what if what == 'weights' else f'gradient of {what}'}"
            checks.append(near(f"{claim}, NaN", "", way[what]["nan"], nans, 0, exact))
            checks.append(
                near(f"{claim}, largest", "", way[what]["largest"], largest, 1e-4, "rounded")
            )
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
