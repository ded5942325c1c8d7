"""Results of reversal_comparison.py: compared with expectations, and written in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attention_jax.tasks.reversal.task import VOCABULARY
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation
from experiments.reversal.arms import EXTRAPOLATION_LENGTH, TRAINED_LENGTHS, mean_over_lengths

FAR_LENGTH = 50
SHOWN_LENGTHS = (3, 5, 7)  # those of the chapter that occur in training
LETTERS = len(VOCABULARY.alphabet)


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
        for key, name, low, high in (
            ("accuracy", "bare", 0, 0.5), ("accuracy_padded", "padded", 0.99, 1)
        ):  # fmt: skip
            claim = f"{score}, no mask: letters right of {name} strings of length 5"
            value = _right(measured[key], "teacher_forced_tokens", 5)
            checks.append(Expectation(claim, "", value, low, high, "the bound of the first test"))
    far = {
        score: _right(measured["accuracy"], "free_running_tokens", FAR_LENGTH)
        for score, measured in numbers["masked"].items()
    }
    any_length = _right(numbers["any_length"]["accuracy"], "free_running_tokens", FAR_LENGTH)
    return [
        *checks,
        Expectation(
            f"positions for any length: letters right at length {FAR_LENGTH}",
            "", any_length, 0.99, 1, "one letter in 100",
        ),
        Expectation(
            f"default positions: letters right at length {FAR_LENGTH}, best score",
            "", max(far.values()), 0, 0.2, "a clear margin",
        ),
    ]  # fmt: skip


def _right(accuracy: JSON, metric: str, length: int) -> float:
    return float(np.mean(accuracy[metric][str(length)]))


def table(numbers: JSON) -> str:
    """Returns the accuracies of every score, as a Markdown table."""
    lines = [
        "| score | exact match, lengths 3-8 (mean ± sd; worst seed) | letters right at length"
        f" {EXTRAPOLATION_LENGTH} | at length {FAR_LENGTH} | training, steps of all seeds together"
        " |",
        "| --- | --- | --- | --- | --- |",
    ]
    rows = numbers["masked"] | {"scaled, `--positions any-length`": numbers["any_length"]}
    for score, measured in rows.items():
        by_seed = 100 * mean_over_lengths(
            measured["accuracy"], "free_running_exact", TRAINED_LENGTHS
        )
        mean, deviation = mean_and_deviation(by_seed)
        right = measured["accuracy"]["free_running_tokens"]
        far = [_percent(right[str(length)]) for length in (EXTRAPOLATION_LENGTH, FAR_LENGTH)]
        seconds, rate = measured["seconds"], measured["steps_per_second"]
        speed = "not known" if not (seconds and rate) else f"{seconds:.0f} s, {rate:.0f} steps/s"
        lines.append(
            f"| {score} | {mean:.2f} ± {deviation:.2f} %; {by_seed.min():.2f} %"
            f" | {' | '.join(far)} | {speed} |"
        )
    return "\n".join(lines)


def _percent(by_seed: Sequence[float]) -> str:
    mean, deviation = mean_and_deviation(100 * np.array(by_seed))
    return f"{mean:.1f} ± {deviation:.1f} %"


def report(numbers: JSON) -> str:
    """Returns the tables and what they show."""
    parts = [table(numbers), _seen(numbers), _losses(numbers), _beyond(numbers)]
    if numbers["unmasked"]:
        parts += [_without_mask(numbers)]
    return "\n\n".join(parts)


def _seen(numbers: JSON) -> str:
    """How much of the test the models may have seen in training."""
    config = numbers["config"]
    per_length = config["steps"] * config["batch_size"] / len(TRAINED_LENGTHS)
    seen = {length: 1 - math.exp(-per_length / LETTERS**length) for length in (3, 5, 8)}
    return (
        "An answer is an exact match if every letter and the end of the string are right. By chance"
        f" {100 * seen[3]:.0f} % of the strings of length 3 occur in training, one in"
        f" {1 / seen[5]:,.0f} of length 5 and one in {1 / seen[8]:,.0f} of length 8."
    )


def _losses(numbers: JSON) -> str:
    last = {score: np.mean(measured["loss"][-1]) for score, measured in numbers["masked"].items()}
    ordered = sorted(last, key=lambda score: last[score])
    losses = ", ".join(f"{score} {last[score]:.1g}" for score in ordered)
    return f"Final training loss with the padding mask, in nats per token, lowest first: {losses}."


def _beyond(numbers: JSON) -> str:
    forced = {
        score: 100 * _right(measured["accuracy"], "teacher_forced_tokens", EXTRAPOLATION_LENGTH)
        for score, measured in numbers["masked"].items()
    }
    right = ", ".join(f"{score} {share:.0f} %" for score, share in forced.items())
    return (
        f"No training string has {EXTRAPOLATION_LENGTH} letters, and the default positions beyond"
        " the longest training string are never trained. Letters right there (chance:"
        f" {100 / LETTERS:.1f} %): see the table when the model reads its own answer; when every"
        f" earlier letter is given, {right}. The last row of the table is the same training with"
        " positions for any length, `--sharpen-from 8`, and no other attention"
        " ([strings of any length](#strings-of-any-length))."
    )


def _without_mask(numbers: JSON) -> str:
    lengths = " / ".join(map(str, SHOWN_LENGTHS))
    scores = list(numbers["unmasked"])
    lines = [
        "**Without the padding mask** this model keeps its accuracy only on strings that are padded"
        " as in training. It differs from the GRU of the published comparison"
        " ([`gru_padding`](#gru_padding)) in that its encoder attends to padding too. Letters right"
        f" when every earlier letter is given, %, at lengths {lengths}:\n",
        f"| model | {' | '.join(scores)} |",
        f"| --- |{' --- |' * len(scores)}",
    ]
    rows = (
        ("padding masked", "masked", "accuracy"),
        ("no mask, tested with padding", "unmasked", "accuracy_padded"),
        ("no mask, tested without padding", "unmasked", "accuracy"),
    )
    for title, arm, key in rows:
        cells = [
            " / ".join(
                f"{100 * _right(numbers[arm][score][key], 'teacher_forced_tokens', length):.0f}"
                for length in SHOWN_LENGTHS
            )
            for score in scores
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
