"""The report of score_variance.py, written from its numbers alone."""

from __future__ import annotations

import math

import numpy as np

from experiments.experiment import JSON, spread

_CASES = {
    "no means": "no means",
    "query": "query mean 1",
    "key": "key mean 1",
    "both": "both means 1",
    "unequal": "query mean 2, key mean -1 and deviation 1/2",
    "by feature": "each feature its own mean",
}


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    parts = [_deviations(numbers), _means(numbers), _initial(numbers)]
    return "\n\n".join(parts)


def _deviations(numbers: JSON) -> str:
    config, source = numbers["config"], numbers["source_deviations"]
    lines = [
        f"Standard deviations of dot products, over draws of {config['samples']:,} pairs:\n",
        "| D | √D | dot | scaled | the source's own draw of dot |",
        "| --- | --- | --- | --- | --- |",
    ]
    for drawn in numbers["dot_products"]:
        dot, scaled = (spread(drawn[name]["deviation"], digits=4) for name in ("dot", "scaled"))
        printed = source.get(str(drawn["dim"]))
        of_source = "" if printed is None else f"{printed:.4g}"
        root = math.sqrt(drawn["dim"])
        lines.append(f"| {drawn['dim']} | {root:.4g} | {dot} | {scaled} | {of_source} |")
    return "\n".join(lines)


def _means(numbers: JSON) -> str:
    lines = [
        "Variance of scaled dot products over all pairs / within a row, by the means of the"
        f" features (D = {numbers['config']['case_dim']}). The formula of exercise 38.2 is for all"
        " pairs of tokens as they are. The softmax sees only the variance within a row; for tokens"
        " as they are, a mean of the keys does not change it.\n",
        "| means | tokens as they are | by formula | root mean square 1 | LayerNorm |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, by_normalisation in numbers["cases"].items():
        none = by_normalisation["none"]
        cells = [_measured(none), f"{none['pairs_formula']:.2f} / {none['row_formula']:.2f}"]
        cells += [_measured(by_normalisation[name]) for name in ("rms", "layer")]
        lines.append(f"| {_CASES[case]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _measured(variances: JSON) -> str:
    return f"{np.mean(variances['pairs']):.2f} / {np.mean(variances['row']):.2f}"


def _initial(numbers: JSON) -> str:
    initial = numbers["initial"]
    dims = [drawn["dim"] for drawn in next(iter(initial.values()))]
    columns = dict.fromkeys((0, len(dims) - 1))  # the smallest and the largest D
    names = " | ".join(f"D = {dims[column]}" for column in columns)
    lines = [
        "Variance at initialisation over all pairs / within a row:\n",
        f"| score | {names} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for score, by_dim in initial.items():
        cells = [
            f"{by_dim[column]['pairs']['mean']:.4g} / {by_dim[column]['row']['mean']:.4g}"
            for column in columns
        ]
        lines.append(f"| {score} | {' | '.join(cells)} |")
    return "\n".join(lines)
