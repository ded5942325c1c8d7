"""Which relations between a query and a key can a score express, and which does it learn?

Answer:   Dot, scaled, general, softcap and softplus learn inner products (99.5 %) and none of the
          other relations (25 % on the longest key). A cosine of projections with biases also learns
          Euclidean distances and lengths (96 % and more). Only additive, concat and neural stay
          above 82 % in all nine.
Source:   chapter 38, exercise 38.6, on when additive attention is worth its price; the formulas of
          the literature, each in the docstring of its score. The rest is ours.
Command:  .venv/bin/python -m experiments.bench.relations   # 17 minutes on 2 CPU cores

The model is one attention with linear projections (with bias) of queries and keys to D = 16
features, and nothing else. It sees a query q and 8 keys k in R^4, and its loss is the cross entropy
of the attention weights against the right key (`RELATIONS`). Inputs are standard normal numbers;
those of parity are two bits, -1 or 1. In predecessor at least one key is below the query.

For every cell of the table, the learning rate and a constant factor on the logits are chosen by the
accuracy of one seed on validation data. Fresh seeds with the chosen values are measured on fresh
test data. All relations share the inputs of a step. The whole matrix is measured twice, from two
base seeds.

Where a relation is not learned, the score cannot express it or does not learn it: `expression.py`
tells which.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from attention_jax import SCORES, Score, get_score
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import score_folder
from experiments import lab
from experiments.bench.expression import EXPRESSION
from experiments.lab import Claim, Row, main, markdown, significant, spread_and_worst

Array = jax.Array
INPUT = 4  # features of a query and a key, before the projections
MATRIX = np.random.default_rng(0).standard_normal((INPUT, INPUT)).astype(np.float32)

# The value of each of the keys [S, 4] for a query [4]; the right key has the largest.
RELATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "inner": lambda query, keys: keys @ query,
    "bilinear": lambda query, keys: keys @ (query @ MATRIX.astype(query.dtype)),
    "cosine": lambda query, keys: keys @ query / _length(keys),
    "nearest": lambda query, keys: -_length(keys - query[None]),
    "farthest": lambda query, keys: _length(keys - query[None]),
    "manhattan": lambda query, keys: -jnp.abs(keys - query[None]).sum(-1),
    "longest": lambda query, keys: _length(keys),
    "predecessor": lambda query, keys: jnp.where(keys[:, 0] < query[0], keys[:, 0], -jnp.inf),
    "parity": lambda query, keys: query[:2].prod() * keys[:, :2].prod(-1),
}
PRODUCTS = ("dot", "general", "scaled", "softcap", "softplus")
AT_HOME = {"cosine": "cosine", "distance": "nearest", "manhattan": "manhattan", "dot": "inner"}
LEARNED = 0.99
CAPTIONS = {
    "relations": "Per cent of the fresh test samples in which the right key has the largest weight,"
    " mean over seeds; chance is 12.5. Signs in the corners: + weights are known that express the"
    " relation, × no weights do. Scores that are alike stand together."
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: scores to train.
        bases: base seeds, of one whole matrix each; the first is shown.
        rates: Adam's initial learning rates, which fall linearly to 0. Gradients are clipped to
            norm 1.
        factors: constant factors of the logits.
        seeds: trainings with the chosen rate and factor.
        steps: optimiser steps.
        batch: samples per step.
        tests: samples of validation and of test data.
        keys: keys per sample.
        dim: D, the features of projected queries and keys.
        workdir: folder of rows by score; a score that is finished there is not trained again.
    """

    scores: lab.ScoreNames = tuple(SCORES)
    bases: tuple[int, ...] = (0, 1)
    rates: tuple[float, ...] = (1e-2, 3e-2, 1e-1)
    factors: tuple[float, ...] = (1 / 8, 1, 8)
    seeds: int = 5
    steps: int = 1000
    batch: int = 64
    tests: int = 4096
    keys: int = 8
    dim: int = 16
    workdir: Path = Path("runs/relations")

    def __post_init__(self) -> None:
        lab.check_least(self, bases=0, rates=0, factors=0, seeds=2, steps=1, batch=1, tests=2)
        lab.check_least(self, keys=2, dim=1)


QUICK = Config(
    ("dot", "additive"), (0, 1), (0.01,), (1,), 2, 3, 8, 16, workdir=Path("runs/quick/relations")
)


# --- samples and the model ---


def _length(x: Array) -> Array:
    return jnp.sqrt(jnp.square(x).sum(-1))


