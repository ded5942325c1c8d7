"""Results of scale_and_dimension.py: compared with expectations, and written in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from experiments.experiment import JSON, Expectation, spread

# --- reading the numbers ---


def best_rate(arm: JSON) -> str:
    """Returns the learning rate with an arm's lowest mean final loss."""
    return min(arm["rates"], key=lambda rate: np.mean(arm["rates"][rate]["loss"]))


def at_best_rate(arm: JSON, name: str) -> np.ndarray:
    """Returns one number per seed, at the best rate."""
    return np.array(arm["rates"][best_rate(arm)][name])


def difference(arm: JSON, other: JSON) -> tuple[float, float]:
    """Returns how much higher an arm's final loss is than another's, and two standard errors.

    Seeds are paired: with the same seed two arms learn from the same strings. With three seeds, a
    true difference of 0 is measured within two standard errors with probability 0.82 (Student's t).
    """
    gaps = at_best_rate(arm, "loss") - at_best_rate(other, "loss")
    return float(gaps.mean()), 2 * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def sizes_that_fail(arms: Mapping[str, JSON]) -> tuple[str, list[str]]:
    """Returns the size of logits with the lowest loss, and the larger sizes with a higher loss.

    A loss is higher if the difference is more than two standard errors.
    """
    best = min(arms, key=lambda size: at_best_rate(arms[size], "loss").mean())
    fail = []
    for size, arm in arms.items():
        gap, bound = difference(arm, arms[best])
        if float(size) > float(best) and gap > bound:
            fail.append(size)
    return best, sorted(fail, key=float)


# --- expectations ---


def expectations(numbers: JSON) -> list[Expectation]:
    """What the source and theory predict for the numbers."""
    config = numbers["config"]
    dim = config["dims"][-1]
    largest = numbers["dimension"][str(dim)]
    by_chance = "2 standard errors of the paired difference over seeds; 82 % if these are three"
    loss, loss_bound = difference(largest["dot"], largest["scaled"])
    checks = [
        Expectation(
            f"at d = {dim} unscaled dot's loss ends above scaled dot's, in nats",
            "", loss, loss_bound, math.inf, by_chance,
        ),
        Expectation(
            f"at d = {dim} dot begins with a lower entropy than scaled dot: highest of a seed of"
            " dot's minus lowest of scaled dot's, in nats",
            "unscaled entropy falls with d (chapter 38, §38.5)",
            max(largest["dot"]["initial_entropy"]) - min(largest["scaled"]["initial_entropy"]),
            -math.inf, 0, "every seed",
        ),
    ]  # fmt: skip
    checks.append(
        Expectation(
            "scaling harms at no dimension and no rate: highest mean loss of scaled dot minus"
            " dot's, in nats",
            "scaled dot learns least, at d = 64 (chapter 38, §38.6)",
            max(
                float(np.mean(np.subtract(scaled["loss"], dot["loss"])))
                for of_dim in numbers["dimension"].values()
                for dot, scaled in zip(
                    of_dim["dot"]["rates"].values(), of_dim["scaled"]["rates"].values(), strict=True
                )
            ),
            -math.inf, 0, "the sign of the mean over seeds, for every dimension and rate",
            contradicts=True,
        )
    )  # fmt: skip
    scores = numbers["scores"]["as they are"]
    worst = max(scores, key=lambda score: at_best_rate(scores[score], "loss").mean())
    gap, bound = difference(scores["scaled"], scores[worst])
    checks.append(
        Expectation(
            f"at d = {config['score_dim']}, padding masked, scaled dot is not the worst of four:"
            f" its loss minus the highest ({worst}), in nats",
            "scaled .39/.17/.30/.12 of letters right, the least of four (chapter 38, §38.6)",
            gap, -math.inf, -bound if worst != "scaled" else -math.inf, by_chance,
            contradicts=True,
        )
    )  # fmt: skip
    return checks


# --- the report ---


def report(numbers: JSON) -> str:
    """Returns one table per part."""
    config = numbers["config"]
    steps = ", ".join(
        f"{steps:,} steps at d = {dim}"
        for dim, steps in zip(config["dims"], config["steps"], strict=True)
    )
    how = (
        f"{config['seeds']} seeds per arm, {config['batch_size']} strings per step, {steps};"
        " padding is masked. Each arm is trained at"
        f" {len(config['rates'])} learning rates and shown at its best one. Losses are in nats per"
        " token, mean ± standard deviation over seeds, with the share of strings that greedy"
        " decoding reverses in parentheses."
    )
    return "\n\n".join((how, _dimension(numbers), _size(numbers), _scores(numbers)))


def _dimension(numbers: JSON) -> str:
    lines = [
        "**Is scaling harmful at small d?** The last column is the paired difference of the final"
        " losses, scaled dot minus dot, with two standard errors.\n",
        "| d | score | best rate | final loss | entropy of attention, nats: at the start → at the"
        " end | deviation of logits within a row: at the start → at the end | scaled minus dot |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dim, of_dim in numbers["dimension"].items():
        gap, bound = difference(of_dim["scaled"], of_dim["dot"])
        for score in ("dot", "scaled"):
            arm = of_dim[score]
            entropy, size = (np.array(arm["curves"][name]) for name in ("entropy", "logit_sd"))
            cells = (
                dim, score, best_rate(arm), _outcome(arm),
                f"{entropy[0].mean():.2f} → {entropy[-1].mean():.2f}",
                f"{size[0].mean():.3g} → {size[-1].mean():.3g}",
                f"{gap:+.2g} ± {bound:.1g}" if score == "scaled" else "",
            )  # fmt: skip
            lines.append(_row(cells))
    return "\n".join(lines)


def _size(numbers: JSON) -> str:
    sizes = [f"{size:g}" for size in numbers["config"]["sizes"]]
    lines = [
        "**From which size of its logits on does dot learn less well?** Dot times a constant, by"
        " the deviation of its logits within a row before training. A size is worse if its loss is"
        " higher than that of the best size by more than two standard errors.\n",
        _row(("d", *sizes, "worse than the best")),
        _row(["---"] * (len(sizes) + 2)),
    ]
    for dim, arms in numbers["size"].items():
        best, fail = sizes_that_fail(arms)
        worse = f"{', '.join(fail) or 'none'} (best: {best})"
        lines.append(_row((dim, *(_outcome(arms[size]) for size in sizes), worse)))
    return "\n".join(lines)


def _scores(numbers: JSON) -> str:
    dim = numbers["config"]["score_dim"]
    lines = [
        f"**Which score is best in a fair comparison?** d = {dim}, lowest mean loss first. At equal"
        " logits dot and scaled dot are one model. The last column says by how much the loss of the"
        " second exceeds that of the first, with two standard errors.\n",
        _row(("comparison", "final losses", "second minus first")),
        _row(["---"] * 3),
    ]
    for what, arms in numbers["scores"].items():
        order = sorted(arms, key=lambda score: at_best_rate(arms[score], "loss").mean())
        outcomes = "; ".join(f"{score} {_outcome(arms[score])}" for score in order)
        gap, bound = difference(arms[order[1]], arms[order[0]])
        lines.append(_row((what, outcomes, f"{gap:.2g} ± {bound:.1g}")))
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _outcome(arm: JSON) -> str:
    exact = 100 * at_best_rate(arm, "exact_match").mean()
    return f"{spread(at_best_rate(arm, 'loss'), 2)} ({exact:.0f} %)"
