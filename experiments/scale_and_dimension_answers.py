"""What `scale_and_dimension.py` found: held to what was expected, and in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from experiment import JSON, Expectation

from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig
from attention_jax.training.metrics import mean_and_deviation

# --- reading the numbers ---


def best_rate(arm: JSON) -> str:
    """The learning rate at which an arm's mean loss in the end is least."""
    return min(arm["rates"], key=lambda rate: np.mean(arm["rates"][rate]["loss"]))


def at_best_rate(arm: JSON, name: str) -> np.ndarray:
    """One number of each seed, at that rate."""
    return np.array(arm["rates"][best_rate(arm)][name])


def difference(arm: JSON, other: JSON) -> tuple[float, float]:
    """How much higher an arm's final loss is than another's, and twice its standard error.

    Seeds are paired: with the same seed two arms learn from the same strings. Of three seeds, a
    difference that is 0 stays within twice its standard error with probability 0.82 (Student's t).
    """
    gaps = at_best_rate(arm, "loss") - at_best_rate(other, "loss")
    return float(gaps.mean()), 2 * float(gaps.std(ddof=1)) / math.sqrt(len(gaps))


def sizes_that_fail(arms: Mapping[str, JSON]) -> tuple[str, list[str]]:
    """The size of logits with the least loss, and the larger ones that lose more than by chance."""
    best = min(arms, key=lambda size: at_best_rate(arms[size], "loss").mean())
    fail = []
    for size, arm in arms.items():
        gap, bound = difference(arm, arms[best])
        if float(size) > float(best) and gap > bound:
            fail.append(size)
    return best, sorted(fail, key=float)


def loss_of_guessing() -> float:
    """Letters are drawn alike, and EOS, one target a string, is known."""
    config = ReversalConfig()
    letters = (config.min_length + config.max_length) / 2
    return letters / (letters + 1) * math.log(len(VOCABULARY.alphabet))


# --- what was expected ---


def expectations(numbers: JSON) -> list[Expectation]:
    """What the source and theory say of the numbers, and what came out."""
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
            max(
                _relative(of["dot"]["initial_logit_sd"], of["scaled"]["initial_logit_sd"], int(d))
                for d, of in numbers["dimension"].items()
            ),
            0, 2e-4, "numbers are kept to five digits",
        ),
        Expectation(
            "logits begin at the size that was set: largest relative deviation",
            "", max(_misses_of_size(numbers)), 0, 2e-4, "numbers are kept to five digits",
        ),
        Expectation(
            "most parameters over fewest, where they should be equal",
            "", _ratio_of_parameters(numbers["scores"]), 1, 1 + 0.501 / config["score_dim"],
            "d^2 and d^2 + d / 2, but for rounding",
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
            -math.inf, 0, "the sign of the mean over seeds, as many times as there are arms",
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


def _relative(dot: Sequence[float], scaled: Sequence[float], dim: int) -> float:
    ratios = np.divide(dot, scaled) / math.sqrt(dim)
    return float(np.abs(ratios - 1).max())


def _misses_of_size(numbers: JSON) -> list[float]:
    wanted = [
        (float(size), arm) for arms in numbers["size"].values() for size, arm in arms.items()
    ] + [
        (numbers["config"]["score_size"], arm)
        for what, arms in numbers["scores"].items()
        if "logits" in what
        for arm in arms.values()
    ]
    return [
        float(np.abs(np.array(arm["initial_logit_sd"]) / size - 1).max()) for size, arm in wanted
    ]


def _ratio_of_parameters(scores: JSON) -> float:
    counts = [
        arm["parameters"]
        for what, arms in scores.items()
        if "parameters" in what
        for arm in arms.values()
    ]
    return max(counts) / min(counts)


# --- in sentences ---


def report(numbers: JSON) -> str:
    """One paragraph a question."""
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
            f" Entropy goes from {_spread(dot['initial_entropy'])} to"
            f" {_spread(at_best_rate(dot, 'entropy'))} nats with dot, from"
            f" {_spread(scaled['initial_entropy'])} to"
            f" {_spread(at_best_rate(scaled, 'entropy'))} with scaled dot; logits begin with"
            f" deviation {_spread(dot['initial_logit_sd'])} and"
            f" {_spread(scaled['initial_logit_sd'])}."
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
            f" {_spread(arms[score]['initial_logit_sd'])}) {_outcome(arms[score])}"
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
    loss = _spread(at_best_rate(arm, "loss"))
    return f"{loss} ({exact:.0f} % of strings, rate {best_rate(arm)})"


def _spread(seeds: Sequence[float] | Any, digits: int = 3) -> str:
    """Mean ± deviation."""
    mean, deviation = (
        float(f"{float(number):.{count}g}")
        for number, count in zip(mean_and_deviation(seeds), (digits, 1), strict=True)
    )
    return f"{mean:g} ± {deviation:g}"