def sample(relation: str, normal: Array) -> tuple[Array, Array, Array]:
    """(query [4], keys [S, 4], index of the right key []) of normal numbers [1 + S, 4]."""
    query, keys = normal[0], normal[1:]
    if relation == "predecessor":  # a query below all keys trades first features with the first
        low = jnp.minimum(query[0], keys[0, 0])
        trade = query[0] < keys[:, 0].min()
        high = jnp.maximum(query[0], keys[0, 0])
        query = query.at[0].set(jnp.where(trade, high, query[0]))
        keys = keys.at[0, 0].set(jnp.where(trade, low, keys[0, 0]))
    if relation == "parity":  # the key with the largest third feature is the right one
        bits = jnp.where(normal[:, :2] < 0, -1, 1).astype(normal.dtype)
        right = keys[:, 2] == keys[:, 2].max()
        parities = jnp.where(right, 1, -1).astype(normal.dtype) * bits[0].prod()
        keys = jnp.zeros_like(keys).at[:, 0].set(bits[1:, 0]).at[:, 1].set(bits[1:, 0] * parities)
        query = jnp.zeros_like(query).at[:2].set(bits[0])
    return query, keys, jnp.argmax(RELATIONS[relation](query, keys))


def samples(rng: Array, size: int, keys: int) -> tuple[Array, Array, Array]:
    """`size` samples of each relation [R, size, ...], all from the same normal numbers."""
    normal = jax.random.normal(rng, (size, 1 + keys, INPUT))
    of_each = [jax.vmap(functools.partial(sample, name))(normal) for name in RELATIONS]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *of_each)


def init(score: Score, rng: Array, dim: int) -> Any:
    """The parameters of an attention: two projections and those of the score."""
    query_rng, key_rng, score_rng = jax.random.split(rng, 3)
    params = {"score": score.init(score_rng, dim, dim)}
    for side, side_rng in (("query", query_rng), ("key", key_rng)):
        kernel = jax.random.normal(side_rng, (INPUT, dim)) * INPUT**-0.5
        params[side] = {"kernel": kernel, "bias": jnp.zeros(dim)}
    return params


def logits_of(score: Score, params: Any, query: Array, keys: Array) -> Array:
    """The logits [S] of a query [4] and keys [S, 4]."""
    query, keys = (
        x @ params[side]["kernel"] + params[side]["bias"][None]
        for side, x in (("query", query[None]), ("key", keys))
    )
    return score(params["score"], query, keys)[0]


def measure(score: Score, params: Any, factor: Array, batch: Any) -> tuple[Array, Array]:
    """Cross entropy, and the share of right samples; a tie of n keys counts 1 / n."""
    query, keys, right = batch
    logits = jax.vmap(functools.partial(logits_of, score, params))(query, keys) * factor
    is_right = jax.nn.one_hot(right, keys.shape[1], dtype=logits.dtype)
    largest = (logits == logits.max(axis=-1, keepdims=True)).astype(logits.dtype)
    share = (is_right * largest).sum(-1) / jnp.maximum(largest.sum(-1), 1)  # 0 for NaN
    return -(is_right * jax.nn.log_softmax(logits)).sum(-1).mean(), share.mean()


# --- training: one program for all relations and settings, one for all relations and seeds ---


def train(score: Score, config: Config, rng: Array, rate: Array, factor: Array) -> Any:
    """(cross entropy [R], share right [R]) on fresh samples after training R relations."""
    init_rng, data_rng, test_rng = jax.random.split(rng, 3)
    adam, clip = optax.scale_by_adam(), optax.clip_by_global_norm(1.0)

    def gradients(params: Any, factor: Array, batch: Any) -> Any:
        found, _ = jax.grad(functools.partial(measure, score), has_aux=True)(params, factor, batch)
        return clip.update(found, clip.init(params))[0]

    def step(state: Any, step: Array) -> tuple[Any, None]:
        params, moments = state
        batch = samples(jax.random.fold_in(data_rng, step), config.batch, config.keys)
        with jax.numpy_dtype_promotion("standard"):  # on which optax relies
            updates, moments = adam.update(jax.vmap(gradients)(params, factor, batch), moments)
        rates = rate * (1 - step.astype(rate.dtype) / config.steps)
        # One rate per relation, the first axis.
        less = jax.vmap(lambda rate, update: jax.tree.map(lambda leaf: -rate * leaf, update))
        return (optax.apply_updates(params, less(rates, updates)), moments), None

    one = init(score, init_rng, config.dim)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * len(RELATIONS)), one)
    (params, _), _ = jax.lax.scan(step, (params, adam.init(params)), jnp.arange(config.steps))
    tests = samples(test_rng, config.tests, config.keys)
    return jax.vmap(functools.partial(measure, score))(params, factor, tests)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_settings(score: Score, config: Config, rng: Array, rates: Array, factors: Array) -> Any:
    """[settings, R]: one seed with each rate and factor [settings, R]."""
    return jax.vmap(functools.partial(train, score, config, rng))(rates, factors)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_seeds(score: Score, config: Config, rngs: Array, rate: Array, factor: Array) -> Any:
    """[seeds, R]: each seed with the chosen rates and factors [R]."""
    return jax.vmap(lambda rng: train(score, config, rng, rate, factor))(rngs)


