"""Results of reversal_comparison.py: compared with expectations, and written in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attention_jax.tasks.reversal import Reversal
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation
from experiments.reversal.arms import mean_over_lengths
from experiments.reversal.strings import VOCABULARY

LETTERS = len(VOCABULARY.alphabet)
TRAINED_LENGTHS = range(Reversal.min_length, Reversal.max_length + 1)
# {length: (least share of whole strings right, of the worst seed)}; written before the run.
TARGETS = {10: (0.995, 0.98), 20: (0.995, 0.98), 50: (0.995, 0.98), 200: (0.97, 0.0)}
GOALS = {200: 0.99, 500: 0.95}  # what would be better still


def expectations(numbers: JSON) -> list[Expectation]:
    """Every score writes whole strings right, at the lengths of training and beyond."""
    checks = []
    target = "the target that was set"
    for score, measured in numbers["scores"].items():
        trained = mean_over_lengths(measured["accuracy"], "free_running_exact", TRAINED_LENGTHS)
        shares = {"lengths 3-8": (trained, (0.999, 0.995))}
        exact = measured["accuracy"]["free_running_exact"]
        for length, bounds in TARGETS.items():
            if str(length) in exact:
                shares[f"length {length}"] = (np.array(exact[str(length)]), bounds)
        for lengths, (by_seed, (mean, worst)) in shares.items():
            claim = f"{score}: exact match, {lengths}, mean of the seeds"
            checks.append(Expectation(claim, "", float(by_seed.mean()), mean, 1, target))
            if worst:
                claim = f"{score}: exact match, {lengths}, worst seed"
                checks.append(Expectation(claim, "", float(by_seed.min()), worst, 1, target))
        for length, least in GOALS.items():
            if str(length) in exact:
                claim = f"{score}: exact match, length {length}, the goal"
                mean = float(np.mean(exact[str(length)]))
                checks.append(Expectation(claim, "", mean, least, 1, "the goal that was set"))
    return checks


def table(numbers: JSON) -> str:
    """Returns the share of whole strings right of every score by length, as a Markdown table."""
    exact = next(iter(numbers["scores"].values()))["accuracy"]["free_running_exact"]
    beyond = [length for length in exact if int(length) not in TRAINED_LENGTHS]
    heads = ["lengths 3-8", *(f"length {length}" for length in beyond)]
    lines = [
        f"| score | {' | '.join(heads)} | training, steps of all seeds together |",
        "| --- |" + " --- |" * (len(heads) + 1),
    ]
    for score, measured in numbers["scores"].items():
        accuracy = measured["accuracy"]
        columns = [mean_over_lengths(accuracy, "free_running_exact", TRAINED_LENGTHS)]
        columns += [accuracy["free_running_exact"][length] for length in beyond]
        seconds, rate = measured["seconds"], measured["steps_per_second"]
        speed = "not known" if not (seconds and rate) else f"{seconds:.0f} s, {rate:.0f} steps/s"
        lines.append(f"| {score} | {' | '.join(map(_percent, columns))} | {speed} |")
    return "\n".join(lines)


def _percent(by_seed: Sequence[float] | np.ndarray) -> str:
    shares = 100 * np.array(by_seed)
    mean, deviation = mean_and_deviation(shares)
    return f"{mean:.2f} ± {deviation:.2f} ({shares.min():.1f})"


def report(numbers: JSON) -> str:
    """Returns the table and what it shows."""
    return "\n\n".join((_explained(numbers), table(numbers), _seen(numbers), _losses(numbers)))


def _explained(numbers: JSON) -> str:
    config = numbers["config"]
    far = " and ".join(
        f"{strings} of length {length}"
        for length, strings in zip(config["far"], config["far_strings"], strict=True)
    )
    return (
        "Exact match, %: the share of strings of which the model writes every letter and the end"
        f" right, from its own earlier letters. Mean ± standard deviation over {config['seeds']}"
        f" seeds, and the worst seed in parentheses; {config['strings']:,} test strings per length"
        f" for each seed, {far}."
    )


def _seen(numbers: JSON) -> str:
    """How much of the test the models may have seen in training."""
    config = numbers["config"]
    per_length = config["steps"] * config["batch_size"] / len(TRAINED_LENGTHS)
    seen = {length: 1 - math.exp(-per_length / LETTERS**length) for length in (3, 5, 8)}
    return (
        f"By chance {100 * seen[3]:.0f} % of the strings of length 3 occur in training, one in"
        f" {1 / seen[5]:,.0f} of length 5 and one in {1 / seen[8]:,.0f} of length 8. No training"
        f" string has more than {TRAINED_LENGTHS[-1]} letters."
    )


def _losses(numbers: JSON) -> str:
    last = {score: np.mean(measured["loss"][-1]) for score, measured in numbers["scores"].items()}
    ordered = sorted(last, key=lambda score: last[score])
    losses = ", ".join(f"{score} {last[score]:.1g}" for score in ordered)
    return f"Final training loss, in nats per token, lowest first: {losses}."
