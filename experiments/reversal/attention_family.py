"""Which kinds of attention learn to reverse strings, and which cannot?

Source:   Luong, Pham and Manning 2015, section 3.2 (local-m, local-p); See, Liu and Manning 2017,
          section 2.3 (coverage); Raffel et al. 2017 (monotonic); Vaswani et al. 2017, section 3.2.2
          (heads); chapter 38 ("Attention Variants"), exercise 38.5: where should a local window be
          centred for reversal?
Command:  .venv/bin/python -m experiments.reversal.attention_family
Time:     15 minutes on 2 CPU cores (measured beside other work).
Expected: exact match of at least 99 % at lengths 3-8 for every score and kind of attention, three
          seeds. Two kinds reverse only with an encoder: a window around the diagonal, i - D to
          i + D, which does not hold the letter to write, and monotonic attention, which cannot go
          back. The encoder's self attention carries the letters to where these two look. Without
          an encoder both fail, a window around S - 1 - i (the answer to the exercise) still
          reverses, and attention to everything mostly does.

`reversal_comparison.py` trains the four scores of the literature. The window has radius 2: 5 of at
most 8 letters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.reversal.evaluation import LETTER_AXES, evaluate, reverse
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig
from attention_jax.training.loop import LoopConfig
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.reversal.arms import (
    EXTRAPOLATION_LENGTH,
    TRAINED_LENGTHS,
    accuracies,
    heat_map,
    mean_over_lengths,
    trained_arm,
)

# Arm -> settings that differ from the default model's, whose score is scaled dot.
ARMS: dict[str, dict[str, Any]] = {
    "cosine": {"score": "cosine"},
    "distance": {"score": "distance"},
    "concat": {"score": "concat"},
    "softcap": {"score": "softcap"},
    "heads 4": {"num-heads": 4},
    "local-p": {"attention": "local-p"},
    "local-m, anti-diagonal": {"attention": "local-m", "alignment": "reversed"},
    "coverage": {"attention": "coverage", "score": "additive"},
    "local-m, diagonal": {"attention": "local-m", "alignment": "monotonic"},
    "monotonic": {"attention": "monotonic"},
    "no encoder": {"encoder-layers": 0},
    "no encoder, local-m, anti-diagonal": {
        "encoder-layers": 0, "attention": "local-m", "alignment": "reversed",
    },
    "no encoder, local-m, diagonal": {
        "encoder-layers": 0, "attention": "local-m", "alignment": "monotonic",
    },
    "no encoder, monotonic": {"encoder-layers": 0, "attention": "monotonic"},
}  # fmt: skip
MUST_FAIL = ("no encoder, local-m, diagonal", "no encoder, monotonic")
DRAWN = {  # arm -> title
    "local-m, anti-diagonal": "local-m, anti-diagonal",
    "local-p": "local-p",
    "coverage": "coverage",
    "local-m, diagonal": "local-m, diagonal",
    "monotonic": "monotonic",
    "heads 4": "4 heads (mean)",
    "no encoder, local-m, anti-diagonal": "no encoder,\nlocal-m, anti-diagonal",
    "no encoder, local-m, diagonal": "no encoder,\nlocal-m, diagonal",
    "no encoder, monotonic": "no encoder,\nmonotonic",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; `ReversalConfig` holds those of the training.

    Attributes:
        seeds: trainings per arm.
        steps: optimiser steps per training.
        arms: which arms to train.
        strings: test strings per length.
        beams: width of the beam search that is compared with greedy decoding.
        word: the word whose attention is drawn.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    seeds: int = 3
    steps: int = 2500
    arms: tuple[str, ...] = tuple(ARMS)
    strings: int = 1000
    beams: int = 4
    word: str = "reversal"
    workdir: Path = Path("runs/attention_family")

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms must be of {', '.join(ARMS)}; got {arm!r}")
            self.training(arm)
        if not self.arms:
            raise ValueError("arms must be at least one; got none")
        for name in ("strings", "beams"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not VOCABULARY.encode(self.word):
            raise ValueError("word must have at least one letter; got none")
        check_folder("workdir", self.workdir)

    def training(self, arm: str) -> ReversalConfig:
        """Returns the settings of one run."""
        settings = {name.replace("-", "_"): value for name, value in ARMS[arm].items()}
        return ReversalConfig(
            model=Seq2SeqConfig().with_settings(**settings),
            loop=LoopConfig(seeds=self.seeds, steps=self.steps),
        )


QUICK = Config(seeds=1, steps=100, arms=("cosine",), strings=50, beams=2)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm."""
    numbers: JSON = {"arms": {}}
    for arm in config.arms:
        workdir = config.workdir / arm.replace(", ", "-").replace(" ", "-")
        trained, measured = trained_arm(config.training(arm), workdir)
        lengths = [*TRAINED_LENGTHS, EXTRAPOLATION_LENGTH]
        evaluations = evaluate(trained, lengths=lengths, strings=config.strings)
        searched = evaluate(
            trained, lengths=TRAINED_LENGTHS, strings=config.strings, beams=config.beams
        )
        numbers["arms"][arm] = {
            **measured,
            "settings": ARMS[arm],
            "accuracy": accuracies(evaluations),
            "accuracy_beam": accuracies(searched),
            **heat_map(reverse(trained, [config.word])[0]),
        }
    return numbers