def run(config: Config) -> list[Row]:
    """A row per base seed, score and relation."""
    cells, rows = [*itertools.product(config.bases, config.scores)], []
    settings = dataclasses.asdict(config) | {"scores": None, "bases": None, "workdir": None}
    make_folder("workdir", config.workdir)
    for index, (base, name) in enumerate(cells):
        path = config.workdir / f"{score_folder(name)}_{base}.json"
        measure = functools.partial(_rows_of, config, name, base)
        program = lab.program_of(name, config.dim)
        found = lab.kept_rows(path, settings | {"score": program}, measure)
        rows += found
        missing = "" if found else ": missing"
        lab.say(f"{index + 1} of {len(cells)}: {name}, base {base}{missing}")
    return rows


def _rows_of(config: Config, name: str, base: int) -> list[Row]:
    """Chooses rate and factor of each relation on the first seed, and trains fresh seeds."""
    score, one_key = get_score(name), dataclasses.replace(config, scores=(), bases=(0,))
    rngs = jax.random.split(jax.random.key(base), 1 + config.seeds)
    settings = np.array([*itertools.product(config.rates, config.factors)], np.float32)
    each = np.repeat(settings[:, None], len(RELATIONS), axis=1)  # [settings, R, 2]
    swept = train_settings(score, one_key, rngs[0], each[..., 0], each[..., 1])
    loss, right = (np.asarray(array, np.float64) for array in swept)
    best = np.lexsort((loss, -right), axis=0)[0]  # the most right, then the lowest loss
    rate, factor = settings[best].T
    tested = train_seeds(score, one_key, rngs[1:], rate, factor)
    loss, right = (np.asarray(array, np.float64) for array in tested)
    rows = []
    for i, relation in enumerate(RELATIONS):
        row = {"base": base, "score": name, "relation": relation}
        row |= {"rate": significant(rate[i]), "factor": significant(factor[i])}
        row |= {"right": [round(x, 4) for x in right[:, i]], "loss": significant(loss[:, i].mean())}
        rows.append(row)
    return rows


# --- what came out ---


def matrix(rows: list[Row], second: bool = False) -> dict[str, dict[str, Row]]:
    """Rows by score and relation: those of the first base seed, or of the second."""
    bases = [*dict.fromkeys(row["base"] for row in rows)]
    found: dict[str, dict[str, Row]] = {}
    for row in lab.where(rows, base=bases[int(second)]) if len(bases) > second else ():
        found.setdefault(row["score"], {})[row["relation"]] = row
    return found


def means(cells: dict[str, dict[str, Row]]) -> dict[str, dict[str, float]]:
    """The mean share of right samples by score and relation."""
    return {
        score: {relation: float(np.mean(row["right"])) for relation, row in of_score.items()}
        for score, of_score in cells.items()
    }


def cells_with(sign: str, of: dict[str, dict[str, float]]) -> list[float]:
    """The means of the cells with this sign in `EXPRESSION`."""
    return [
        mean[relation]
        for score, mean in of.items()
        for relation, each in zip(RELATIONS, EXPRESSION.get(score, ""), strict=False)
        if each == sign
    ]


def largest_move(rows: list[Row]) -> float:
    """The largest difference of a cell's means in the two matrices, over its interval.

    The interval is six standard errors of the difference. A standard error is that of the seeds,
    and at least that of the number of test samples. Of 171 normal cells with 5 seeds in either
    matrix one exceeds this by chance with probability 0.05 (Student's t of 8 degrees of freedom).
    """
    first, second = matrix(rows), matrix(rows, second=True)
    moves = [0.0]
    for score, relation in itertools.product(first, RELATIONS):
        both = [np.array(cells[score][relation]["right"]) for cells in (first, second)]
        mean = np.mean(both)
        of_tests = mean * (1 - mean) / Config().tests
        variance = sum(max(right.var(ddof=1), of_tests) / len(right) for right in both)
        move = abs(both[0].mean() - both[1].mean())
        moves.append(move / (6 * math.sqrt(variance)) if move else 0.0)
    return max(moves)


