"""What local_attention.py found, as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experiments.experiment import JSON
from experiments.reversal.arms import TRAINED_LENGTHS, mean_over_lengths


def report(numbers: JSON) -> str:
    """Returns exact match by window, and what windows and the Gaussian do."""
    config = numbers["config"]
    radii = sorted({*config["radii"], *config["encoder_radii"]})
    lines = [
        f"Exact match on strings of {TRAINED_LENGTHS[0]} to {TRAINED_LENGTHS[-1]} letters after"
        f" {config['steps']:,} steps, mean of {config['seeds']} seeds (%):",
        "",
        "| score | window around the | " + " | ".join(f"D = {radius}" for radius in radii) + " |",
        "| --- | --- |" + " --- |" * len(radii),
    ]
    for score, arms in numbers["arms"].items():
        for arm, by_radius in arms.items():
            encoder, centers = arm.split(", ")
            window = "predicted center" if centers == "predicted" else centers
            cells = (_exact(by_radius.get(str(radius))) for radius in radii)
            lines.append(f"| {score} | {window}, {encoder} | {' | '.join(cells)} |")
    narrowest = min(config["radii"])
    return "\n".join(
        [
            *lines,
            "",
            f"Without an encoder, around the anti-diagonal, radius {narrowest} is enough. In a"
            " wider window the model has to find the right letter with a query that does not know"
            " the length, and it reverses fewer strings. Around the diagonal it reverses strings of"
            " up to D + 1 letters, which the window holds whole, and palindromes. With an encoder,"
            " the diagonal window reverses more strings than it could without. A predicted center"
            " is better with radius 2 than with radius 1.",
            "",
            *_gaussian(numbers),
        ]
    )


def _exact(arm: JSON | None) -> str:
    if arm is None:
        return ""
    shares = mean_over_lengths(arm["accuracy"], "free_running_exact", TRAINED_LENGTHS)
    return f"{100 * np.mean(shares):.1f}"


def _gaussian(numbers: JSON) -> Iterator[str]:
    """What is left of a row's weight of 1."""
    key, between = (
        [f"{radius[place]['mean']:.2f}" for radius in numbers["gaussian"]]
        for place in ("on a key", "between keys")
    )
    radii = " / ".join(str(radius["radius"]) for radius in numbers["gaussian"])
    formula = numbers["gaussian"][0]["between keys"]["formula"]
    yield (
        "The Gaussian of local-p comes after the softmax, so that the weights of a row sum to less"
        f" than 1: on average to sqrt(π/8) erf(√2) = {formula:.2f} for a center anywhere between"
        f" keys. Random rows with D = {radii} have {' / '.join(between)} there, and"
        f" {' / '.join(key)} with the center on a key."
    )
    for score, arms in numbers["arms"].items():
        trained = arms["no encoder, predicted"].values()
        sums, letters = (
            " / ".join(f"{np.mean(arm[name]):.2f}" for arm in trained)
            for name in ("weight", "on_the_letter")
        )
        yield f"Trained with {score}, rows keep {sums} and have {letters} on the right letter."