CAPTIONS = {
    "attention_family": "Attention weights of each kind of attention while it writes a word"
    " backwards. Windows around the diagonal and monotonic attention look where the encoder has"
    " moved the letters.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the arms of `DRAWN`; returns no figure if none of them was trained."""
    word = numbers["config"]["word"]
    panels = {
        title: (
            np.array(numbers["arms"][arm]["weights"]),
            numbers["arms"][arm]["row_labels"],
            list(word),
        )
        for arm, title in DRAWN.items()
        if arm in numbers["arms"]
    }
    if not panels:
        return {}
    return {"attention_family": plotting.weight_heatmaps(panels, columns=3, **LETTER_AXES)}


def expectations(numbers: JSON) -> list[Expectation]:
    """Every kind reverses, except those of `MUST_FAIL`."""
    checks = []
    for arm, measured in numbers["arms"].items():
        exact = mean_over_lengths(measured["accuracy"], "free_running_exact", TRAINED_LENGTHS)
        if arm in MUST_FAIL:
            low, high, value = 0.0, 0.5, exact.max()
        else:  # "no encoder", one block without projections, mostly reverses
            low, high, value = (0.9 if arm == "no encoder" else 0.98), 1.0, exact.min()
        claim = f"{arm}: exact match of lengths 3-8, {'best' if arm in MUST_FAIL else 'worst'} seed"
        checks.append(Expectation(claim, "", float(value), low, high, "a clear margin"))
    return checks


def report(numbers: JSON) -> str:
    """Returns the table of README, as Markdown."""
    lines = [
        "| attention | settings of `scripts/train.py` | exact match, lengths 3-8 (mean ± sd; worst"
        f" seed) | the same, {numbers['config']['beams']} beams | letters right at length 10 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, measured in numbers["arms"].items():
        accuracy = measured["accuracy"]
        exact = 100 * mean_over_lengths(accuracy, "free_running_exact", TRAINED_LENGTHS)
        mean, deviation = mean_and_deviation(exact)
        searched = 100 * mean_over_lengths(
            measured["accuracy_beam"], "free_running_exact", TRAINED_LENGTHS
        )
        far = 100 * mean_over_lengths(accuracy, "free_running_tokens", [EXTRAPOLATION_LENGTH])
        far_mean, far_deviation = mean_and_deviation(far)
        flags = " ".join(f"--{name} {value}" for name, value in ARMS[arm].items())
        note = " (must fail)" if arm in MUST_FAIL else ""
        lines.append(
            f"| {arm}{note} | `{flags}` | {mean:.2f} ± {deviation:.2f} %; {exact.min():.2f} %"
            f" | {searched.mean():.2f} % | {far_mean:.1f} ± {far_deviation:.1f} % |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_experiment(__name__)
