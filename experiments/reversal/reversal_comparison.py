"""Which score functions learn to reverse strings, and what does a missing padding mask do?

Source:   chapter 38 ("Attention Variants"), section 38.6: its figures of training loss and of
          accuracy by input length; a GRU encoder-decoder, four scores, one run each.
Command:  .venv/bin/python -m experiments.reversal.reversal_comparison
Time:     11 minutes on 2 CPU cores, 4 with --no-unmasked (measured, on a noisy machine).
Expected: with the padding mask every score reverses lengths 3-8, exact match at least 99.5 % on
          average over seeds. Without it, strings come out wrong when they are not padded as in
          training, which is how the chapter evaluates.

The chapter pads its batches, masks nothing, and evaluates single strings, which have no padding:
its models learned to rely on PAD positions that are missing in the evaluation. Here each score is
trained twice with several seeds, with the mask and without. The models without the mask are
evaluated both as in the chapter (no padding) and padded as in training.

None of these models reaches strings longer than those of training. Scaled dot is therefore trained
once more with positions that do (`length_generalization.py`), and all are tested on 50 letters.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.reversal.evaluation import LETTER_AXES, evaluate, reverse
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig, ReversalRun
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
from experiments.reversal.length_generalization import recipe

FAR_LENGTH = 50

# The chapter's results: teacher-forced token accuracy (called "exact match" there), one seed.
PUBLISHED = {
    "additive": {3: 0.9956, 5: 0.9893, 7: 1.0, 10: 0.946},
    "dot": {3: 0.4133, 5: 0.8213, 7: 0.8943, 10: 0.8807},
    "general": {3: 0.5156, 5: 0.8240, 7: 0.8829, 10: 0.8947},
    "scaled": {3: 0.3911, 5: 0.1653, 7: 0.3038, 10: 0.12},
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; `ReversalConfig` holds those of the training.

    Attributes:
        seeds: trainings per score.
        steps: optimiser steps per training.
        scores: scores to train, each as in `get_score`: a name, or a name with arguments.
        unmasked: also train without the padding mask, which doubles the time.
        strings: test strings per length.
        word: the word whose attention is drawn.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    seeds: int = 5
    steps: int = 2500
    scores: tuple[str, ...] = tuple(PUBLISHED)
    unmasked: bool = True
    strings: int = 1000
    word: str = "reversal"
    workdir: Path = Path("runs/reversal_comparison")

    def __post_init__(self) -> None:
        if not self.scores:
            raise ValueError("scores must be at least one; got none")
        if self.strings < 1:
            raise ValueError(f"strings must be at least 1; got {self.strings}")
        if not VOCABULARY.encode(self.word):
            raise ValueError("word must have at least one letter; got none")
        for score in self.scores:
            self.training(score, mask_padding=True)
        check_folder("workdir", self.workdir)

    def training(self, score: str, *, mask_padding: bool) -> ReversalConfig:
        """Returns the settings of one run."""
        return ReversalConfig(
            model=Seq2SeqConfig(score=score, mask_padding=mask_padding),
            loop=LoopConfig(seeds=self.seeds, steps=self.steps),
        )

    def any_length(self) -> ReversalConfig:
        """Returns the settings of scaled dot for any length: one attention, matching positions."""
        model = recipe("scaled", TRAINED_LENGTHS[-1])
        return ReversalConfig(model=model, loop=LoopConfig(seeds=self.seeds, steps=self.steps))


QUICK = Config(seeds=2, steps=150, scores=("additive", "scaled"), unmasked=False, strings=50)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm."""
    lengths = [*TRAINED_LENGTHS, EXTRAPOLATION_LENGTH]
    numbers: JSON = {"published": PUBLISHED, "masked": {}, "unmasked": {}}
    trained, measured = trained_arm(config.any_length(), config.workdir / "any-length")
    numbers["any_length"] = measured | {"accuracy": _accuracy(config, trained)}
    for score in config.scores:
        trained, measured = _train(config, score, mask_padding=True)
        answer = reverse(trained, [config.word])[0]
        accuracy = {"accuracy": _accuracy(config, trained)}
        numbers["masked"][score] = measured | accuracy | heat_map(answer)
    for score in config.scores if config.unmasked else ():
        trained, measured = _train(config, score, mask_padding=False)
        # Strings without padding, as the chapter tests: masked padding is as good as none.
        masked_config = config.training(score, mask_padding=True)
        masked = dataclasses.replace(trained, config=masked_config)
        bare = evaluate(masked, lengths=lengths, strings=config.strings)
        padded = evaluate(trained, lengths=TRAINED_LENGTHS, strings=config.strings)
        measured |= {"accuracy": accuracies(bare), "accuracy_padded": accuracies(padded)}
        numbers["unmasked"][score] = measured
    return numbers


