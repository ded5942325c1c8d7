"""The report of worked_example.py, written from its numbers alone."""

from __future__ import annotations

from experiments.experiment import JSON

# The logits that §38.1 prints.
PRINTED = {"dot": 1.1800, "scaled": 0.5900, "general": 0.3471, "additive": -0.6569}


def report(numbers: JSON) -> str:
    """Returns what was found, as Markdown."""
    parts = [_scores(numbers), _claims(numbers), _three_tokens(numbers), _cost(numbers)]
    return "\n\n".join(parts)


def _scores(numbers: JSON) -> str:
    lines = [
        "| score | logit of s and h | the source's | pairs of keys in the order of s·h |",
        "| --- | --- | --- | --- |",
    ]
    for name, traced in numbers["scores"].items():
        printed = f"{PRINTED[name]:.4f}" if name in PRINTED else ""
        share = 100 * numbers["same_order_as_dot"][name]
        lines.append(f"| {name} | {traced['logit']:.4f} | {printed} | {share:.0f} % |")
    return "\n".join(lines)


def _claims(numbers: JSON) -> str:
    transposed = numbers["transposed"]
    text = (
        f"Exercise 38.1 projects each key to W^T h. The dot product with W^T h is"
        f" {transposed['W^T h']:.4f}; with W h it is {transposed['W h']:.4f}, the general score."
        f" Matrix form and loop form differ by at most {numbers['matrix_minus_loop']:.1e} on the"
        f" source's problem."
    )
    if "general" in numbers["same_order_as_dot"]:
        text += (
            " §38.1 says that additive is the only score that can fall where s·h rises. The table"
            " shows that general can, too."
        )
    return text


def _three_tokens(numbers: JSON) -> str:
    tables = numbers["three_tokens"]
    first, second, third = (f"{entropy:.4f}" for entropy in tables["entropy"])
    return (
        f"E11.1: query 3 gives every key the weight {tables['A'][2][0]:.4f}, an entropy of {third}"
        f" nats. Queries 1 and 2 have entropies of {first} and {second} nats, and a largest weight"
        f" of {tables['largest_weight'][0]:.4f} on their own keys."
    )


def _cost(numbers: JSON) -> str:
    config, count = numbers["config"], numbers["multiplications"][-1]
    lines = [
        f"| general score, T = {config['target_length']}, S = {count['source_length']:,},"
        f" D = {config['dim']} | multiplications |",
        "| --- | --- |",
    ]
    ways = {
        "pairs": "each pair alone",
        "keys": "keys projected once",
        "queries": "queries projected once",
    }
    for way, label in ways.items():
        lines.append(f"| {label} | {count[way]['counted'] / 1e6:,.1f} million |")
    return "\n".join(lines)
