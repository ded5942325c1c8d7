"""Which score functions learn to reverse strings, and what does a missing padding mask do?

Source:   chapter 38 ("Attention Variants"), section 38.6: its figures of training loss and of
          accuracy by input length; a GRU encoder-decoder, four scores, one run each.
Command:  .venv/bin/python -m experiments.reversal.reversal_comparison
Time:     11 minutes on 2 CPU cores, 4 with --no-unmasked (measured beside other work).
Expected: with the padding mask every score reverses lengths 3-8, exact match at least 99.5 % on
          average over seeds. Without it, strings come out wrong when they are not padded as in
          training, which is how the chapter evaluates.

The chapter pads its batches, masks no padding, and evaluates single strings, which have no padding.
`gru_padding.py` trains the chapter's own model; here the model is this library's, without
recurrence. Each score is trained twice with several seeds, with the mask and without. The models
without the mask are evaluated both as in the chapter (no padding) and padded as in training.

With their positions none of these models can reverse strings longer than those of training. Scaled
dot is therefore trained once more with positions for any length (`length_generalization.py`), and
all are tested on 50 letters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attention_jax.nn.block_config import BlockConfig
from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal.evaluation import LETTER_AXES, evaluate, reverse
from attention_jax.tasks.reversal.task import ReversalConfig, ReversalRun
from experiments.experiment import JSON, run_experiment, significant
from experiments.reversal import published
from experiments.reversal.arms import (
    EXTRAPOLATION_LENGTH,
    TRAINED_LENGTHS,
    accuracies,
    heat_map,
    trained_arm,
)
from experiments.reversal.length_generalization import recipe
from experiments.reversal.reversal_comparison_report import (
    FAR_LENGTH,
    expectations,
    report,
    table,
)
from experiments.reversal.training_settings import TrainingSettings, check_word
from experiments.score_colors import score_indices
from experiments.setting_checks import check_least, check_some

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run", "table"]

NEAR_LENGTHS = range(TRAINED_LENGTHS[0], EXTRAPOLATION_LENGTH + 1)


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training.

    Attributes:
        scores: scores to train, each as in `get_score`: a name, or a name with arguments.
        num_heads: heads of every attention.
        unmasked: also train without the padding mask, which doubles the time.
        strings: test strings per length.
        word: the word whose attention is drawn.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    scores: tuple[str, ...] = tuple(published.LETTERS_RIGHT)
    seeds: int = 5
    num_heads: int = BlockConfig.num_heads
    unmasked: bool = True
    strings: int = 1000
    word: str = "reversal"
    workdir: Path = Path("runs/reversal_comparison")

    def __post_init__(self) -> None:
        check_some(self, "scores")
        check_least(self, strings=1)
        check_word(self.word)
        for score in self.scores:
            self.training(score, mask_padding=True)
        self.any_length()
        check_folder("workdir", self.workdir)

    def training(self, score: str, *, mask_padding: bool) -> ReversalConfig:
        """Returns the settings of one run."""
        model = Seq2SeqConfig(score=score, mask_padding=mask_padding)
        return self.training_of(model, num_heads=self.num_heads)

    def any_length(self) -> ReversalConfig:
        """Returns the settings of scaled dot for any length: one attention, matching positions."""
        return self.training_of(recipe("scaled", TRAINED_LENGTHS[-1]), num_heads=self.num_heads)


QUICK = Config(scores=("additive", "scaled"), seeds=2, steps=150, unmasked=False, strings=50)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm."""
    numbers: JSON = {"published": published.LETTERS_RIGHT, "masked": {}, "unmasked": {}}
    trained, measured = trained_arm(config.any_length(), config.workdir / "any-length")
    numbers["any_length"] = _speed(measured) | {"accuracy": _accuracy(config, trained)}
    for score in config.scores:
        trained, measured = _train(config, score, mask_padding=True)
        numbers["masked"][score] = {
            **measured,
            "loss": significant(measured["loss"]),
            "accuracy": _accuracy(config, trained),
            **heat_map(reverse(trained, [config.word])[0]),
        }
    for score in config.scores if config.unmasked else ():
        trained, measured = _train(config, score, mask_padding=False)
        # Strings without padding, as the chapter tests: masked padding is as good as none.
        masked_config = config.training(score, mask_padding=True)
        masked = dataclasses.replace(trained, config=masked_config)
        bare = evaluate(masked, lengths=NEAR_LENGTHS, strings=config.strings)
        padded = evaluate(trained, lengths=TRAINED_LENGTHS, strings=config.strings)
        numbers["unmasked"][score] = {
            **_speed(measured),
            "accuracy": accuracies(bare),
            "accuracy_padded": accuracies(padded),
        }
    return numbers


