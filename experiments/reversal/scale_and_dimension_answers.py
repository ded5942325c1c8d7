"""Results of scale_and_dimension.py: compared with expectations, and written in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping

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
            "compare its final loss (chapter 38, exercise 38.4)",
            loss, loss_bound, math.inf, by_chance,
        ),
        Expectation(
            f"at d = {dim} dot begins with a lower entropy than scaled dot: highest of a seed of"
            " dot's minus lowest of scaled dot's, in nats",
            "unscaled entropy falls with d (chapter 38, §38.5)",
            max(largest["dot"]["initial_entropy"]) - min(largest["scaled"]["initial_entropy"]),
            -math.inf, 0, "every seed",
        ),
        Expectation(
            "dot's logits begin sqrt(d) times as large as scaled dot's: largest relative deviation",
            "d_k is the variance (chapter 38, §38.3)",
            max(_sd_ratio_error(arms, int(d)) for d, arms in numbers["dimension"].items()),
            0, 2e-4, "numbers are kept to five digits",
        ),
        Expectation(
            "logits begin at the size that was set: largest relative deviation",
            "", max(_size_errors(numbers)), 0, 2e-4, "numbers are kept to five digits",
        ),
        Expectation(
            "most parameters over fewest, where they should be equal",
            "", _ratio_of_parameters(numbers["scores"]), 1, 1 + 0.501 / config["score_dim"],
            "d^2 and d^2 + d / 2, up to rounding",
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
        )
    )  # fmt: skip
    return checks


def _sd_ratio_error(arms: JSON, dim: int) -> float:
    deviations = [arms[score]["initial_logit_sd"] for score in ("dot", "scaled")]
    return float(np.abs(np.divide(*deviations) / math.sqrt(dim) - 1).max())


def _size_errors(numbers: JSON) -> list[float]:
    sized = [
        (float(size), arm) for arms in numbers["size"].values() for size, arm in arms.items()
    ] + [
        (numbers["config"]["score_size"], arm)
        for what, arms in numbers["scores"].items()
        if "logits" in what
        for arm in arms.values()
    ]
    return [
        float(np.abs(np.array(arm["initial_logit_sd"]) / size - 1).max()) for size, arm in sized
    ]


def _ratio_of_parameters(scores: JSON) -> float:
    counts = [
        arm["parameters"]
        for what, arms in scores.items()
        if "parameters" in what
        for arm in arms.values()
    ]
    return max(counts) / min(counts)


# --- the report ---


def report(numbers: JSON) -> str:
    """Returns one paragraph per part."""
    return "\n\n".join((_say_dimension(numbers), _say_size(numbers), _say_scores(numbers)))


def _say_dimension(numbers: JSON) -> str:
    sentences = []
    for dim, of_dim in numbers["dimension"].items():
        dot, scaled = of_dim["dot"], of_dim["scaled"]
        gap, bound = difference(scaled, dot)
        word = "better" if gap < -bound else "worse" if gap > bound else "no different"
        sentences.append(
            f"At d = {dim}, {of_dim['steps'][-1]} steps, dot ends at {_outcome(dot)}, scaled dot at"
            f" {_outcome(scaled)}: scaling is {word} ({gap:+.3f}, 2 se {bound:.3f})."
            f" Entropy goes from {spread(dot['initial_entropy'])} to"
            f" {spread(at_best_rate(dot, 'entropy'))} nats with dot, from"
            f" {spread(scaled['initial_entropy'])} to"
            f" {spread(at_best_rate(scaled, 'entropy'))} with scaled dot; logits begin with"
            f" deviation {spread(dot['initial_logit_sd'])} and"
            f" {spread(scaled['initial_logit_sd'])}."
        )
    return "1. Dimension. " + " ".join(sentences)


def _say_size(numbers: JSON) -> str:
    sentences = []
    for dim, arms in numbers["size"].items():
        outcomes = "; ".join(f"{size}: {_outcome(arm)}" for size, arm in arms.items())
        best, fail = sizes_that_fail(arms)
        begins = f"dot begins to fail at {fail[0]}" if fail else "none above it is worse"
        sentences.append(f"At d = {dim}, {outcomes}. The least loss is at {best}; {begins}.")
    return "2. Size of logits, their deviation within a row before training. " + " ".join(sentences)


def _say_scores(numbers: JSON) -> str:
    sentences = []
    for what, arms in numbers["scores"].items():
        order = sorted(arms, key=lambda score: at_best_rate(arms[score], "loss").mean())
        outcomes = "; ".join(
            f"{score} ({arms[score]['parameters']} parameters, logits"
            f" {spread(arms[score]['initial_logit_sd'])}) {_outcome(arms[score])}"
            for score in order
        )
        gap, bound = difference(arms[order[1]], arms[order[0]])
        clear = "ahead by more than chance" if gap > bound else "not ahead by more than chance"
        sentences.append(
            f"{what.capitalize()}, best first: {outcomes}. The first is {clear}"
            f" ({gap:.3f}, 2 se {bound:.3f})."
        )
    dim = numbers["config"]["score_dim"]
    return f"3. Scores at d = {dim}. " + " ".join(sentences)


def _outcome(arm: JSON) -> str:
    exact = 100 * at_best_rate(arm, "exact_match").mean()
    loss = spread(at_best_rate(arm, "loss"))
    return f"{loss} ({exact:.0f} % of strings, rate {best_rate(arm)})"