def claims(rows: list[Row]) -> list[Claim]:
    """What each family of scores expresses and learns."""
    of = means(matrix(rows))
    products = [of[score] for score in PRODUCTS]
    by_relation = [[mean[relation] for mean in products] for relation in RELATIONS]
    gap = max(max(each) - min(each) for each in by_relation)
    three = ("nearest", "predecessor", "longest")
    most = max(mean[relation] for mean in products for relation in three)
    parity = {score for score, mean in of.items() if mean["parity"] >= LEARNED}
    wrong = len(parity ^ {"additive", "concat", "neural", "softcap"})
    additive, neural = (min(of[score].values()) for score in ("additive", "neural"))
    home = min(of[score][relation] for score, relation in AT_HOME.items())
    possible = float(np.mean(np.array(cells_with("+", of)) >= 0.95))
    column = "dot, general, scaled, softcap and softplus are one column: largest difference of mean"
    three_text = "no dot product expresses nearest, predecessor or longest: highest accuracy"
    only = "of all scores only additive, concat, neural and softcap learn parity (>= 99 %): number"
    learns = "cosine, distance, manhattan and dot learn the relations cosine, nearest, manhattan"
    longest = "cosine learns which key is longest, although it divides by the length: accuracy"
    known = "what is possible is learned: share of cells with known weights at 95 % and above"
    impossible = "a cell that is proved impossible is not learned: highest accuracy"
    return [
        Claim("largest move between two runs over the interval", largest_move(rows), high=1),
        Claim(f"{column} accuracy over relations", gap, high=0.03),
        Claim(three_text, most, high=0.5),
        Claim(f"{only} of scores for which this is wrong", wrong, high=0),
        Claim("additive learns something of every relation: lowest accuracy", additive, 0.8),
        Claim("neural learns something of every relation: lowest accuracy", neural, 0.85),
        Claim(f"{learns} and inner: lowest accuracy", home, 0.97),
        Claim(longest, of["cosine"]["longest"], 0.97),
        Claim(impossible, max(cells_with("-", of)), high=0.95),
        Claim(known, possible, 0.75),
    ]


def table(rows: list[Row]) -> str:
    """Accuracies in per cent: mean ± deviation over seeds, and the worst seed."""
    cells = matrix(rows)
    lines = []
    for score in in_order(cells):
        shares = [100 * np.array(cells[score][relation]["right"]) for relation in RELATIONS]
        lines.append([score, *(spread_and_worst([*each]) for each in shares)])
    return markdown(["% right (worst seed)", *RELATIONS], lines)


def in_order(cells: dict[str, dict[str, Row]]) -> list[str]:
    """The scores from the best on average, each followed by the one most like it."""
    left = {score: np.array([*mean.values()]) for score, mean in means(cells).items()}
    order = [max(left, key=lambda score: float(left[score].mean()))]
    while len(left) > 1:
        last = left.pop(order[-1])
        order.append(min(left, key=lambda score: float(np.abs(left[score] - last).sum())))
    return order


def plot(rows: list[Row]) -> dict[str, Figure]:
    """A heat map: scores down, relations across."""
    cells = matrix(rows)
    order, of = in_order(cells), means(cells)
    values = 100 * np.array([[of[score][relation] for relation in RELATIONS] for score in order])
    figure, (ax,) = plotting.new_figure(8.4, 1.2 + 0.36 * len(order))
    ax.imshow(values, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value > 55 else "black"
        text = "100" if value > 99.95 else f"{value:.1f}"
        ax.text(j, i, text, ha="center", va="center", color=color, fontsize=10)
        sign = EXPRESSION.get(order[i], "." * len(RELATIONS))[j]
        corner = {"+": "+", "-": "×", ".": ""}[sign]
        ax.text(j + 0.46, i - 0.06, corner, ha="right", va="bottom", color=color, fontsize=8)
    ax.set_xticks(range(len(RELATIONS)), [*RELATIONS])
    ax.set_yticks(range(len(order)), order)
    ax.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=10)
    ax.set_xticks(np.arange(len(RELATIONS) - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(len(order) - 1) + 0.5, minor=True)
    ax.grid(which="minor", color="white", lw=1.5)
    for i, gap in enumerate(np.abs(np.diff(values, axis=0)).mean(axis=1)):
        if gap > 5:  # per cent, mean over relations: another group
            ax.axhline(i + 0.5, color="white", lw=7)
    ax.tick_params(which="minor", length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_xlabel("% right; chance 12.5.   + weights are known   × no weights can")
    return {"relations": figure}


if __name__ == "__main__":
    main(__name__)
