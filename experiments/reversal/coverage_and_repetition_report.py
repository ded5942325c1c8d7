"""What coverage_and_repetition.py found, as text."""

from __future__ import annotations

import numpy as np

from experiments.experiment import JSON


def report(numbers: JSON) -> str:
    """Returns what coverage does to a stuck decoder, and to models that reverse."""
    config, stuck = numbers["config"], numbers["stuck"]
    least = min(stuck[1:], key=lambda decoder: sum(decoder["loss"]))
    far = f"{config['far_length']} letters"
    lines = [
        f"A decoder whose query never changes has a coverage loss of {sum(stuck[0]['loss']):.2f}"
        f" over {len(stuck[0]['loss'])} queries. A kernel of {least['kernel']:g} in the score"
        f" lowers it to {sum(least['loss']):.2f}, and attention moves from key to key.",
        "",
        f"Reversal after {config['steps']:,} steps, mean of {config['seeds']} seeds. Strings of"
        f" {far} are longer than those of training:",
        "",
        "| score | coverage | coverage loss per string | strings reversed (%)"
        f" | {far}: letters repeated wrongly (%) | {far}: strings reversed (%)"
        f" | {far}: cross entropy (nats) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for score, arms in numbers["arms"].items():
        lines += [f"| {score} | {arm} | {_cells(measured)} |" for arm, measured in arms.items()]
    return "\n".join(
        [
            *lines,
            "",
            "The coverage loss of a string cannot fall below 1, because n + 1 queries share n"
            " letters. Training with the coverage loss brings it close to 1, and lowers the share"
            " of wrongly repeated letters in longer strings. But hardly any of these answers is"
            " right, and the cross entropy is larger than without coverage: fewer repetitions are"
            " not better answers.",
        ]
    )


def _cells(measured: JSON) -> str:
    """The last look at one arm."""

    def last(strings: str, name: str) -> float:
        return float(np.mean(measured[strings][name][-1]))

    return " | ".join(
        (
            f"{last('trained lengths', 'coverage_loss'):.3f}",
            f"{100 * last('trained lengths', 'exact_match'):.1f}",
            f"{100 * last('longer', 'repeated'):.2f}",
            f"{100 * last('longer', 'exact_match'):.1f}",
            f"{last('longer', 'cross_entropy'):.2f}",
        )
    )
