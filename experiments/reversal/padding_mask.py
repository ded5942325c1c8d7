"""What does a missing padding mask do to a model that reverses strings of 3 to 8 letters?

Source:   chapter 38 ("Attention Variants"), section 38.6: its figure of accuracy by input length; a
          GRU encoder-decoder, four scores, one run each.
Command:  .venv/bin/python -m experiments.reversal.padding_mask
Time:     11 minutes on 2 CPU cores (measured beside other work).
Expected: with the padding mask every score reverses lengths 3-8, exact match at least 99.5 % on
          average over seeds. Without it, strings come out wrong when they are not padded as in
          training, which is how the chapter evaluates.

The chapter pads its batches, masks no padding, and evaluates single strings, which have no padding.
`gru_padding.py` trains the chapter's own model; here the model is this library's, without
recurrence. Each score is trained twice with several seeds, with the mask and without. The models
without the mask are evaluated both as in the chapter (no padding) and padded as in training.

The models have the settings for short strings (`SHORT_STRINGS` in `training_settings.py`), not the
task's default: positions are counted from the start of the source, because a model that sees
padding cannot count them from the end. These models reverse no string that is longer than those of
training, which is tested on 50 letters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from matplotlib.figure import Figure

from attention_jax.nn.config import ModelConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import TrainedRun
from experiments.experiment import JSON, ScoreNames, run_experiment
from experiments.reversal import published
from experiments.reversal.arms import (
    EXTRAPOLATION_LENGTH,
    TRAINED_LENGTHS,
    accuracies,
    trained_arm,
)
from experiments.reversal.curves import accuracy_by_length
from experiments.reversal.padding_mask_report import FAR_LENGTH, expectations, report
from experiments.reversal.strings import evaluate
from experiments.reversal.training_settings import SHORT_STRINGS, TrainingSettings
from experiments.score_colors import score_indices
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

NEAR_LENGTHS = range(TRAINED_LENGTHS[0], EXTRAPOLATION_LENGTH + 1)


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train.
        num_heads: heads of every attention.
        strings: test strings per length.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = tuple(published.LETTERS_RIGHT)
    seeds: int = 5
    num_heads: int = ModelConfig.num_heads
    strings: int = 1000
    workdir: Path = Path("runs/padding_mask")

    def __post_init__(self) -> None:
        check_some(self, "scores")
        check_least(self, strings=1)
        for score in self.scores:
            self.training(score, mask_padding=True)
        check_folder("workdir", self.workdir)

    def training(self, score: str, *, mask_padding: bool) -> Reversal:
        """Returns the settings of one run."""
        return self.training_of(
            SHORT_STRINGS, score=score, mask_padding=mask_padding, num_heads=self.num_heads
        )


QUICK = Config(scores=("scaled",), seeds=2, steps=150, strings=50)


def run(config: Config) -> JSON:
    """Trains and evaluates every score, with the mask and without."""
    numbers: JSON = {"published": published.LETTERS_RIGHT, "masked": {}, "unmasked": {}}
    for score in config.scores:
        trained, _ = _train(config, score, mask_padding=True)
        lengths = [*NEAR_LENGTHS, FAR_LENGTH]
        evaluations = evaluate(trained, lengths=lengths, strings=config.strings)
        numbers["masked"][score] = {"accuracy": accuracies(evaluations)}

        trained, _ = _train(config, score, mask_padding=False)
        # Strings without padding, as the chapter tests: masked padding is as good as none.
        masked_config = config.training(score, mask_padding=True)
        masked = dataclasses.replace(trained, task=masked_config)
        bare = evaluate(masked, lengths=NEAR_LENGTHS, strings=config.strings)
        padded = evaluate(trained, lengths=TRAINED_LENGTHS, strings=config.strings)
        numbers["unmasked"][score] = {
            "accuracy": accuracies(bare),
            "accuracy_padded": accuracies(padded),
        }
    return numbers


def _train(config: Config, score: str, *, mask_padding: bool) -> tuple[TrainedRun, JSON]:
    arm = "masked" if mask_padding else "unmasked"
    workdir = config.workdir / arm / score_folder(score)
    return trained_arm(config.training(score, mask_padding=mask_padding), workdir)


CAPTIONS = {
    "padding_mask": "Share of letters right by string length: as published for a GRU without a"
    " padding mask; for this model without the mask, on strings without padding and on strings"
    " padded as in training; and with the mask. Points are means over seeds; bars are one standard"
    " deviation on either side, cut off at 0 and 1.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figure."""
    masked, unmasked = numbers["masked"], numbers["unmasked"]

    def panel(measured: JSON, key: str = "accuracy") -> dict:
        return {
            score: {
                int(n): by_seed
                for n, by_seed in m[key]["teacher_forced_tokens"].items()
                if int(n) <= EXTRAPOLATION_LENGTH
            }
            for score, m in measured.items()
        }

    panels = {
        "as published: a GRU without mask (one training)": {
            score: {int(n): [share] for n, share in numbers["published"][score].items()}
            for score in masked
            if score in numbers["published"]
        },
        "this model, padding masked": panel(masked),
        "this model, no mask, strings without padding": panel(unmasked),
        "this model, no mask, strings padded": panel(unmasked, "accuracy_padded"),
    }
    figure = accuracy_by_length(
        panels, ylabel="letters right (teacher forcing)", indices=score_indices(masked)
    )
    return {"padding_mask": figure}


if __name__ == "__main__":
    run_experiment(__name__)
