"""How well does a small language model learn with each score?

Answer: After 600 steps dot and scaled dot are best and equally good (2.93 and 2.95 bits per
    character), and additive is 0.19 bits behind scaled dot.
Source: nanoGPT's smallest example, a model of characters on Shakespeare's plays; ours is smaller.
Command: .venv/bin/python -m experiments.bench.language --text FILE  # 20 minutes, beside other work

FILE is a text; the committed rows are of the 1.1 million characters of Shakespeare's plays that
github.com/karpathy/char-rnn has as data/tinyshakespeare/input.txt, which is not part of this
project. The model has two layers of 64 features and reads 64 characters. The factor of the logits
and the rate are chosen as in `learning.py`. The result is the cost of the last tenth of the text,
which no model learns from.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import make_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.text import MODEL, Text
from attention_jax.tasks.tokens import without_source
from attention_jax.tasks.vocabulary import FIRST
from attention_jax.training.task import TrainConfig
from experiments import lab
from experiments.bench.training import kept, with_score
from experiments.lab import FOUR_SCORES, Claim, Row, ScoreNames, markdown, spread_and_worst

CAPTIONS = {
    "language": "Loss on batches before they are learned, in nats per byte; means over seeds."
}
SMALL: Any = {
    "model": dataclasses.replace(MODEL, dim=64, hidden_dim=128, num_heads=2, dropout_rate=0.0),
    "train": TrainConfig(steps=600, batch_size=8),
    "length": 64,
}


@dataclasses.dataclass(frozen=True)
class DrawnText(Text):
    """The same task, whose batches are drawn on the device."""

    def batch(self, rng: jax.Array, *, size: int, length: int | None = None) -> Any:
        del length
        text = jnp.asarray(np.frombuffer(self.parts()[0], np.uint8))
        starts = jax.random.randint(rng, (size, 1), 0, len(text) - self.length)
        ids = FIRST + text[starts + jnp.arange(self.length + 1)[None, :]].astype(jnp.int32)
        return without_source(ids[:, :-1], ids[:, 1:])


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        text: the file, UTF-8.
        scores: scores to train.
        rates: Adam's highest learning rates, from low to high.
        factors: constant factors of the logits.
        seeds: trainings with the best factor and rate.
        budget: the number of steps is multiplied by this.
        workdir: folder of what is finished; it is not trained again.
    """

    text: Path = Path("tiny_shakespeare.txt")
    scores: ScoreNames = FOUR_SCORES
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    factors: tuple[float, ...] = (1 / 8, 1, 8)
    seeds: int = 3
    budget: float = 1.0
    workdir: Path = Path("runs/language")

    def __post_init__(self) -> None:
        lab.check_least(self, seeds=2, rates=1e-9, factors=1e-9, budget=1e-9)

    def task(self, score: str) -> Any:
        """The task with this score."""
        return with_score(DrawnText(self.text, **SMALL), score, self.seeds, self.budget)


QUICK = Config(scores=("scaled",), rates=(3e-3,), factors=(1,), seeds=2, budget=0.025)


def missing(config: Config) -> str:
    """Which file there is not."""
    return "" if config.text.is_file() else f"--text must be a file; got {config.text}"


def run(config: Config) -> list[Row]:
    """A row for each score."""
    make_folder("workdir", config.workdir)
    rows: list[Row] = []
    for index, score in enumerate(config.scores):
        path = config.workdir / f"{score_folder(score)}.json"
        found = kept(path, config.task(score), config.factors, config.rates)
        rows += [{"score": score, **row} for row in found]
        lab.say(f"{index + 1} of {len(config.scores)}: {score}", error=True)
    return rows


# --- what came out ---


def claims(rows: list[Row]) -> list[Claim]:
    """How far the scores are apart."""
    bits = {row["score"]: float(np.mean(row["by_seed"])) for row in rows}
    dot, additive = (bits[score] - bits["scaled"] for score in ("dot", "additive"))
    text = "bits of dot minus those of scaled dot, each with its best factor"
    return [
        Claim("bits per character of the best score", min(bits.values()), high=3.6),
        Claim(text, dot, low=-0.05, high=0.05),
        Claim("bits of additive minus those of scaled dot", additive, low=-0.05, high=0.05),
    ]


def table(rows: list[Row]) -> str:
    """Bits per character, and what was chosen."""
    head, lines = ["score", "bits per character (worst seed)", "factor", "rate", "parameters"], []
    for row in rows:
        bits = spread_and_worst(row["by_seed"], max)
        chosen = f"{row['factor']:g}", f"{row['rate']:g}", f"{row['parameters']:,}"
        lines.append([row["score"], bits, *chosen])
    return markdown(head, lines)


def plot(rows: list[Row]) -> dict[str, Any]:
    """The losses while the models learn."""
    figure, (ax,) = plotting.new_figure(5.2, 3.2, grid=True)
    for row in rows:
        nats = np.mean(row["curve"], axis=1)
        steps = row["every"] * (1 + np.arange(len(nats)))
        ax.plot(steps, nats, label=row["score"], ms=3, **lab.style(row["score"]))
    ax.set(xlabel="step", ylabel="nats per byte")
    ax.legend()
    return {"language": figure}


if __name__ == "__main__":
    lab.main(__name__)
