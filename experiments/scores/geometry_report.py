"""The report of geometry.py, written from its numbers alone."""

from __future__ import annotations

import numpy as np

from experiments.experiment import JSON

SATURATING_SCALE = 1e4


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    parts = [_table(numbers), _additive(numbers), _angle(numbers), _saturated(numbers)]
    return "\n\n".join(part for part in parts if part)


def _table(numbers: JSON) -> str:
    scales = np.array(numbers["key_scales"])
    unit, last = int(np.abs(scales - 1).argmin()), len(scales) - 1
    lines = [
        "The query lies along one of the orthogonal keys; means over draws. In the last column the"
        " query is orthogonal to all keys.\n",
        f"| score | largest weight at key scale {scales[unit]:.3g} | at {scales[last]:,.0f} |"
        f" norm of the Jacobian at {scales[unit]:.3g} | at {scales[last]:,.0f} |"
        " largest difference from 1 / S |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for score, sweep in numbers["scales"].items():
        cells = [
            f"{sweep[what]['mean'][column]:{digits}}"
            for what, digits in (("largest_weight", ".3f"), ("jacobian_norm", ".2g"))
            for column in (unit, last)
        ]
        cells.append(f"{numbers['orthogonal_query'][score]:.1g}")
        lines.append(f"| {score} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _additive(numbers: JSON) -> str:
    if "additive" not in numbers["scales"]:
        return ""
    return (
        "Topic 7 says that a query orthogonal to the keys flattens attention, and that orthogonal"
        " keys with a peaked similarity make it nearly one-hot. Neither holds for additive: its"
        " largest weight tends to"
        f" {numbers['additive_limit']:.2f} as keys grow, the weight of infinitely long keys. Its"
        " softmax goes on to pass gradients, but its saturated tanh does not."
    )


def _angle(numbers: JSON) -> str:
    angles = numbers["angles"]
    longest = max(angles["scales"], key=float)
    norms = np.array(angles["scales"][longest]["jacobian_norm"])
    place = int(norms.argmax())
    return (
        f"Between two keys of scale {longest} (scaled dot), the norm of the Jacobian is"
        f" {norms[place]:.2f} at {angles['degrees'][place]:.0f} degrees and {norms[0]:.1g} along a"
        " key: saturated attention learns where two keys tie."
    )


def _saturated(numbers: JSON) -> str:
    by_implementation: dict[str, list[JSON]] = {}
    for of_score in numbers["saturated"].values():
        for implementation, measured in of_score.items():
            by_implementation.setdefault(implementation, []).append(measured)
    lines = [
        f"Gradients at key scale {SATURATING_SCALE:,.0f}, over all scores:\n",
        "| implementation | numbers that are not finite | largest gradient of the query, as a share"
        " of that of an unsaturated softmax |",
        "| --- | --- | --- |",
    ]
    for implementation, measured in by_implementation.items():
        count = sum(of_score["not_finite"] for of_score in measured)
        share = max(of_score["share_of_unsaturated"] for of_score in measured)
        lines.append(f"| {implementation} | {count} | {share:.1g} |")
    return "\n".join(lines)
