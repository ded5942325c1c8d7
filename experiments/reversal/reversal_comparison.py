"""Which score functions learn to reverse strings, and how long may the strings be?

Source:   chapter 38 ("Attention Variants"), section 38.6: its figure of training loss; a GRU
          encoder-decoder, four scores, one run each. The lengths beyond training are ours.
Command:  .venv/bin/python -m experiments.reversal.reversal_comparison
Time:     3 to 4 minutes on 2 CPU cores; 6 beside other work.
Expected: trained on lengths 3-8 with the task's default settings, every score writes whole strings
          right: lengths 3-8 at least 99.9 % on average over seeds (worst seed 99.5 %), each of the
          lengths 10, 20 and 50 at least 99.5 % (worst seed 98 %), length 200 at least 97 % (a goal
          beyond that: 99 %). Length 500 is measured, with a goal of 95 %.

The settings are the same for all scores, and are the defaults of `scripts/train.py` (`MODEL` and
`Reversal` in `attention_jax/tasks/reversal.py`):

- The score under study is in the model's only attention. There is no encoder, and the decoder's
  tokens do not attend to each other.
- The source is counted from its end: the query that writes a letter and the key of that letter have
  the same position id. In training the ids are drawn at random from a large range.
- Logits are multiplied by a factor that grows with the logarithm of the source's length, because
  the softmax of more keys needs larger logits to be as sharp.
- The source begins with SOS. The query that writes EOS has no letter to attend to. Without SOS the
  model confuses the end with a letter, most often at length 3. With SOS every query has one key.
- Parameters decay. Without decay a few queries in a thousand attend to a wrong letter among 500
  keys, and one of them spoils a string.

The settings were chosen on other test strings than those of this experiment. `padding_mask.py`
trains models with positions from the start, and `length_ablations.py` removes parts of the recipe.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal import Reversal
from attention_jax.training.run import TrainedRun
from experiments.experiment import JSON, ScoreNames, run_experiment, significant
from experiments.reversal import published
from experiments.reversal.arms import accuracies, heat_map, trained_arm
from experiments.reversal.length_figures import strings_right_figure
from experiments.reversal.reversal_comparison_report import expectations, report, table
from experiments.reversal.strings import LETTER_AXES, evaluate, reverse
from experiments.reversal.training_settings import TrainingSettings, check_word
from experiments.score_colors import score_indices
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run", "table"]

TRAINED_LENGTHS = range(Reversal.min_length, Reversal.max_length + 1)


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train.
        strings: test strings per length, for the lengths of training and `near`.
        near: tested lengths beyond training.
        far: tested lengths of long strings.
        far_strings: test strings for each of `far`.
        seed: of the test strings.
        word: the word whose attention is drawn.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: ScoreNames = tuple(published.LETTERS_RIGHT)
    seeds: int = 5
    learning_rate: float = Reversal.train.learning_rate
    strings: int = 1000
    near: tuple[int, ...] = (10, 20, 50)
    far: tuple[int, ...] = (200, 500)
    far_strings: tuple[int, ...] = (200, 100)
    seed: int = 0
    word: str = "reversal"
    workdir: Path = Path("runs/reversal_comparison")

    def __post_init__(self) -> None:
        check_some(self, "scores")
        check_least(self, strings=1, near=1, far=1, far_strings=1)
        if len(self.far_strings) != len(self.far):
            raise ValueError(
                f"far_strings must be one for each of far {self.far}; got {self.far_strings}"
            )
        check_word(self.word)
        for score in self.scores:
            self.training(score)
        check_folder("workdir", self.workdir)

    def training(self, score: str) -> Reversal:
        """Returns the settings of one run: the task's default ones, with this score."""
        return self.training_of(Reversal(), score=score)


QUICK = Config(
    scores=("additive", "scaled"), seeds=2, steps=150, strings=50, far=(200,), far_strings=(20,)
)


def run(config: Config) -> JSON:
    """Trains and evaluates every score."""
    numbers: JSON = {"scores": {}}
    for score in config.scores:
        trained, measured = trained_arm(
            config.training(score), config.workdir / score_folder(score)
        )
        numbers["scores"][score] = {
            **measured,
            "loss": significant(measured["loss"]),
            "accuracy": _accuracy(config, trained),
            **heat_map(reverse(trained, [config.word])[0]),
        }
    return numbers


def _accuracy(config: Config, trained: TrainedRun) -> JSON:
    """Each length beyond training is a batch of its own, padded to no other length."""
    counts = dict.fromkeys(config.near, config.strings)
    counts |= dict(zip(config.far, config.far_strings, strict=True))
    found = evaluate(trained, lengths=TRAINED_LENGTHS, strings=config.strings, seed=config.seed)
    for length, strings in counts.items():
        found |= evaluate(trained, lengths=[length], strings=strings, seed=config.seed)
    return accuracies(found)


CAPTIONS = {
    "reversal_losses": "Training loss against the step for each score: geometric means over seeds,"
    " and bands of one standard deviation of the logarithms on either side.",
    "reversal_heatmaps": "Attention weights of each score while it writes a word backwards: they"
    " follow the anti-diagonal, and the query that writes EOS attends to SOS.",
    "reversal_accuracy": "Share of whole strings that are right, by length, from the lengths of"
    " training (up to the dotted line) to 500 letters. Points are means over seeds; bars are one"
    " standard deviation on either side, cut off at 0 and 100.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    scores, seeds = numbers["scores"], numbers["config"]["seeds"]
    losses = plotting.loss_curves(
        next(iter(scores.values()))["steps"],
        {score: np.array(measured["loss"]) for score, measured in scores.items()},
        title=f"String reversal: geometric mean ± sd of logarithms, {seeds} seeds",
        indices=score_indices(scores),
    )
    heatmaps = plotting.weight_heatmaps(
        {
            score: (
                np.array(measured["weights"]),
                measured["row_labels"],
                measured["column_labels"],
            )
            for score, measured in scores.items()
        },
        **LETTER_AXES,
    )
    exact = {
        score: measured["accuracy"]["free_running_exact"] for score, measured in scores.items()
    }
    return {
        "reversal_losses": losses,
        "reversal_heatmaps": heatmaps,
        "reversal_accuracy": strings_right_figure(exact, trained=TRAINED_LENGTHS[-1]),
    }


if __name__ == "__main__":
    run_experiment(__name__)
