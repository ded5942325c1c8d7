"""Which kinds of attention learn to reverse strings, and which cannot?

Source:   Luong, Pham and Manning 2015, section 3.2 (local-m, local-p); See, Liu and Manning 2017,
          section 2.3 (coverage); Raffel et al. 2017 (monotonic); Vaswani et al. 2017, section 3.2.2
          (heads); chapter 38 ("Attention Variants"), exercise 38.5: where should a local window be
          centred for reversal?
Command:  .venv/bin/python -m experiments.reversal.attention_family
Time:     8 to 15 minutes on 2 CPU cores (measured beside other work).
Expected: exact match of at least 99 % at lengths 3-8 for every score and kind of attention, three
          seeds, except two: a window around the diagonal, i - D to i + D, which does not hold the
          letter to write, and monotonic attention, which cannot go back, should fail.

These two did not fail: the encoder's self attention carries the letters to where they look. So the
arms without an encoder were added after the first run. There nothing carries the letters.
`padding_mask.py` trains the four scores of the literature. The window has radius 2: 5 of at most 8
letters. The models have the settings for short strings (`SHORT_STRINGS` in `training_settings.py`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_jax.nn.config import ModelConfig
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.evaluation import Accuracies
from attention_jax.tasks.reversal import Reversal
from experiments.experiment import JSON, ScoreNames, run_experiment
from experiments.reversal.arms import (
    EXTRAPOLATION_LENGTH,
    TRAINED_LENGTHS,
    accuracies,
    heat_map,
    trained_arm,
)
from experiments.reversal.attention_family_report import SCORES, expectations, report
from experiments.reversal.strings import LETTER_AXES, evaluate, reverse
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings, check_word
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

# Arm -> settings that differ from the default model's, whose score is scaled dot.
ARMS: dict[str, dict[str, Any]] = {
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
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores with which all queries attend to all keys.
        arms: which other kinds of attention to train.
        num_heads: heads of every attention, except in the arm "heads 4".
        strings: test strings per length.
        beams: width of the beam search that is compared with greedy decoding.
        word: the word whose attention is drawn.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = SCORES
    arms: tuple[str, ...] = tuple(ARMS)
    num_heads: int = ModelConfig.num_heads
    strings: int = 1000
    beams: int = 4
    word: str = "reversal"
    workdir: Path = Path("runs/attention_family")

    def __post_init__(self) -> None:
        for arm in self.arms:
            if arm not in ARMS:
                raise ValueError(f"arms must be of {', '.join(ARMS)}; got {arm!r}")
        if not (self.arms or self.scores):
            raise ValueError("arms or scores must be at least one; got none")
        for arm in (*self.scores, *self.arms):
            self.training(arm)
        check_least(self, strings=1, beams=1)
        check_word(self.word)
        check_folder("workdir", self.workdir)

    def training(self, arm: str) -> Reversal:
        """Returns the settings of one run."""
        settings = {name.replace("-", "_"): value for name, value in settings_of(arm).items()}
        return self.training_of(SHORT_STRINGS, **{"num_heads": self.num_heads, **settings})


def settings_of(arm: str) -> dict[str, Any]:
    """Returns the settings of one of `ARMS`, or of a score."""
    return ARMS.get(arm, {"score": arm})


QUICK = Config(scores=("cosine",), arms=(), seeds=1, steps=100, strings=50, beams=2)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm."""
    numbers: JSON = {"arms": {}}
    for arm in (*config.scores, *config.arms):
        trained, measured = trained_arm(config.training(arm), config.workdir / score_folder(arm))
        lengths = [*TRAINED_LENGTHS, EXTRAPOLATION_LENGTH]
        evaluations = evaluate(trained, lengths=lengths, strings=config.strings)
        searched = evaluate(
            trained, lengths=TRAINED_LENGTHS, strings=config.strings, beams=config.beams
        )
        numbers["arms"][arm] = {
            "seconds": measured["seconds"],
            "settings": settings_of(arm),
            "accuracy": _free_running(evaluations),
            "accuracy_beam": _free_running(searched),
        }
        if arm in DRAWN:
            numbers["arms"][arm] |= heat_map(reverse(trained, [config.word])[0])
    return numbers


def _free_running(evaluations: dict[int, Accuracies]) -> JSON:
    """The accuracies of the model's own answers."""
    measured = accuracies(evaluations)
    return {name: measured[name] for name in ("free_running_exact", "free_running_tokens")}


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


if __name__ == "__main__":
    run_experiment(__name__)
