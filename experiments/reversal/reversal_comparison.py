"""Which score functions learn to reverse strings, and how long may the strings be?

Answer: All four: trained on 3 to 8 letters, each reverses 100 % of the test strings of 3 to 500
    letters, with every seed.
Source: chapter 38 ("Attention Variants"), §38.6: its figure of training loss; a GRU
    encoder-decoder, four scores, one run each. The lengths beyond training are ours.
Command: .venv/bin/python -m experiments.reversal.reversal_comparison  # 4 minutes on 2 CPU cores

The settings are the same for all scores, and are the defaults of `scripts/train.py` (`MODEL` and
`Reversal` in `attention_jax/tasks/reversal.py`). They were chosen on other test strings than those
of this experiment. The models of `gru_padding.py` count positions from the start of the string.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attention_jax.reports import plotting
from attention_jax.runs.metrics_file import read_lines
from attention_jax.scores import score_folder
from attention_jax.tasks.evaluation import accuracies
from attention_jax.tasks.reversal import Reversal
from experiments import lab
from experiments.lab import Claim, Row, ScoreNames, column, where
from experiments.reversal.arms import TrainingSettings, attention_on, trained_arms

TRAINED = range(Reversal.min_length, Reversal.max_length + 1)
LONGER = ((10, 1000), (20, 1000), (50, 1000), (200, 200), (500, 100))
WORD = "reversal"  # its attention is drawn


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train.
        strings: test strings for each length of training.
        longer: (length, number of test strings) beyond training.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = ("additive", "dot", "general", "scaled")
    seeds: int = 5
    learning_rate: float = Reversal.train.learning_rate
    strings: int = 1000
    longer: tuple[tuple[int, int], ...] = LONGER
    workdir: Path = Path("runs/reversal_comparison")

    def __post_init__(self) -> None:
        lab.check_least(self, strings=1, longer=1)

    def task(self, score: str) -> Reversal:
        """The task's default settings, with this score."""
        return self.training_of(Reversal(), score=score)


QUICK = Config(scores=("additive",), seeds=2, steps=25, strings=50, longer=((10, 20), (200, 20)))


def run(config: Config) -> list[Row]:
    """Rows of each score: loss and accuracy by step, accuracies by length, speed, and weights."""
    rows: list[Row] = []
    arms = [({"score": score}, config.task(score)) for score in config.scores]
    for labels, trained in trained_arms(arms, config.workdir):
        score = labels["score"]
        folder = config.workdir / score_folder(score)
        sessions = read_lines(folder / "timing.jsonl")  # several if the run was stopped and resumed
        speed = sessions[-1].get("steps_per_second") if sessions else None
        rows.append({"score": score, "steps_per_second": speed})
        for line in read_lines(folder / "metrics.jsonl"):
            logged = {name: lab.significant(line[name]) for name in ("loss", "accuracy")}
            rows.append({"score": score, "step": line["step"], **logged})
        tests = [(TRAINED, config.strings), *(((n,), strings) for n, strings in config.longer)]
        for lengths, strings in tests:
            by_length = accuracies(trained.task, trained.params, lengths, strings=strings)
            for length, shares in by_length.items():
                letters, _, right = ([round(float(s), 6) for s in each] for each in shares)
                rows.append({"score": score, "length": length, "letters": letters, "exact": right})
            percent = _percent(exact(where(rows, score=score), lengths)[0])
            lab.say(f"{score}, lengths {[*lengths]}: {percent} % of strings right")
        weights, written, read = attention_on(WORD, trained)
        rows.append({"score": score, "weights": weights, "written": written, "read": read})
    return rows


# --- what came out ---


def exact(rows: list[Row], lengths: Sequence[int]) -> np.ndarray:
    """Shares of whole strings right, a mean over these lengths: [scores, seeds]."""
    tested = [row for row in rows if row.get("length") in lengths]
    by_score = {score: column(tested, "exact", score=score) for score in column(tested, "score")}
    return np.array([np.mean(shares, axis=0) for shares in by_score.values()])