def _train(config: Config, score: str, *, mask_padding: bool) -> tuple[ReversalRun, JSON]:
    arm = "masked" if mask_padding else "unmasked"
    workdir = config.workdir / arm / score_folder(score)
    return trained_arm(config.training(score, mask_padding=mask_padding), workdir)


def _accuracy(config: Config, trained: ReversalRun) -> JSON:
    near = [*TRAINED_LENGTHS, EXTRAPOLATION_LENGTH]
    evaluations = evaluate(trained, lengths=near, strings=config.strings)
    # A batch of their own for far strings, or the others would be padded to their width.
    far = evaluate(trained, lengths=[FAR_LENGTH], strings=config.strings)
    return accuracies(evaluations | far)


CAPTIONS = {
    "reversal_losses": "Training loss against the step for each score, padding masked.",
    "reversal_heatmaps": "Attention weights of each score while it writes a word backwards: they"
    " follow the anti-diagonal.",
    "reversal_accuracy": "Share of letters right by string length: with the mask near 1 at all"
    " trained lengths; without it only where strings are padded as in training.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figures."""
    masked, unmasked = numbers["masked"], numbers["unmasked"]
    seeds = numbers["config"]["seeds"]
    losses = plotting.loss_curves(
        next(iter(masked.values()))["steps"],
        {score: np.array(measured["loss"]) for score, measured in masked.items()},
        title=f"String reversal, mean ± sd of {seeds} seeds",
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

    panels = {"padding masked": panel(masked)}
    if unmasked:
        panels["chapter 38, as published (one seed)"] = {
            score: {int(n): [share] for n, share in by_length.items()}
            for score, by_length in numbers["published"].items()
        }
        panels["no mask, tested without padding"] = panel(unmasked)
        panels["no mask, tested with padding"] = panel(unmasked, "accuracy_padded")
    figures["reversal_accuracy"] = plotting.accuracy_by_length(
        panels, ylabel="teacher-forced token accuracy"
    )
    return figures


def expectations(numbers: JSON) -> list[Expectation]:
    """Every score learns to reverse; without the mask only padded strings come out right."""
    checks = []
    sampled = "a floor with room for the spread of seeds; 1,000 strings per length: ± 0.1 points"
    for score, measured in numbers["masked"].items():
        exact = mean_over_lengths(measured["accuracy"], "free_running_exact", TRAINED_LENGTHS)
        for which, value, low in (("mean", exact.mean(), 0.995), ("worst", exact.min(), 0.98)):
            claim = f"{score}: exact match of lengths 3-8, {which} seed"
            checks.append(Expectation(claim, "", float(value), low, 1, sampled))
    for score, measured in numbers["unmasked"].items():
        published = f"{100 * PUBLISHED[score][5]:.1f} %" if score in PUBLISHED else ""
        for key, name, low, high in (
            ("accuracy", "bare", 0, 0.9), ("accuracy_padded", "padded", 0.98, 1)
        ):  # fmt: skip
            value = float(np.mean(measured[key]["teacher_forced_tokens"]["5"]))
            claim = f"{score}, no mask: letters right of {name} strings of length 5"
            source = published if name == "bare" else ""
            checks.append(Expectation(claim, source, value, low, high, "a clear margin"))
    return checks


def report(numbers: JSON) -> str:
    """Returns the table of README, as Markdown."""
    lines = [
        "| score | exact match, lengths 3-8 (mean ± sd; worst seed) | letters right at length 10"
        " | at length 50 | training, steps of all seeds together |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = numbers["masked"] | {"scaled, `--positions any-length`": numbers["any_length"]}
    for score, measured in rows.items():
        by_seed = 100 * mean_over_lengths(
            measured["accuracy"], "free_running_exact", TRAINED_LENGTHS
        )
        mean, deviation = mean_and_deviation(by_seed)
        right = measured["accuracy"]["free_running_tokens"]
        far = []
        for length in (EXTRAPOLATION_LENGTH, FAR_LENGTH):
            far_mean, far_deviation = mean_and_deviation(100 * np.array(right[str(length)]))
            far.append(f"{far_mean:.1f} ± {far_deviation:.1f} %")
        seconds, rate = measured["seconds"], measured["steps_per_second"]
        speed = "not known" if not (seconds and rate) else f"{seconds:.0f} s, {rate:.0f} steps/s"
        lines.append(
            f"| {score} | {mean:.2f} ± {deviation:.2f} %; {by_seed.min():.2f} %"
            f" | {' | '.join(far)} | {speed} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    run_experiment(__name__)
