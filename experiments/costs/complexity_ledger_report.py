"""What the numbers of complexity_ledger.py say: claims, a table and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from attention_jax import SCORES
from experiments.costs.complexity_ledger_figures import FORMS
from experiments.experiment import JSON, Expectation, near

PUBLISHED_PARAMETERS = {"additive": 8256, "general": 4096, "dot": 0, "scaled": 0}
PUBLISHED_DIM = 64  # the d of these numbers
# The same at any d; the hidden layer of additive has d features.
PARAMETERS_AT: dict[str, Callable[[int], int]] = {
    "additive": lambda d: 2 * d * d + d,
    "general": lambda d: d * d,
    "dot": lambda d: 0,
    "scaled": lambda d: 0,
}
# How much more the naive formula takes than tiles, with all gradients at the longest length.
TIMES_NAIVE = 40


def expectations(numbers: JSON) -> list[Expectation]:
    """The chapter's ledger, and the notebook's exponents, for the scores that were counted."""
    of_softmax = "the softmax and scaling add terms of order T² and T d to T² d"
    exponents = [
        near(
            f"exponent of scaled dot attention's operations in the {name}", "O(n² d)",
            numbers["exponents"][name], expected, within, of_softmax,
        )
        for name, expected, within in (("length", 2, 0.02), ("dim", 1, 0.1))
    ]  # fmt: skip
    return [*_of_counts(numbers), *exponents, *_of_memory(numbers)]


def _of_counts(numbers: JSON) -> Iterator[Expectation]:
    """Parameters, and operations for one query."""
    scores, stated = numbers["scores"], numbers["stated_flops_per_query"]
    dim, longest = numbers["config"]["dim"], numbers["config"]["lengths"][-1]
    exact = "a count: exact"
    for name, published in PUBLISHED_PARAMETERS.items():
        if name in scores:
            source = str(published) + (f" at d = {PUBLISHED_DIM}" if dim != PUBLISHED_DIM else "")
            yield near(
                f"parameters of {name} at d = {dim}", source,
                scores[name]["parameters"], PARAMETERS_AT[name](dim), 0, exact,
            )  # fmt: skip
    if "additive" in scores:
        yield near(
            f"operations of additive as the chapter computes it / stated, T = {longest}",
            "T (2d² + d)", numbers["concatenated_flops_per_query"][-1] / stated["additive"][-1],
            1, 0, exact,
        )  # fmt: skip
    for name, source in (("dot", "T d"), ("general", "d² + T d")):
        if name in scores:
            yield near(
                f"operations of {name} for one query, T = {longest}", source,
                scores[name]["flops_per_query"][-1], stated[name][-1], 0, exact,
            )  # fmt: skip
    if "scaled" in scores:
        # The chapter scales T logits, a multiply-add each; we scale the query, d products.
        yield near(
            f"operations of scaled for one query, T = {longest}: T d + d / 2 multiply-adds",
            "T d + T", scores["scaled"]["flops_per_query"][-1],
            stated["scaled"][-1] + dim - 2 * longest, 0, exact, contradicts=True,
        )  # fmt: skip
    if "additive" in scores:
        # Per query: 2d² for its own projection, 2d² for that of one key, and 3d per pair.
        yield near(
            f"operations of additive, projections shared, for one query, T = {longest}", "",
            scores["additive"]["flops_per_query"][-1], 4 * dim**2 + 3 * dim * longest, 0, exact,
        )  # fmt: skip


def _of_memory(numbers: JSON) -> Iterator[Expectation]:
    """How memory grows, and what tiles save."""
    scores, longest = numbers["scores"], numbers["config"]["lengths"][-1]
    bounds = {"naive": (1.9, 2.1), "reference": (1.9, 2.1), "tiled": (0, 1.1)}
    for name, of_score in scores.items():
        for form, by_direction in of_score["memory"].items():
            low, high = bounds[form]
            # The notebook speaks of attention that stores all pairs, with scores of the literature.
            source = "O(n²)" if low and name in SCORES else ""
            for direction in ("forward", "backward"):
                yield Expectation(
                    f"exponent of memory, {name}, {form}, {direction}", source,
                    by_direction[direction]["exponent_of_increments"], low, high,
                    "a program also holds arrays of size T d, and padding",
                )  # fmt: skip
    saved = [
        held["naive"]["backward"]["bytes"][-1] / held["tiled"]["backward"]["bytes"][-1]
        for held in (of_score["memory"] for of_score in scores.values())
        if "naive" in held
    ]
    if saved:
        yield Expectation(
            f"memory with all gradients at T = {longest}, naive / tiled, smallest of all scores",
            "", min(saved), TIMES_NAIVE, math.inf, "tiles should save an order of magnitude",
        )  # fmt: skip


def report(numbers: JSON) -> str:
    """Returns the ledger as a table, and what it says about additive attention and about memory."""
    config, scores = numbers["config"], numbers["scores"]
    lines = [
        f"One head, d = {config['dim']}, T = S = {config['lengths'][-1]:,}. Operations are those of"
        " the logits of one query. Memory is temporary, with all gradients, in MiB.",
        "",
        "| score | parameters | operations | tanh, roots per pair | naive | reference | tiled |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, of_score in scores.items():
        held = [
            f"{of_score['memory'][form]['backward']['bytes'][-1] / 2**20:,.1f}"
            if form in of_score["memory"]
            else ""
            for form in FORMS
        ]
        lines.append(
            f"| {name} | {of_score['parameters']:,} | {of_score['flops_per_query'][-1]:,.0f}"
            f" | {of_score['pair'][1]:.0f} | {' | '.join(held)} |"
        )
    sentences = []
    if "additive" in scores:
        concatenated = numbers["concatenated_flops_per_query"][-1]
        shared = scores["additive"]["flops_per_query"][-1]
        sentences.append(
            "The chapter's operations of additive are those of a concatenation,"
            f" {concatenated / 1e6:.1f} million. With W split in two, each token is projected once,"
            f" and they are {shared / 1e6:.2f} million."
        )
        if "dot" in scores:
            dot = scores["dot"]["flops_per_query"][-1]
            sentences.append(f"That is {shared / dot:.1f} times as many as dot's.")
    stored = [e for form in FORMS[:2] for e in _exponents_of(scores, form)]
    tiled = _exponents_of(scores, "tiled")
    sentences.append(
        f"Memory grows as T^{min(stored):.2f} to T^{max(stored):.2f} where all pairs are stored,"
        f" and at most as T^{max(tiled):.2f} in tiles."
    )
    return "\n".join([*lines, "", " ".join(sentences)])


def _exponents_of(scores: JSON, form: str) -> list[float]:
    return [
        by_direction["exponent_of_increments"]
        for of_score in scores.values()
        for by_direction in of_score["memory"].get(form, {}).values()
    ]
