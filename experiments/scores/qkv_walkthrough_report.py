"""The report of qkv_walkthrough.py, written from its numbers alone."""

from __future__ import annotations

import numpy as np

from experiments.experiment import JSON

_STEPS = ("embedding", "Q", "K", "V", "compatibility", "scaled", "weights", "context")


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    return "\n\n".join([_variances(numbers), _softmax(numbers)])


def _variances(numbers: JSON) -> str:
    draws, source = numbers["draws"], numbers["source"]
    lines = [
        f"Variance at each step: in the source's draw, and the mean over"
        f" {numbers['config']['draws']:,} draws with its recipe (projections with entries of"
        " variance 1) and with entries of variance 1 / D:\n",
        "| step | the source's draw | its recipe | variance 1 / D |",
        "| --- | --- | --- | --- |",
    ]
    for step in _STEPS:
        measured = (
            source["steps"][step]["variance"],
            draws["source"][step]["mean"],
            draws["ours"][step]["mean"],
        )
        lines.append(f"| {step} | {' | '.join(f'{variance:,.5g}' for variance in measured)} |")
    weights = [draws[recipe]["largest_weight"]["mean"] for recipe in ("source", "ours")]
    lines.append(
        f"\nThe mean largest weight is {weights[0]:.2f} with the source's recipe and"
        f" {weights[1]:.2f} with variance 1 / D."
    )
    return "\n".join(lines)


def _softmax(numbers: JSON) -> str:
    axis = numbers["axis"]["source"]
    sums = np.array(axis["row_sums"])
    return (
        "The softmax of the source runs over columns, although its text says rows. The sums of its"
        f" rows range from {sums.min():.2f} to {sums.max():.2f}, {int(np.sum(sums < 0.01))} of"
        f" {len(sums)} queries get nothing, and {100 * axis['outside_values']:.0f} % of the context"
        " lies outside the range of the values. The source seeds twice with one number: its"
        " embeddings are rows of its query projection."
    )
