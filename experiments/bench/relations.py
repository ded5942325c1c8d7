"""Which relations between a query and a key can a score express, and which does it learn?

Answer:   Dot, scaled, general, softcap and softplus learn inner products (99 %) and none of the
          other relations (25 % on the longest key). One learned number more, q . k + w |k|^2, also
          learns the nearest, the farthest and the longest key (99 %). A cosine of projections with
          biases learns six relations. Only additive, concat and neural stay above 81 % in all nine.
Source:   chapter 38, exercise 38.6, on when additive attention is worth its price; the formulas of
          the literature, each in the docstring of its score. The rest is ours.
Command:  .venv/bin/python -m experiments.bench.relations   # on an H100; hours on 2 CPU cores

The model is one attention with linear projections (with bias) of queries and keys to D = 16
features, and nothing else. It sees a query q and 8 keys k in R^4, and its loss is the cross entropy
of the attention weights against the right key (`RELATIONS`). Inputs are standard normal numbers;
those of parity are two bits, -1 or 1. In predecessor at least one key is below the query.

For every cell of the table, the learning rate and a constant factor on the logits are chosen by the
median accuracy of three seeds on validation data; ties are decided by the mean loss. Fresh seeds
with the chosen values are measured on fresh test data. All relations share the inputs of a step.
The whole matrix is measured twice, from two base seeds.

The scores of `controls.py`, additive with four times the hidden units, and additive and neural
without their key-only part, tell which part of a score makes a difference. They have more
parameters or fewer, as the table says.

Where a relation is not learned, the score cannot express it or does not learn it: `expression.py`
tells which.
"""

import dataclasses
import functools
import itertools
import math
import time
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
from experiments.bench.map_rows import WITHOUT_KEY
from experiments.bench.one_attention import RELATIONS as RELATIONS
from experiments.bench.one_attention import init, measure, samples
from experiments.lab import Claim, Row, main, markdown, significant, spread_and_worst

