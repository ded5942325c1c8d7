"""How well does a small language model learn with each score?

Answer: After 600 steps scaled dot, cosine, softcap, softplus, nGPT, l2 and elliptical lie within
    0.02 bits of each other (2.98 to 3.00 bits per character). Power and yat are 0.03 behind scaled
    dot, tropical, general and manhattan 0.06, neural 0.15, additive 0.21 and the indexer 0.25: the
    last two are behind a model of 3-grams (3.13). Without the key-only part neural is 0.12 behind,
    additive 0.29.
Source: nanoGPT's smallest example, a model of characters on Shakespeare's plays; ours is smaller.
Command: .venv/bin/python -m experiments.bench.language --text FILE  # 1 to 5 minutes a score

FILE is a text; the committed rows are of the 1.1 million characters of Shakespeare's plays that
github.com/karpathy/char-rnn has as data/tinyshakespeare/input.txt, which is not part of this
project. The model has two layers of 64 features and reads 64 characters.

Models learn from the first eight tenths of the text, with Adam along a cosine, without warm-up. The
ninth tenth chooses, for each score, the deviation of the logits within rows at the start (as in
`maps.py`), and then Adam's highest rate: each time the value whose bits per character have the
smallest median over the seeds of the sweep. Where it is the last one that was tried, the next one
is tried, too. Other seeds then learn with this choice, and the last tenth measures them. A training
that diverges counts as 8 bits per character, the cost of a uniform guess of a byte.

The n-gram models of `ngrams.py` read the same eight tenths and are measured on the same last tenth.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import score_folder
from experiments import lab
from experiments.bench import ngrams
from experiments.bench.characters import SMALL, DrawnText, bits_of
from experiments.bench.map_rows import DIFFERENT, WITHOUT_KEY, tests_of, times_of
from experiments.bench.significance import rank_correlation
from experiments.bench.training import deviation_of, with_score
from experiments.lab import Claim, Row, ScoreNames, markdown, significant, spread

CAPTIONS = {
    "language": "Bits per character of the last tenth of the text: a point for each seed. Dotted:"
    " models of 5, 4 and 3 characters (n-grams)."
}
ORDERS = (1, 2, 3, 4, 5)  # of the n-gram models


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        text: the file, UTF-8.
        scores: scores to train; the sweep of hyperbolic takes more than 20 minutes on a CPU.
        rates: Adam's highest learning rates, from low to high; the first choice is of the three
            around `rate`.
        rate: at which the deviation is chosen.
        deviations: of the logits within rows at the start, from low to high; the first choice is
            of those between the first and the last.
        seeds: trainings of each deviation and rate.
        tests: trainings with the best deviation and rate, from other seeds.
        budget: the number of steps is multiplied by this.
        workdir: folder of what is finished; it is not trained again.
    """

    text: Path = Path("tiny_shakespeare.txt")
    scores: ScoreNames = (*(s for s in DIFFERENT if s != "hyperbolic"), *WITHOUT_KEY.values())
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    rate: float = 1e-2
    deviations: tuple[float, ...] = (1 / 64, 1 / 16, 1 / 4, 1.0, 4.0, 16.0)
    seeds: int = 2
    tests: int = 3
    budget: float = 1.0
    workdir: Path = Path("runs/language")

    def __post_init__(self) -> None:
        lab.check_least(self, rates=1e-9, deviations=1e-9, seeds=1, tests=2, budget=1e-9)
        if self.rate not in self.rates:
            raise ValueError(f"rate must be one of rates {self.rates}; got {self.rate}")

    def task(self, score: str) -> Any:
        """The task with this score."""
        task = with_score(DrawnText(self.text, **SMALL), score)
        steps = max(1, round(self.budget * task.train.steps))
        return dataclasses.replace(task, train=dataclasses.replace(task.train, steps=steps))


QUICK = Config(
    scores=("scaled",),
    rates=(3e-3,),
    rate=3e-3,
    deviations=(1.0,),
    tests=2,
    budget=0.01,
    workdir=Path("runs/quick/language"),
)


