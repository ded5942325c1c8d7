"""Results of gru_padding.py: compared with expectations, and written in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation
from experiments.reversal import published
from experiments.reversal.arms import (
    EXTRAPOLATION_LENGTH,
    TRAINED_LENGTHS,
    mean_over_lengths,
    percent,
)

PUBLISHED_LENGTHS = (3, 5, 7, 10)
CLOSE = 0.15  # share of letters, between one published training and the mean of ours
RANKED_LENGTHS = (3, 5, 7)  # the published lengths that occur in training


def mean_right(arm: JSON, lengths: Sequence[int], name: str = "letters_right") -> float:
    """Returns the share of letters right, a mean over lengths and seeds."""
    return float(mean_over_lengths(arm, name, lengths).mean())


def expectations(numbers: JSON) -> list[Expectation]:
    """The published numbers come out without the mask; with it the ranking vanishes."""
    scores = numbers["scores"]
    checks = []
    for score in scores:
        if score in published.LETTERS_RIGHT:
            checks.append(
                Expectation(
                    f"{score}, no mask: largest difference from the published numbers",
                    f"{percent(published.LETTERS_RIGHT[score].values())} % of letters right",
                    _difference(numbers, score), 0, CLOSE, "published: one training; ours: a mean",
                )
            )  # fmt: skip
    for score, arms in scores.items():
        worst = mean_over_lengths(arms["masked"], "letters_right", TRAINED_LENGTHS)
        padded = mean_right(arms["unmasked"], TRAINED_LENGTHS, "letters_right_padded")
        checks += [
            Expectation(
                f"{score}, padding masked: letters right at lengths 3-8, worst seed",
                "", float(worst.min()), 0.99, 1, "as before with one seed of two scores",
            ),
            Expectation(
                f"{score}, no mask: letters right at lengths 3-8 of strings padded as in training",
                "", padded, 0.98, 1, "a clear margin",
            ),
        ]  # fmt: skip
    if not set(published.LETTERS_RIGHT) <= set(scores):
        return checks
    least = f"scaled {percent(_published('scaled', RANKED_LENGTHS))} %, the least of four (§38.6)"
    bare, masked = _ranked(numbers, "unmasked"), _ranked(numbers, "masked")
    far = {
        score: mean_right(scores[score]["masked"], [EXTRAPOLATION_LENGTH])
        for score in ("dot", "scaled")
    }
    far_published = percent(
        published.LETTERS_RIGHT[score][EXTRAPOLATION_LENGTH] for score in ("dot", "scaled")
    )
    return [
        *checks,
        Expectation(
            "no mask, lengths 3, 5 and 7: letters right of scaled dot minus those of the worst"
            " other score",
            least, bare["scaled"] - min(_others(bare)), -1, 0, "the sign of the mean over seeds",
        ),
        Expectation(
            "padding masked, lengths 3, 5 and 7: letters right of scaled dot minus those of the"
            " best other score",
            least, masked["scaled"] - max(_others(masked)), -0.01, 1, "a point: no difference",
            contradicts=True,
        ),
        Expectation(
            f"padding masked, length {EXTRAPOLATION_LENGTH}, beyond training: letters right of dot"
            " minus those of scaled dot",
            f"{far_published} %", far["dot"] - far["scaled"], 0.2, 1, "a clear margin",
        ),
    ]  # fmt: skip


def _difference(numbers: JSON, score: str) -> float:
    arm = numbers["scores"][score]["unmasked"]
    shares = published.LETTERS_RIGHT[score]
    return max(abs(mean_right(arm, [length]) - share) for length, share in shares.items())


def _ranked(numbers: JSON, arm: str) -> dict[str, float]:
    return {
        score: mean_right(numbers["scores"][score][arm], RANKED_LENGTHS)
        for score in published.LETTERS_RIGHT
    }


def _others(by_score: dict[str, float]) -> list[float]:
    return [share for score, share in by_score.items() if score != "scaled"]


def _published(score: str, lengths: Sequence[int]) -> list[float]:
    return [published.LETTERS_RIGHT[score][length] for length in lengths]


# --- the report ---


def report(numbers: JSON) -> str:
    """Returns the table of letters right, and what it shows."""
    config, scores = numbers["config"], numbers["scores"]
    lengths = " | ".join(f"length {length}" for length in PUBLISHED_LENGTHS)
    lines = [
        "The chapter trains on padded batches, does not mask the padding, and tests on strings"
        " without padding. Here its GRU is trained that way, and again with the padding masked in"
        f" its attention: {config['seeds']} seeds per score, {config['steps']:,} steps of"
        f" {config['batch_size']} strings, tested on {config['strings']:,} fresh strings per"
        " length. A letter counts as right when the model predicts it from the right earlier"
        " letters (teacher forcing), which the chapter calls “exact match”. Letters right, %:\n",
        f"| score | model | {lengths} |",
        f"| --- | --- |{' --- |' * len(PUBLISHED_LENGTHS)}",
    ]
    for score, arms in scores.items():
        if score in published.LETTERS_RIGHT:
            shares = published.LETTERS_RIGHT[score].values()
            lines.append(
                _row(score, "as published, one training", (f"{100 * s:.0f}" for s in shares))
            )
        for title, arm in (("no mask", "unmasked"), ("padding masked", "masked")):
            right = arms[arm]["letters_right"]
            cells = (_cell(right[str(length)]) for length in PUBLISHED_LENGTHS)
            lines.append(_row(score, title, cells))
    return "\n".join([*lines, "", _sentences(numbers)])


def _row(score: str, title: str, cells: Iterable[str]) -> str:
    return f"| {score} | {title} | {' | '.join(cells)} |"


def _cell(by_seed: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(100 * np.array(by_seed))
    return f"{mean:.0f} ± {deviation:.0f}"


def _sentences(numbers: JSON) -> str:
    scores = numbers["scores"]
    worst = min(mean_right(arms["masked"], TRAINED_LENGTHS) for arms in scores.values())
    padded = min(
        mean_right(arms["unmasked"], TRAINED_LENGTHS, "letters_right_padded")
        for arms in scores.values()
    )
    losses = ", ".join(
        f"{score} " + " / ".join(f"{np.mean(arms[arm]['loss']):.1g}" for arm in _ARMS)
        for score, arms in scores.items()
    )
    sentences = [
        f"With the mask every score has at least {100 * worst:.1f} % of the letters of lengths 3-8"
        " right. On strings that are padded to 8 letters, as in training, the models without the"
        f" mask have at least {100 * padded:.1f} % right too. Training losses end at, in nats per"
        f" token without / with the mask: {losses}."
    ]
    if set(published.LETTERS_RIGHT) <= set(scores):
        far = (
            f"{score} {_cell(scores[score]['masked']['letters_right'][str(EXTRAPOLATION_LENGTH)])}"
            for score in published.LETTERS_RIGHT
        )
        sentences.append(
            "So the published ranking at the trained lengths is one of missing masks, not of"
            f" scores. At length {EXTRAPOLATION_LENGTH}, beyond training, the scores differ with"
            f" the mask too: {', '.join(far)} %."
        )
    return " ".join([*sentences, *_unlike_published(numbers)])


def _unlike_published(numbers: JSON) -> Iterator[str]:
    """A sentence on each score whose published numbers do not come out."""
    for score, arms in numbers["scores"].items():
        if score in published.LETTERS_RIGHT and _difference(numbers, score) > CLOSE:
            by_length = arms["unmasked"]["letters_right"]
            seeds = [by_length[str(length)] for length in PUBLISHED_LENGTHS]
            ranges = (f"{100 * min(right):.0f} to {100 * max(right):.0f}" for right in seeds)
            yield (
                f"The published numbers of {score} do not come out: its seeds without the mask have"
                f" {', '.join(ranges)} % right at lengths"
                f" {', '.join(map(str, PUBLISHED_LENGTHS))}."
            )


_ARMS = ("unmasked", "masked")
