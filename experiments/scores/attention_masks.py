"""What do masks let through, which tiles do they skip, and what if they are read the wrong way?

Source:   day 11 ("Scaled Dot-Product Attention"), §11.7-11.8: a causal mask, 1 = attend; the
          notebook's attention, True = masked, and its `nan_to_num`; topic 7: masked logits get
          weight 0 and send gradient 0 to their values, and "-1e9 at forbidden entries".
Command:  .venv/bin/python -m experiments.scores.attention_masks
Time:     1 minute on 2 CPU cores.
Expected: a query whose keys are all masked has output 0 and gradient 0. A masked logit has gradient
          0 (topic 7 says that it still receives one).

Here a mask is a function of positions, True = may attend; masks combine with &, | and ~.
`materialize` makes tables of them. At full length `tile_status` says of each tile whether it is
empty (it is skipped), full (it needs no masking), or partial (it is masked pair by pair). A mask
may call a tile partial that its table shows to be empty or full: both counts are kept.

A mask read the wrong way round is a legal mask: no error, no NaN, the wrong pairs. A causal mask
then lets each query see only the future, and the last query sees nothing. Five ways to mask a query
that has no key left, and what the query sends back through its weights:

    zeros                    this library: output 0, gradients 0
    -inf                     softmax of -inf everywhere is 0 / 0: output NaN, values' gradients NaN
    -inf, nan_to_num         the notebook's: output 0, gradients 0, because `where` and
                             `masked_fill` send no gradient to the logits that they replace
    -inf added, nan_to_num   the mask as a summand: the softmax's own NaN weights make a gradient,
                             which now passes on; NaN behind an output of 0
    -1e9                     the largest logit is subtracted: uniform attention to masked keys

Topic 7 adds that masked logits "still receive gradients that keep them negative". They do not: the
gradient of a logit is a_j (da_j - sum_k a_k da_k), which is 0 where a_j is 0.

A mask acts on logits of any score alike, so that there is no choice of scores here: the score is
scaled dot. What holds by construction is tested and not claimed: sums of rows, weights of masked
pairs, and that no mask calls a tile empty or full that is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import (
    Mask,
    attention_weights,
    causal_mask,
    local_mask,
    masked_softmax,
    padding_mask,
    segment_mask,
)
from attention_jax.analysis import attention_gradients
from experiments.experiment import JSON, Expectation, near, run_experiment
from experiments.scores.attention_masks_figures import CAPTIONS, STATUSES, plot
from experiments.scores.attention_masks_report import report
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        length: T = S of the tile counts; a multiple of `tile`.
        tile: rows and columns of a tile.
        drawn_length: T = S of the drawn tables; a multiple of `drawn_tile`, at least 16.
        drawn_tile: rows and columns of a tile in the drawn tables.
        samples: random queries, keys and values on which gradients are measured.
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
        check_least(self, samples=1)


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
    """Makes tables, counts tiles, and measures weights and gradients."""
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
        "largest_masked_dlogits": _largest_masked_dlogits(config),
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


# --- gradients ---


def _largest_masked_dlogits(config: Config) -> dict[str, float]:
    """The largest gradient of a masked logit over samples, by mask."""
    length, dim = config.drawn_length, 8
    rng = jax.random.key(config.seed)
    query, key, value, doutput = jax.random.normal(rng, (4, config.samples, length, dim))

    @jax.jit  # takes a mask's table, so that one compilation serves all masks
    def largest(table: Array) -> Array:
        dlogits = attention_gradients(query, key, value, doutput, mask=table).dlogits
        return jnp.abs(jnp.where(table, 0, dlogits)).max()

    return {
        name: float(largest(mask.materialize(length, length)))
        for name, mask in masks(length).items()
    }


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
    """Gradients of masked logits, and what each way of masking does to a query without keys."""
    checks = [
        near(
            f"{name}: largest gradient of a masked logit", "not 0", largest, 0, 0, "exact",
            contradicts=True,
        )
        for name, largest in numbers["largest_masked_dlogits"].items()
    ]  # fmt: skip
    for name, expected in WITHOUT_KEYS.items():
        way = numbers["no_keys"][name]
        for what, (nans, largest) in zip(("weights", "logits", "values"), expected, strict=True):
            claim = f"no key, {name}: {what if what == 'weights' else f'gradient of {what}'}"
            checks.append(near(f"{claim}, NaN", "", way[what]["nan"], nans, 0, "exact"))
            # Topic 7: entries masked with -1e9 get weight 0, and their values gradient 0.
            contradicts = name == "-1e9" and what != "logits"
            checks.append(
                near(
                    f"{claim}, largest", "0" if contradicts else "", way[what]["largest"], largest,
                    1e-4, "rounded", contradicts=contradicts,
                )
            )  # fmt: skip
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
