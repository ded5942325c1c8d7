"""What length_generalization.py found, as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON


def report(numbers: JSON) -> str:
    """Returns a table per alphabet, and how many letters are wrong."""
    alphabets = numbers["arms"]
    lines = [
        f"{numbers['config']['seeds']} seeds per score, trained on lengths 1-40. The second column"
        " is the share of letters that are right at lengths from 41 to 500 when the earlier letters"
        " are given. The other columns are the share of whole strings, EOS included, that are right"
        " when the model reads its own output, by length (%).",
    ]
    for letters, arms in alphabets.items():
        lines += ["", *_table(letters, arms)]
    main = next(iter(alphabets.values()))
    right = [np.mean(arm["mean_tokens"]) for arm in main.values()]
    lengths = [length for length in next(iter(main.values()))["exact"] if int(length) >= 100]
    flawless = [
        score
        for score, arm in main.items()
        if lengths and all(np.min(arm["exact"][length]) == 1 for length in lengths)
    ]
    lines += [
        "",
        f"With {next(iter(alphabets))} letters, on average at most {1e4 * (1 - min(right)):.1f}"
        " letters in 10,000 are wrong. One of them is enough to spoil a string, and a wrong EOS"
        " ends it.",
    ]
    if flawless:
        lines[-1] += (
            f" Every tested string of {int(lengths[0]):,} to {int(lengths[-1]):,} letters is right"
            f" with: {', '.join(flawless)}."
        )
    for letters, arms in alphabets.items():
        lines += [
            f"{score.capitalize()} with {letters} letters does not learn: it guesses."
            for score, arm in arms.items()
            if np.mean(arm["mean_tokens"]) < 1.1 / int(letters)
        ]
    return "\n".join(lines)


def _table(letters: str, arms: JSON) -> Iterator[str]:
    lengths = list(next(iter(arms.values()))["exact"])
    yield f"{letters} letters:"
    yield ""
    columns = "".join(f" {length} |" for length in lengths)
    yield f"| score | letters right, lengths 41-500 (mean ± sd; worst seed) |{columns}"
    yield "| --- | --- |" + " --- |" * len(lengths)
    for score, arm in arms.items():
        mean, deviation = mean_and_deviation(100 * np.array(arm["mean_tokens"]))
        worst = 100 * min(arm["mean_tokens"])
        cells = "".join(f" {100 * np.mean(arm['exact'][length]):.1f} |" for length in lengths)
        yield f"| {score} | {mean:.3f} ± {deviation:.3f}; {worst:.3f} % |{cells}"