Array = jax.Array
PRODUCTS = ("dot", "general", "scaled", "softcap", "softplus")
AT_HOME = {"cosine": "cosine", "distance": "nearest", "manhattan": "manhattan", "dot": "inner"}
LEARNED = 0.99
CONTROLS = (
    *("additive(hidden_dim=64)", *WITHOUT_KEY.values()),
    *(f"experiments.bench.controls:{name}" for name in ("Projected", "Features", "WithLength")),
)
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
        trials: seeds that choose rate and factor.
        seeds: trainings with the chosen rate and factor.
        steps: optimiser steps.
        batch: samples per step.
        tests: samples of validation and of test data.
        keys: keys per sample.
        dim: D, the features of projected queries and keys.
        workdir: folder of rows by score; a score that is finished there is not trained again.
    """

    scores: lab.ScoreNames = (*SCORES, *CONTROLS)
    bases: tuple[int, ...] = (0, 1)
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    factors: tuple[float, ...] = tuple(4.0**k for k in range(-3, 4))
    trials: int = 3
    seeds: int = 5
    steps: int = 1000
    batch: int = 64
    tests: int = 4096
    keys: int = 8
    dim: int = 16
    workdir: Path = Path("runs/relations")

    def __post_init__(self) -> None:
        lab.check_least(self, bases=0, rates=0, factors=0, trials=1, seeds=2, steps=1, batch=1)
        lab.check_least(self, tests=2, keys=2, dim=1)


QUICK = Config(
    ("dot", "additive"), (0, 1), (0.01,), (1,), 1, 2, 3, 8, 16, workdir=Path("runs/quick/relations")
)


# --- training: all relations, settings and seeds in one program ---


def train(score: Score, config: Config, rng: Array, rate: Array, factor: Array) -> Any:
    """(cross entropy [R], share right [R]) on fresh samples after training R relations.

    Each relation has a rate and a factor [R].
    """
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

    def test(index: Array) -> Any:  # in small batches, as all settings and seeds do it at once
        batch = samples(jax.random.fold_in(test_rng, index), config.batch, config.keys)
        return jax.vmap(functools.partial(measure, score))(params, factor, batch)

    tested = jax.lax.map(test, jnp.arange(-(-config.tests // config.batch)))
    return jax.tree.map(lambda of_batches: of_batches.mean(0), tested)


@functools.partial(jax.jit, static_argnums=(0, 1))
def train_all(score: Score, config: Config, rngs: Array, rates: Array, factors: Array) -> Any:
    """[settings, seeds, R]: each seed with each rate and factor [settings, R]."""
    of_seeds = jax.vmap(functools.partial(train, score, config), (0, None, None))
    with jax.default_matmul_precision("highest"):  # a GPU would round the inputs of a product
        return jax.vmap(of_seeds, (None, 0, 0))(rngs, rates, factors)


def run(config: Config) -> list[Row]:
    """A row per base seed, score and relation."""
    cells = [
        (base, score)
        for base, score in itertools.product(config.bases, config.scores)
        if base == config.bases[0] or score in SCORES  # a control is measured once
    ]
    rows: list[Row] = []
    settings = dataclasses.asdict(config) | {"scores": None, "bases": None, "workdir": None}
    make_folder("workdir", config.workdir)
    start = time.monotonic()
    for done, (base, name) in enumerate(cells, 1):
        measure = functools.partial(_rows_of, config, name, base)
        program = lab.program_of(name, config.dim)
        path = config.workdir / f"{score_folder(name)}_{base}.json"
        rows += lab.kept_rows(path, settings | {"score": program}, measure, group=name)
        lab.say_progress(done, len(cells), start, f"{name}, base {base}")
    return rows


def _rows_of(config: Config, name: str, base: int) -> list[Row]:
    """Chooses rate and factor of each relation on the first seeds, and trains fresh seeds."""
    score, one_key = get_score(name), dataclasses.replace(config, scores=(), bases=(0,))
    rngs = jax.random.split(jax.random.key(base), config.trials + config.seeds)
    settings = np.array([*itertools.product(config.rates, config.factors)], np.float32)
    each = np.repeat(settings[:, None], len(RELATIONS), axis=1)  # [settings, R, 2]
    swept = train_all(score, one_key, rngs[: config.trials], each[..., 0], each[..., 1])
    loss, right = (np.asarray(array, np.float64) for array in swept)  # [settings, trials, R]
    medians = np.median(right, axis=1)
    best = np.lexsort((loss.mean(1), -medians), axis=0)[0]  # the most right, then the lowest loss
    rate, factor = settings[best].T
    tested = train_all(score, one_key, rngs[config.trials :], rate[None], factor[None])
    loss, right = (np.asarray(array, np.float64)[0] for array in tested)  # [seeds, R]
    leaves = jax.tree.leaves(init(score, rngs[0], config.dim))
    rows = []
    for i, relation in enumerate(RELATIONS):
        row = {"base": base, "score": name, "relation": relation}
        row |= {"parameters": sum(leaf.size for leaf in leaves)}
        row |= {"rate": significant(rate[i]), "factor": significant(factor[i])}
        row |= {"right": [round(x, 4) for x in right[:, i]], "loss": significant(loss[:, i].mean())}
        sweep = medians[:, i].reshape(len(config.rates), len(config.factors))
        inside = [
            0 < x < n - 1 for x, n in zip(divmod(best[i], sweep.shape[1]), sweep.shape, strict=True)
        ]
        row |= {"interior": all(inside), "validation": sweep.round(4).tolist()}
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
    """What each family of scores expresses and learns; the older claims are without `CONTROLS`."""
    of_scores = [row for row in rows if row["score"] not in CONTROLS]
    of = means(matrix(of_scores))
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
    without = means(matrix(lab.where(rows, score=WITHOUT_KEY["additive"])))
    learned = sum(mean >= 0.9 for of_score in without.values() for mean in of_score.values())
    return [
        Claim("largest move between two runs over the interval", largest_move(of_scores), high=1),
        Claim(f"{column} accuracy over relations", gap, high=0.03),
        Claim(three_text, most, high=0.5),
        Claim(f"{only} of scores for which this is wrong", wrong, high=0),
        Claim("additive learns something of every relation: lowest accuracy", additive, 0.8),
        Claim("neural learns something of every relation: lowest accuracy", neural, 0.85),
        Claim(f"{learns} and inner: lowest accuracy", home, 0.97),
        Claim(longest, of["cosine"]["longest"], 0.97),
        Claim(impossible, max(cells_with("-", of)), high=0.95),
        Claim(known, possible, 0.75),
        Claim("additive without its key-only part: relations learned at 90 %", learned, 5),
        Claim(
            "an edge of the sweep is better than its interior: largest gain on validation data,"
            " parity excepted",
            max(edge_gain(row) for row in rows if row["relation"] != "parity"),
            high=0.02,
        ),
    ]


def edge_gain(row: Row) -> float:
    """How much better the best setting is than the best inside the sweep, on validation data."""
    sweep = np.array(row["validation"])
    inside = sweep[1:-1, 1:-1]
    return float(sweep.max() - inside.max()) if inside.size else math.nan


def table(rows: list[Row]) -> str:
    """Accuracies in per cent: mean ± deviation over seeds (worst seed); and what a score has."""
    cells = matrix(rows)
    lines, having = [], []
    for score in in_order(cells):
        of_score = [cells[score][relation] for relation in RELATIONS]
        shares = [100 * np.array(row["right"]) for row in of_score]
        lines.append([short(score), *(spread_and_worst([*each]) for each in shares)])
        signs = EXPRESSION.get(score, "." * len(RELATIONS))
        learned = sum(share.mean() >= 90 for share in shares)
        edges = [100 * edge_gain(row) for row in of_score if not row["interior"]]
        at_edge = f"{len(edges)}; {max(edges, default=0):.1f}"
        counts = (of_score[0]["parameters"], learned, *(signs.count(sign) for sign in "+-."))
        having.append([short(score), *map(str, counts), at_edge])
    head = ["score", "parameters", f"learned at 90 %, of {len(RELATIONS)}", "weights are known"]
    head += ["no weights can", "open", "chosen at an edge of the sweep; largest gain (points)"]
    return "\n\n".join(
        [markdown(["% right (worst seed)", *RELATIONS], lines), markdown(head, having)]
    )


def short(score: str) -> str:
    """The name of a score without its module."""
    return score.rpartition(":")[2]


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
    figure, (ax,) = plotting.new_figure(9.2, 1.2 + 0.36 * len(order))
    ax.imshow(values, cmap="YlGnBu", vmin=0, vmax=100, aspect="auto")
    for (i, j), value in np.ndenumerate(values):
        color = "white" if value > 55 else "black"
        text = "100" if value > 99.95 else f"{value:.1f}"
        ax.text(j, i, text, ha="center", va="center", color=color, fontsize=10)
        sign = EXPRESSION.get(order[i], "." * len(RELATIONS))[j]
        corner = {"+": "+", "-": "×", ".": ""}[sign]
        ax.text(j + 0.46, i - 0.06, corner, ha="right", va="bottom", color=color, fontsize=8)
    ax.set_xticks(range(len(RELATIONS)), [*RELATIONS])
    ax.set_yticks(range(len(order)), [*map(short, order)])
    ax.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=10)
    ax.set_xticks(np.arange(len(RELATIONS) - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(len(order) - 1) + 0.5, minor=True)
    ax.grid(which="minor", color="white", lw=1.5)
    for i, gap in enumerate(np.abs(np.diff(values, axis=0)).mean(axis=1)):
        if gap > 5:  # per cent, mean over relations: another group
            ax.axhline(i + 0.5, color="white", lw=7)
    ax.tick_params(which="minor", length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("% right; chance 12.5.   + weights are known   × no weights can")
    return {"relations": figure}


if __name__ == "__main__":
    main(__name__)