def _train(config: Config, score: str, *, mask_padding: bool) -> tuple[ReversalRun, JSON]:
    arm = "masked" if mask_padding else "unmasked"
    workdir = config.workdir / arm / score_folder(score)
    return trained_arm(config.training(score, mask_padding=mask_padding), workdir)


def _speed(measured: JSON) -> JSON:
    return {name: measured[name] for name in ("seconds", "steps_per_second")}


def _accuracy(config: Config, trained: ReversalRun) -> JSON:
    evaluations = evaluate(trained, lengths=NEAR_LENGTHS, strings=config.strings)
    # A batch of their own for far strings, or the others would be padded to their width.
    far = evaluate(trained, lengths=[FAR_LENGTH], strings=config.strings)
    return accuracies(evaluations | far)


CAPTIONS = {
    "reversal_losses": "Training loss against the step for each score, padding masked: geometric"
    " means over seeds, and bands of one standard deviation of the logarithms on either side.",
    "reversal_heatmaps": "Attention weights of each score while it writes a word backwards: they"
    " follow the anti-diagonal.",
    "reversal_accuracy": "Share of letters right by string length: as published for a GRU without a"
    " padding mask; for this model without the mask, on strings without padding and on strings"
    " padded as in training; and with the mask. Points are means over seeds; bars are one standard"
    " deviation on either side, cut off at 0 and 1.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    masked, unmasked = numbers["masked"], numbers["unmasked"]
    seeds, indices = numbers["config"]["seeds"], score_indices(masked)
    losses = plotting.loss_curves(
        next(iter(masked.values()))["steps"],
        {score: np.array(measured["loss"]) for score, measured in masked.items()},
        title=f"String reversal: geometric mean ± sd of logarithms, {seeds} seeds",
        indices=indices,
    )
    word = numbers["config"]["word"]
    heatmaps = plotting.weight_heatmaps(
        {
            score: (
                np.array(measured["weights"]),
                measured["row_labels"],
                list(word),
            )
            for score, measured in masked.items()
        },
        **LETTER_AXES,
    )
    figures = {"reversal_losses": losses, "reversal_heatmaps": heatmaps}

    def panel(measured: JSON, key: str = "accuracy") -> dict:
        return {
            score: {
                int(n): by_seed
                for n, by_seed in m[key]["teacher_forced_tokens"].items()
                if int(n) <= EXTRAPOLATION_LENGTH
            }
            for score, m in measured.items()
        }

    panels = {"this model, padding masked": panel(masked)}
    if unmasked:
        panels = {
            "as published: a GRU without mask (one training)": {
                score: {int(n): [share] for n, share in numbers["published"][score].items()}
                for score in masked
                if score in numbers["published"]
            },
            **panels,
            "this model, no mask, strings without padding": panel(unmasked),
            "this model, no mask, strings padded": panel(unmasked, "accuracy_padded"),
        }
    figures["reversal_accuracy"] = plotting.accuracy_by_length(
        panels, ylabel="letters right (teacher forcing)", indices=indices
    )
    return figures


if __name__ == "__main__":
    run_experiment(__name__)