def claims(rows: list[Row]) -> list[Claim]:
    """Every score writes whole strings right, at the lengths of training and beyond."""
    trained, text = exact(rows, TRAINED), "exact match, lengths 10, 20 and 50, each"
    near = np.array([exact(rows, [length]) for length in (10, 20, 50)])
    at_200, at_500 = (exact(rows, [length]).mean(1).min() for length in (200, 500))
    return [
        Claim("exact match, lengths 3-8: least mean of a score", trained.mean(1).min(), 0.999, 1),
        Claim("exact match, lengths 3-8: worst seed of any score", trained.min(), 0.995, 1),
        Claim(f"{text}: least mean of a score", near.mean(2).min(), 0.995, 1),
        Claim(f"{text}: worst seed of any score", near.min(), 0.98, 1),
        Claim("exact match, length 200: least mean", at_200, 0.99, 1),
        Claim("exact match, length 500: least mean", at_500, 0.95, 1),
    ]


def table(rows: list[Row]) -> str:
    """The share of whole strings right by score and length, in %, and how soon letters are."""
    beyond = [length for length in dict.fromkeys(column(rows, "length")) if length not in TRAINED]
    heads = ["score", "lengths 3-8", *(f"length {length}" for length in beyond)]
    heads += ["steps until 99 % of letters right", "steps per second, all seeds"]
    columns = [exact(rows, TRAINED), *(exact(rows, [length]) for length in beyond)]
    lines = []
    for index, score in enumerate(dict.fromkeys(column(rows, "score"))):
        (speed,) = column(rows, "steps_per_second", score=score)
        cells = (_percent(by_score[index]) for by_score in columns)
        lines.append((score, *cells, _soon(rows, score), f"{speed:.0f}" if speed else "not known"))
    note = (
        "Whole strings right, %: mean ± deviation over seeds (worst), or one number if equal."
        " Steps: until 99 % of the letters of a training batch are right, given those before."
    )
    return f"{note}\n\n{lab.markdown(heads, lines)}"


def _soon(rows: list[Row], score: str) -> str:
    """The first logged step with 99 % of the letters right: mean ± deviation (the slowest seed)."""
    lines = where(rows, "accuracy", score=score)
    right = np.array(column(lines, "accuracy")) >= 0.99
    if not right.any(axis=0).all():
        return "not by all seeds"
    steps = np.array(column(lines, "step"))[right.argmax(axis=0)]
    return lab.spread_and_worst(steps, max)


def _percent(by_seed: np.ndarray) -> str:
    if np.ptp(by_seed) == 0:
        return f"{100 * by_seed[0]:g}"
    return lab.spread_and_worst(100 * by_seed)


CAPTIONS = {
    "reversal_heatmaps": "Attention weights of each score while it writes a word backwards: they"
    " follow the anti-diagonal, and the query that writes EOS attends to SOS.",
    "reversal_losses": "Training loss against the step for each score: geometric means over seeds,"
    " and bands of one standard deviation of the logarithms on either side.",
}


def plot(rows: list[Row]) -> dict[str, Any]:
    """Weights and training losses of each score."""
    panels = {
        row["score"]: (np.array(row["weights"]), row["written"], row["read"])
        for row in where(rows, "weights")
    }
    names: Any = {"ylabel": "letter written (query)", "xlabel": "source letter (key)"}
    heatmaps = plotting.weight_heatmaps(panels, **names)
    losses, (ax,) = plotting.new_figure(6.4, 3.8, grid=True)
    for score in panels:
        steps, values = (column(where(rows, "loss", score=score), x) for x in ("step", "loss"))
        index = plotting.index_of(score, [*panels])
        plotting.draw_band(ax, steps, np.array(values), index=index, label=score, log=True)
    seeds = len(values[0])
    ax.set_title(f"String reversal: geometric mean ± sd of logarithms, {seeds} seeds")
    ax.set(xlabel="step", ylabel="loss (nats per token)", yscale="log")
    ax.legend()
    return {"reversal_heatmaps": heatmaps, "reversal_losses": losses}


if __name__ == "__main__":
    lab.main(__name__)