def missing(config: Config) -> str:
    """Which file there is not."""
    return "" if config.text.is_file() else f"--text must be a file; got {config.text}"


def run(config: Config) -> list[Row]:
    """A row for each score, and one for each n-gram model."""
    make_folder("workdir", config.workdir)
    start, text = time.monotonic(), DrawnText(config.text, **SMALL)
    parts, digests = text.tenths(), dict(text.feed(Path()).digests)
    baseline = functools.partial(ngrams.rows_of, parts[0], parts[2], ORDERS)
    rows = lab.kept_rows(config.workdir / "ngrams.json", [ORDERS, digests], baseline)
    for done, score in enumerate(config.scores, 1):
        task, path = config.task(score), config.workdir / f"{score_folder(score)}.json"
        sizes = [config.deviations, config.rates, config.rate, config.seeds, config.tests]
        settings = repr(dataclasses.replace(task, text=Path()))  # the digest is that of the text
        known_by = [settings, sizes, digests, task.model.known().digest]
        rows += lab.kept_rows(path, known_by, functools.partial(measured, config, score))
        lab.say_progress(done, len(config.scores), start, score)
    return rows


def measured(config: Config, score: str) -> list[Row]:
    """The row of a score: the sweep, the choice, and the bits of the test seeds."""
    task, begin = config.task(score), time.monotonic()
    own, (_, chooses, measures) = deviation_of(task), task.tenths()
    deviations, rates = config.deviations, config.rates
    sweep: list[list[list[float] | None]] = [[None] * len(rates) for _ in deviations]

    def bits_at(d: int, r: int) -> float:
        found = sweep[d][r]
        if found is None:
            cells = [(seed, deviations[d] / own, rates[r]) for seed in range(config.seeds)]
            sweep[d][r] = found = significant(bits_of(task, cells, chooses))
        return float(np.median(found))

    at, ends = rates.index(config.rate), len(deviations) > 2
    inner = range(ends, len(deviations) - ends)
    d = least_of(lambda d: bits_at(d, at), inner, len(deviations))
    around = range(max(at - 1, 0), min(at + 2, len(rates)))
    r = least_of(lambda r: bits_at(d, r), around, len(rates))
    deviation, rate = deviations[d], rates[r]
    tests = [(1000 + seed, deviation / own, rate) for seed in range(config.tests)]
    bits = bits_of(task, tests, measures)
    plain = dataclasses.replace(task, model=dataclasses.replace(task.model, score=score))
    leaves = jax.tree.leaves(jax.eval_shape(plain.init, jax.random.key(0)))
    row: Row = {"score": score, "by_seed": significant(bits), "deviation": deviation, "rate": rate}
    row |= {"own": significant(own), "parameters": sum(leaf.size for leaf in leaves)}
    row |= {"deviations": deviations, "rates": rates, "sweep": sweep}
    row |= {"steps": task.train.steps, "seconds": round(time.monotonic() - begin, 1)}
    return [row | {"device": jax.devices()[0].device_kind}]


def least_of(cost: Callable[[int], float], first: Sequence[int], number: int) -> int:
    """Which of 0, ..., number - 1 costs least: of `first`, and on where the least is the last."""
    costs = {i: cost(i) for i in first}
    while (least := min(costs, key=lambda i: costs[i])) in (min(costs), max(costs)):
        further = [i for i in (least - 1, least + 1) if i not in costs and 0 <= i < number]
        if not further:
            break
        costs |= {i: cost(i) for i in further}
    return least


# --- what came out ---


def is_at_an_edge(row: Row) -> bool:
    """Whether the choice is the first or last deviation, or the first or last rate."""
    ends = [(row["deviation"], row["deviations"]), (row["rate"], row["rates"])]
    return any(chosen in (values[0], values[-1]) for chosen, values in ends)


