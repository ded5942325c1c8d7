"""Results of attention_family.py: compared with expectations, and written in sentences."""

from __future__ import annotations

import numpy as np

from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation
from experiments.reversal.arms import EXTRAPOLATION_LENGTH, TRAINED_LENGTHS, mean_over_lengths

SCORES = ("cosine", "distance", "concat", "softcap")
# Kinds that were expected to fail, before the first run.
EXPECTED_TO_FAIL = ("local-m, diagonal", "monotonic")
# The same without an encoder, which were added after it.
MUST_FAIL = ("no encoder, local-m, diagonal", "no encoder, monotonic")
FIRST_RUN = "written before the first run"
ADDED = "the arm and its bound were added after the first run"


def expectations(numbers: JSON) -> list[Expectation]:
    """Every kind reverses, except two; without an encoder these two fail indeed."""
    checks = []
    for arm, measured in numbers["arms"].items():
        exact = _exact(measured)
        added = ADDED if arm.startswith("no encoder") else FIRST_RUN
        if arm in (*EXPECTED_TO_FAIL, *MUST_FAIL):
            claim = f"{arm}: exact match of lengths 3-8, best seed"
            checks.append(Expectation(claim, "", float(exact.max()), 0, 0.5, added))
        elif "score" not in measured["settings"] or arm in (*SCORES, "coverage"):
            # One block without projections mostly reverses.
            low = 0.9 if arm == "no encoder" else 0.99
            claim = f"{arm}: exact match of lengths 3-8, worst seed"
            checks.append(Expectation(claim, "", float(exact.min()), low, 1, added))
    return checks


def _exact(measured: JSON, which: str = "accuracy") -> np.ndarray:
    return mean_over_lengths(measured[which], "free_running_exact", TRAINED_LENGTHS)


def report(numbers: JSON) -> str:
    """Returns the table of all arms, and what it shows."""
    config, arms = numbers["config"], numbers["arms"]
    lines = [
        f"{config['seeds']} seeds per arm, {config['steps']:,} steps of {config['batch_size']}"
        f" strings, tested on {config['strings']:,} fresh strings per length. Each row is also one"
        " call of `scripts/train.py` with the settings shown and those of a model for [short"
        " strings](../../scripts/README.md#settings-of-the-model).\n",
        "| attention | settings of `scripts/train.py` | exact match, lengths 3-8 (mean ± sd; worst"
        f" seed) | the same, {config['beams']} beams | letters right at length"
        f" {EXTRAPOLATION_LENGTH} |",
        "| --- | --- | --- | --- | --- |",
    ]
    for arm, measured in arms.items():
        exact = 100 * _exact(measured)
        mean, deviation = mean_and_deviation(exact)
        far = measured["accuracy"]["free_running_tokens"][str(EXTRAPOLATION_LENGTH)]
        far_mean, far_deviation = mean_and_deviation(100 * np.array(far))
        flags = " ".join(f"--{name} {value}" for name, value in measured["settings"].items())
        note = " (must fail)" if arm in MUST_FAIL else ""
        note = " (expected to fail)" if arm in EXPECTED_TO_FAIL else note
        lines.append(
            f"| {arm}{note} | `{flags}` | {mean:.2f} ± {deviation:.2f} %; {exact.min():.2f} %"
            f" | {100 * _exact(measured, 'accuracy_beam').mean():.2f} %"
            f" | {far_mean:.1f} ± {far_deviation:.1f} % |"
        )
    parts = ["\n".join(lines), _beams(numbers)]
    if set(_COMPARED) <= set(arms):
        parts.append(_exercise(arms))
    return "\n\n".join(parts)


def _beams(numbers: JSON) -> str:
    arms = numbers["arms"].values()
    gaps = [
        abs(_exact(measured).mean() - _exact(measured, "accuracy_beam").mean()) for measured in arms
    ]
    return (
        f"Greedy decoding and {numbers['config']['beams']} beams differ by at most"
        f" {100 * max(gaps):.2g} points of exact match, as means over seeds."
    )


_COMPARED = (
    *EXPECTED_TO_FAIL, *MUST_FAIL, "no encoder", "no encoder, local-m, anti-diagonal",
)  # fmt: skip


def _exercise(arms: JSON) -> str:
    mean = {arm: f"{100 * _exact(arms[arm]).mean():.1f} %" for arm in _COMPARED}
    diagonal = arms["no encoder, local-m, diagonal"]["accuracy"]["free_running_exact"]
    shortest, *longer = (100 * np.mean(diagonal[str(length)]) for length in TRAINED_LENGTHS)
    return (
        "The answer to exercise 38.5 is the anti-diagonal, p = S - 1 - i. A window around the"
        " diagonal does not contain the letter to write, and monotonic attention cannot go back;"
        " both were expected to fail. With an encoder they reverse"
        f" {mean['local-m, diagonal']} and {mean['monotonic']} of the strings: the encoder's self"
        " attention learns to carry the letters to the positions where the decoder looks, as the"
        " heat maps show. Without an encoder nothing carries the letters, and they reverse"
        f" {mean['no encoder, local-m, diagonal']} and {mean['no encoder, monotonic']}, against"
        f" {mean['no encoder, local-m, anti-diagonal']} with a window around the anti-diagonal and"
        f" {mean['no encoder']} with attention to all positions. The diagonal window reverses"
        f" {shortest:.0f} % of the strings of length {TRAINED_LENGTHS[0]}, which it contains whole,"
        f" and at most {max(longer):.1g} % of those of any other length."
    )
