"""Does attention reverse strings of any length, if source and target positions can be matched?

Source:   Delétang et al. 2022 ("Neural Networks and the Chomsky Hierarchy"): train on lengths 1-40,
          test on every length from 41 to 500, mean token accuracy; of the networks there, only
          those with a stack or a tape solve string reversal. Ruoss et al. 2023 for positions drawn
          at random from a larger range.
Command:  .venv/bin/python -m experiments.reversal.length_generalization
Time:     25 minutes on 2 CPU cores beside other jobs.
Expected: mean token accuracy over lengths 41-500 of at least 99.9 % for the best score and at least
          99 % for each of the four, five seeds, with 26 letters and with 2. Whole strings of 26
          letters that the model writes by itself: 99 % at length 500, 95 % at length 2,000 and 90 %
          at length 5,000 for each score, and 100 % for scaled dot.

The recipe is the task's default one (`reversal_comparison.py` says what its parts are for), trained
on lengths 1-40. The model has one cross attention from the letters written so far to those of the
source, and no other attention. Positions are sines and cosines, and those of the source count from
its end (`ANY_LENGTH` in `attention_jax/nn/config.py`). The i-th letter to write is the
i-th from the end: query and key then have the same code, and the model has to learn to look where
codes agree. These matching positions make it work, and they are put in by hand: one has to know
that the answer has the order of the source from its end. `length_ablations.py` removes them, and
the other parts of the recipe one by one.

Measured in addition to the source: whether the whole string is right, EOS included; letters that
the model predicts from its own (free running); lengths of 1,000 to 5,000.

These models get more information than the source's networks (where the end is, and which positions
belong together), have other sizes and another optimiser, write one letter after another where the
source's answer at once, and end their answers themselves. So the comparison does not show that its
Transformers were trained badly. It shows that positions which identify the matching letter suffice,
without a stack.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import MODEL, Reversal
from experiments.experiment import JSON, Expectation, ScoreNames, rounded, run_experiment
from experiments.reversal.arms import trained_arm
from experiments.reversal.length_evaluation import (
    free_running,
    peak_memory,
    teacher_forced,
    weights_on,
)
from experiments.reversal.length_figures import accuracy_figure, heat_map_figure
from experiments.reversal.length_generalization_report import report
from experiments.reversal.training_settings import TrainingSettings
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "recipe", "report", "run"]

TRAINED = 40  # length of the longest string of training
PROTOCOL = range(TRAINED + 1, 501)
DRAWN_LENGTH = 100  # of the string in the heat maps
LEAST_WEIGHT = 0.05  # smaller weights are not kept for the heat maps
BINS = 20  # points of the curve over the lengths of the protocol
# The scores for which there were expectations, and the share of whole strings by length.
EXPECTED_SCORES = ("additive", "dot", "general", "scaled")
GOALS = {500: 0.99, 2000: 0.95, 5000: 0.9}
FLAWLESS = "scaled"  # the score that was right on every string before the goals were set


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    There is one head.

    Attributes:
        scores: scores to train.
        alphabets: sizes of the alphabets of the strings.
        strings: test strings per length, with the previous letters given.
        every: step between the tested lengths from 41 to 500.
        far: lengths of the strings for free running; the first alphabet is tested on all of them,
            the others on those up to 500.
        far_strings: test strings for each of `far`.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = EXPECTED_SCORES
    alphabets: tuple[int, ...] = (26, 2)
    seeds: int = 5
    steps: int = 3000
    batch_size: int = 32
    learning_rate: float = Reversal.train.learning_rate
    strings: int = 2
    every: int = 1
    far: tuple[int, ...] = (20, 40, 100, 200, 500, 1000, 2000, 5000)
    far_strings: tuple[int, ...] = (100, 100, 100, 100, 100, 40, 20, 8)
    workdir: Path = Path("runs/length_generalization")

    def __post_init__(self) -> None:
        check_some(self, "scores", "alphabets")
        check_least(self, strings=1, every=1, far=1, far_strings=1)
        if len(self.far_strings) != len(self.far):
            raise ValueError(
                f"far_strings must be one for each of far {self.far}; got {self.far_strings}"
            )
        if min(self.far) > PROTOCOL[-1]:
            raise ValueError(f"far must have lengths up to {PROTOCOL[-1]}, too; got {self.far}")
        for score in self.scores:
            for letters in self.alphabets:
                self.training(score, letters)
        check_folder("workdir", self.workdir)

    def training(self, score: str, letters: int) -> Reversal:
        """Returns the settings of one run."""
        return dataclasses.replace(self.training_of(recipe(score)), letters=letters)


def recipe(score: str) -> Reversal:
    """Returns the task's default settings, for the lengths of this training."""
    longest = TRAINED + 1  # tokens of the source, SOS included
    model = dataclasses.replace(MODEL, score=score, normalizer=f"log_scaled(start={longest})")
    return Reversal(model=model, min_length=1, max_length=TRAINED)