def claims(rows: list[Row]) -> list[Claim]:
    """How far the scores are apart; all bounds were written before the run."""
    scores, orders = lab.where(rows, "score"), lab.where(rows, "order")
    bits = {row["score"]: float(np.mean(row["by_seed"])) for row in scores}
    trigrams = next(row["bits"] for row in orders if row["order"] == 3)
    least, most, edges = min(bits.values()), max(bits.values()), sum(map(is_at_an_edge, scores))
    less = bits["additive"] - bits["scaled"], bits[WITHOUT_KEY["additive"]] - bits["scaled"]
    of_recall = tests_of((lab.content_of("maps") or {"rows": []})["rows"], "recall")
    both = [score for score in DIFFERENT if score in bits and score in of_recall]
    medians = [float(np.median(times_of(of_recall[score]))) for score in both]
    alike = rank_correlation(medians, [bits[score] for score in both])
    text = "recall's median steps and bits per character: rank correlation over"
    return [
        Claim("bits per character of the best score", least, high=3.6),
        Claim("bits of additive minus those of scaled dot", less[0], low=-0.05, high=0.05),
        Claim(
            "bits of additive without its key-only part minus those of scaled dot",
            less[1],
            low=-0.1,
            high=0.1,
        ),
        Claim(f"{text} {len(both)} scores", alike, low=0.7),
        Claim("bits of the worst score minus those of the best", most - least, low=0.1),
        Claim("bits of the best score minus those of trigrams", least - trigrams, high=0.0),
        Claim("scores whose choice is at an edge of the sweep", edges, high=4),
    ]


def table(rows: list[Row]) -> str:
    """Bits per character, and what was chosen; a * marks a choice at an edge of the sweep."""
    head = ["model", "bits per character (worst seed)", "minus scaled dot", "deviation (own)"]
    scaled = lab.column(rows, "by_seed", score="scaled")
    lines = []
    for row in lab.where(rows, "order"):
        cells = [f"{row['bits']:.3f}", *[""] * 3, f"{row['parameters']:,}"]
        lines.append((row["bits"], [f"{row['order']}-grams", *cells]))
    for row in lab.where(rows, "score"):
        both = [*zip(row["by_seed"], *scaled, strict=False)]  # the same seeds
        less = lab.plus_minus(*lab.gain(*zip(*both, strict=True))) if scaled else ""
        rate = f"{row['rate']:g}" + "*" * is_at_an_edge(row)
        bits = f"{spread(row['by_seed'])} ({max(row['by_seed']):.4g})"
        cells = [row["score"], bits, less, f"{row['deviation']:g} ({row['own']:.2g})", rate]
        lines.append((float(np.mean(row["by_seed"])), [*cells, f"{row['parameters']:,}"]))
    return markdown([*head, "rate", "parameters"], [line for _, line in sorted(lines)])


def plot(rows: list[Row]) -> dict[str, Any]:
    """The bits of the test seeds, in the order of the table, beside n-gram models."""
    scores = sorted(lab.where(rows, "score"), key=lambda row: float(np.mean(row["by_seed"])))
    names = [row["score"] for row in scores]
    figure, (ax,) = plotting.new_figure(6.4, 1.4 + 0.3 * len(names), grid=True)
    for y, row in enumerate(scores):
        look: Any = {"color": "0.5", "marker": "o"}
        if row["score"] in lab.FOUR_SCORES:
            look = plotting.style_of(plotting.index_of(row["score"]))
        ax.plot(row["by_seed"], [y] * len(row["by_seed"]), ls="", ms=5, alpha=0.7, **look)
    for row in lab.where(rows, "order")[2:]:
        ax.axvline(row["bits"], color="0.4", lw=1, ls=":")
        ax.text(row["bits"], -0.5, f"{row['order']}-grams", rotation=90, ha="right", va="top")
    ax.set(xlabel="bits per character", ylim=(len(names) - 0.5, -0.7))
    ax.set_yticks(range(len(names)), names)
    return {"language": figure}


if __name__ == "__main__":
    lab.main(__name__)
