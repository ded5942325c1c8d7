"""The report of attention_masks.py, written from its numbers alone."""

from __future__ import annotations

from typing import Any

from experiments.experiment import JSON


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    return "\n\n".join([_tiles(numbers), _misread(numbers), _no_keys(numbers)])


def _tiles(numbers: JSON) -> str:
    config = numbers["config"]
    total = (config["length"] // config["tile"]) ** 2
    lines = [
        f"Tiles of {config['tile']} × {config['tile']} at T = S = {config['length']:,}, of"
        f" {total:,} in all:\n",
        "| mask | empty: skipped | full: not masked | partial: masked pair by pair |",
        "| --- | --- | --- | --- |",
    ]
    for name, counts in numbers["tiles"].items():
        said = (str(counts["said"][status]) for status in ("empty", "full", "partial"))
        lines.append(f"| {name.replace('|', 'or')} | {' | '.join(said)} |")
    return "\n".join(lines)


def _misread(numbers: JSON) -> str:
    largest = max(numbers["largest_masked_dlogits"].values())
    shares = [
        share
        for of_mask in numbers["misread"].values()
        for share in of_mask["misread_weight_on_masked_keys"]
        if share  # a query that sees nothing has no weight
    ]
    return (
        f"The largest gradient of a masked logit is {largest:g}, for every mask: topic 7's \"logits"
        f' still receive gradients" does not hold. A mask that is read the wrong way round raises'
        f" no error; queries then put {100 * min(shares):.0f} % of their weight on forbidden keys."
    )


def _no_keys(numbers: JSON) -> str:
    lines = [
        "A query without keys, by the way it is masked:\n",
        "| way | weights | gradient of its logits | gradient of the values |",
        "| --- | --- | --- | --- |",
    ]
    for name, way in numbers["no_keys"].items():
        cells = (_largest(way[what]) for what in ("weights", "logits", "values"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append(
        "\nA number is the largest entry. With -1e9 the query attends uniformly to masked keys,"
        " which topic 7 gives weight 0."
    )
    return "\n".join(lines)


def _largest(measured: dict[str, Any]) -> str:
    return "NaN" if measured["nan"] else f"{measured['largest']:.4g}"