QUICK = Config(
    scores=("scaled",), alphabets=(26,), seeds=2, steps=200, strings=2, every=200, far=(20, 100),
    far_strings=(8, 8),
)  # fmt: skip


def run(config: Config) -> JSON:
    """Trains and evaluates every score with every alphabet."""
    arms: JSON = {}
    for letters in config.alphabets:
        for score in config.scores:
            main = letters == config.alphabets[0]
            arms.setdefault(str(letters), {})[score] = _arm(config, score, letters, main=main)
    return {"arms": arms}


def _arm(config: Config, score: str, letters: int, *, main: bool) -> JSON:
    folder = config.workdir / f"{score_folder(score)}-{letters}"
    trained, _ = trained_arm(config.training(score, letters), folder)
    forced = teacher_forced(trained, PROTOCOL[:: config.every], strings=config.strings)
    counts = dict(zip(config.far, config.far_strings, strict=True))
    lengths = [length for length in config.far if main or length <= PROTOCOL[-1]]
    free = free_running(trained, lengths, strings=counts)
    tokens = {length: shares for length, (shares, _) in forced.items()}
    mean_tokens = np.mean(list(tokens.values()), axis=0)
    numbers: JSON = {
        "mean_tokens": rounded(mean_tokens, 6),
        "tokens": binned(tokens),
        "exact": {str(length): rounded(shares, 6) for length, (_, shares) in free.items()},
    }
    if main:
        longest = max(config.far)
        numbers["weights"] = sparse(weights_on(trained, DRAWN_LENGTH))
        numbers["memory_mib"] = {str(longest): round(peak_memory(trained, longest), 1)}
    print(
        f"{score}, {letters} letters: mean token accuracy {100 * mean_tokens.mean():.3f} %",
        flush=True,
    )
    return numbers


def binned(by_length: dict[int, np.ndarray]) -> JSON:
    """Returns means over neighbouring lengths, [seeds] by the mean length of each bin."""
    lengths = np.array(list(by_length))
    shares = np.array(list(by_length.values()))
    bins = np.array_split(np.arange(len(lengths)), min(BINS, len(lengths)))
    return {str(round(lengths[b].mean())): rounded(shares[b].mean(axis=0), 6) for b in bins}


def sparse(weights: np.ndarray) -> JSON:
    """Returns the weights that are not small, and where they are in the array [T, S]."""
    rows, columns = np.nonzero(weights >= LEAST_WEIGHT)
    return {
        "shape": list(weights.shape),
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "weights": rounded(weights[rows, columns], 2),
    }


CAPTIONS = {
    "length_accuracy": "Accuracy against length far beyond training, by score, mean and one"
    " deviation over seeds: letters right with the previous letters given, at lengths 41 to 500,"
    " in bins of neighbouring lengths; and whole strings right in free-running decoding, up to"
    " 5,000 letters.",
    "length_heatmaps": "Attention weights of each score while it reverses a string of 100 letters,"
    " two and a half times as long as the longest of training: they follow the anti-diagonal to"
    " its end. Weights below 0.05 are not drawn.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    main = next(iter(numbers["arms"].values()))
    return {
        "length_accuracy": accuracy_figure(numbers["arms"], trained=TRAINED),
        "length_heatmaps": heat_map_figure({score: arm["weights"] for score, arm in main.items()}),
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """Token accuracy as the source measures it, whole strings, and memory."""
    checks = []
    sampled = "a floor; over 1 million letters per score, so that 1e-4 wrong is known to 1e-5"
    main, *_ = numbers["arms"]
    for letters, arms in numbers["arms"].items():
        means = {score: float(np.mean(arm["mean_tokens"])) for score, arm in arms.items()}
        for score, mean in means.items():
            if score in EXPECTED_SCORES:
                claim = f"{score}, {letters} letters: mean token accuracy over lengths 41-500"
                checks.append(Expectation(claim, "", mean, 0.99, 1, sampled))
        claim = f"{letters} letters: mean token accuracy of the best score"
        checks.append(Expectation(claim, "", max(means.values()), 0.999, 1, sampled))
    for score, arm in numbers["arms"][main].items():
        for length, least in GOALS.items():
            if score in EXPECTED_SCORES and str(length) in arm["exact"]:
                claim = f"{score}, {main} letters: whole strings right at length {length:,}"
                right = float(np.mean(arm["exact"][str(length)]))
                low = 1.0 if score == FLAWLESS else least
                checks.append(Expectation(claim, "", right, low, 1, "the goal that was set"))
        for tested, memory in arm["memory_mib"].items():
            claim = f"{score}: MiB of temporary memory for a string of {tested} letters"
            checks.append(Expectation(claim, "", memory, 0, 2048, "the limit that was set"))
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
