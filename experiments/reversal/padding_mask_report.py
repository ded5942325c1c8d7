"""Results of padding_mask.py: compared with expectations, and written in sentences."""

from __future__ import annotations

from experiments.experiment import JSON, Expectation
from experiments.reversal.arms import TRAINED_LENGTHS, mean_over_lengths, percent

FAR_LENGTH = 50
SHOWN_LENGTHS = (3, 5, 7)  # those of the chapter that occur in training


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
    far = max(
        _right(measured["accuracy"], "free_running_tokens", FAR_LENGTH)
        for measured in numbers["masked"].values()
    )
    claim = f"positions from the start: letters right at length {FAR_LENGTH}, best score"
    return [*checks, Expectation(claim, "", far, 0, 0.2, "a clear margin")]


def _right(accuracy: JSON, metric: str, length: int) -> float:
    return float(mean_over_lengths(accuracy, metric, [length]).mean())


def report(numbers: JSON) -> str:
    """Returns the table and what it shows."""
    lengths = " / ".join(map(str, SHOWN_LENGTHS))
    scores = list(numbers["unmasked"])
    lines = [
        "Without the padding mask this model keeps its accuracy only on strings that are padded as"
        " in training. It differs from the GRU of the published comparison"
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
            percent(
                _right(numbers[arm][score][key], "teacher_forced_tokens", length)
                for length in SHOWN_LENGTHS
            )
            for score in scores
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)
