"""What are the four scores of one query and one key, and attention over three tokens, by hand?

Source:   chapter 38 ("Attention Variants"), §38.1 (four scores on one pair), §38.9 (matrix form and
          loop form), exercise 38.1 (general is dot on projected keys); day 11, E11.1 (three tokens
          by hand).
Command:  .venv/bin/python -m experiments.scores.worked_example
Time:     10 seconds on 2 CPU cores.
Expected: dot 1.18, scaled 0.59, general 0.3471, additive -0.6569. Matrix and loop form differ by
          less than 1e-6. E11.1 to 4 digits: query 3 is uniform, queries 1 and 2 are as focused as
          each other.

General and additive have random parameters in the source; `torch_random` draws the same ones. Any
other score has parameters of its own initialisation.

Exercise 38.1 projects keys by h' = W^T h, and §38.1 by K' = K W^T. These differ: the rows of K W^T
are W h, for which s . h' = s^T W h, which is the score. With W^T h it is s^T W^T h, another number
unless W is symmetric. W^T belongs to the query, whose projection is cheaper where there are fewer
queries than keys. The general score of T queries, S keys and D features takes

    T S (D^2 + D)      multiplications, one pair at a time,
    S D^2 + T S D      with keys projected once,
    T D^2 + T S D      with queries projected once, as `General` does,

counted here in the programs that JAX traces.

§38.1 also says that additive is the only score that can fall where s . h rises. General can as well
(W = -I reverses every order). The experiment counts, for random keys and the source's parameters,
how many pairs of keys each score puts in the order of s . h.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import SCORES, attention, attention_weights
from attention_jax.analysis import weight_entropy
from attention_jax.scores import get_score
from experiments.experiment import JSON, Expectation, ScoreNames, near, rounded, run_experiment
from experiments.scores.chosen_scores import check_scores, fresh_params
from experiments.scores.general_score_cost import multiplications
from experiments.scores.worked_example_figures import CAPTIONS, plot
from experiments.scores.worked_example_report import PRINTED, report
from experiments.setting_checks import check_least
from experiments.torch_random import TorchRandom

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

_rounded = functools.partial(rounded, decimals=6)

# Steps by score. For other scores only the logit is known.
STEPS: dict[str, tuple[str, ...]] = {
    "dot": (),
    "scaled": ("s / sqrt(4)",),
    "general": ("s W",),
    "additive": ("Wq s", "Wk h", "tanh(Wq s + Wk h)"),
}

# §38.1
QUERY = (1.0, -0.5, 0.3, 0.8)
KEY = (0.6, 0.2, -0.4, 1.0)
PARAMETER_SEED, PARAMETER_SCALE = 11, 0.3
PRINTED_STEPS = {
    ("general", "s W"): (0.166, 0.57, -0.183, 0.06),
    ("additive", "tanh(Wq s + Wk h)"): (-0.63, 0.659, -0.101, 0.877),
}
# §38.9
FORMS_SEED, FORMS_LENGTH, FORMS_DIM = 3, 5, 8

# Day 11, E11.1, where K and V are the same numbers.
THREE_QUERIES = ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
THREE_KEYS = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        scores: scores to compare.
        keys: random keys, whose order by each score is compared with that by dot product.
        dim: D for counting multiplications.
        target_length: T for counting multiplications.
        source_lengths: values of S for counting multiplications.
    """

    scores: ScoreNames = ("dot", "scaled", "general", "additive")
    keys: int = 1000
    dim: int = 64
    target_length: int = 32
    source_lengths: tuple[int, ...] = (4, 16, 64, 256, 1024)

    def __post_init__(self) -> None:
        check_scores(self.scores, len(QUERY))
        check_least(self, keys=2, dim=1, target_length=1)
        if not self.source_lengths or min(self.source_lengths) < 1:
            raise ValueError(
                f"source_lengths must be one or more of at least 1; got {self.source_lengths}"
            )


QUICK = Config(keys=50, dim=8, target_length=5, source_lengths=(3, 7))


def run(config: Config) -> JSON:
    """Computes the numbers of the sources' examples, and tests their general claims."""
    of_source = source_parameters()
    params = {
        name: of_source[name]
        if name in of_source
        else fresh_params(name, jax.random.key(2), len(QUERY))
        for name in config.scores
    }
    return {
        "scores": {name: trace(name, params[name]) for name in config.scores},
        "transposed": _transposed(of_source["general"]["kernel"]),
        "same_order_as_dot": _same_order_as_dot(params, config.keys),
        "matrix_minus_loop": _matrix_minus_loop(),
        "three_tokens": three_tokens(),
        "multiplications": [
            multiplications(config.target_length, source_length, config.dim)
            for source_length in config.source_lengths
        ],
    }


def source_parameters() -> dict[str, Any]:
    """Returns the parameters of §38.1 in the form that our scores take."""
    random, dim = TorchRandom(PARAMETER_SEED), len(QUERY)
    general = random.randn(dim, dim) * np.float32(PARAMETER_SCALE)
    both = random.randn(dim, 2 * dim) * np.float32(PARAMETER_SCALE)
    v = random.randn(dim) * np.float32(PARAMETER_SCALE)
    additive = {"query_kernel": both[:, :dim].T, "key_kernel": both[:, dim:].T, "v": v}
    params = {"dot": {}, "scaled": {}, "general": {"kernel": general}, "additive": additive}
    return jax.tree.map(jnp.asarray, params)


def trace(name: str, params: Any) -> JSON:
    """Returns the logit of the one pair; for a score of the source its steps and summands, too."""
    steps, summands, logit = jax.device_get(_trace(name, params))
    return {
        "steps": {step: _rounded(steps[step]) for step in STEPS.get(name, ())},
        "summands": None if summands is None else _rounded(summands),
        "logit": _rounded(logit),
    }


@functools.partial(jax.jit, static_argnums=0)
def _trace(name: str, params: Any) -> tuple[dict[str, Array], Array | None, Array]:
    score, query, key = get_score(name), jnp.array([QUERY]), jnp.array([KEY])
    logit = score(params, query, key)[0, 0]
    if name not in STEPS:
        return {}, None, logit
    q_features = score.project_query(params, query)[0]
    k_features = score.project_key(params, key)[0]
    if name == "additive":
        hidden = jnp.tanh(q_features + k_features)
        arrays = [q_features, k_features, hidden]
        summands = params["v"] * hidden
    else:
        arrays = [q_features] * len(STEPS[name])
        summands = q_features * k_features
    return dict(zip(STEPS[name], arrays, strict=True)), summands, logit


def _transposed(kernel: Array) -> JSON:
    """The general score s^T W h, and dot products with the keys W h and W^T h."""

    @jax.jit
    def logits(query: Array, key: Array) -> dict[str, Array]:
        dot, general = SCORES["dot"], SCORES["general"]
        return {
            "general": general({"kernel": kernel}, query, key)[0, 0],
            "W h": dot({}, query, key @ kernel.T)[0, 0],
            "W^T h": dot({}, query, key @ kernel)[0, 0],
        }

    by_name = jax.device_get(logits(jnp.array([QUERY]), jnp.array([KEY])))
    return {name: _rounded(by_name[name]) for name in ("general", "W h", "W^T h")}


def _same_order_as_dot(params: dict[str, Any], count: int) -> JSON:
    """The share of pairs of random keys that each score puts in the order of s . h."""
    key = jax.random.normal(jax.random.key(0), (count, len(KEY)))

    @jax.jit
    def logits(query: Array, key: Array) -> dict[str, Array]:
        rows = {name: get_score(name)(params[name], query, key)[0] for name in params}
        return rows | {"dot": SCORES["dot"]({}, query, key)[0]}

    rows = jax.device_get(logits(jnp.array([QUERY]), key))
    first, second = np.triu_indices(count, k=1)
    rises = {name: row[first] > row[second] for name, row in rows.items()}
    return {name: _rounded(np.mean(rises[name] == rises["dot"])) for name in params}


def _matrix_minus_loop() -> float:
    """The largest difference between the two forms of §38.9, on the source's own problem."""
    random = TorchRandom(FORMS_SEED)
    query, key, value = (jnp.asarray(random.randn(FORMS_LENGTH, FORMS_DIM)) for _ in range(3))
    difference = attention(query, key, value) - loop_form(query, key, value)
    return float(np.abs(np.asarray(difference)).max())


def loop_form(query: Array, key: Array, value: Array) -> Array:
    """Returns attention as §38.9 writes it with s and h: one query and one key at a time."""

    def output_of_query(s: Array) -> Array:
        logits = jnp.stack([jnp.sum(h * s) for h in key]) / math.sqrt(key.shape[-1])
        return jax.nn.softmax(logits) @ value

    return jnp.stack([output_of_query(s) for s in query])


def three_tokens() -> JSON:
    """Returns every step of E11.1."""
    query, key = jnp.array(THREE_QUERIES), jnp.array(THREE_KEYS)
    weights = attention_weights(query, key)
    return {
        "QK^T": _rounded(SCORES["dot"]({}, query, key)),
        "QK^T / sqrt(2)": _rounded(SCORES["scaled"]({}, query, key)),
        "A": _rounded(weights),
        "AV": _rounded(attention(query, key, key)),
        "entropy": _rounded(weight_entropy(weights)),
        "largest_weight": _rounded(np.asarray(weights).max(axis=-1)),
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """The sources' numbers and claims."""
    four_digits = "half of the last digit printed, and float32 rounding"
    scores = numbers["scores"]
    checks = [
        near(
            f"{name} score of the worked example", f"{printed:+.4f}",
            scores[name]["logit"], printed, 5.1e-5, four_digits,
        )
        for name, printed in PRINTED.items() if name in scores
    ]  # fmt: skip
    for (name, step), values in PRINTED_STEPS.items():
        if name in scores:
            error = np.abs(np.subtract(scores[name]["steps"][step], values)).max()
            claim = f"largest difference from the printed {step}"
            checks.append(Expectation(claim, str(list(values)), error, 0, 5.1e-4, four_digits))
    transposed = numbers["transposed"]
    checks.append(
        Expectation(
            "dot product with W^T h minus the general score, absolute (the source says 0)", "0",
            abs(transposed["W^T h"] - transposed["general"]), 1e-3, math.inf,
            "not 0, because W is not symmetric", contradicts=True,
        )
    )  # fmt: skip
    checks.append(
        Expectation(
            "largest difference: matrix and loop, the source's problem", "2.4e-07",
            numbers["matrix_minus_loop"], 0, 1e-6,
            "the source's; up to 4 float32 roundings of outputs below 4",
        )
    )  # fmt: skip
    if "general" in scores:
        checks.append(
            Expectation(
                "pairs of keys that general puts in the order of s . h (the source says all)", "1",
                numbers["same_order_as_dot"]["general"], 0, 0.9,
                "W is far from a multiple of the identity", contradicts=True,
            )
        )  # fmt: skip
    return checks + _three_token_expectations(numbers["three_tokens"], four_digits)


def _three_token_expectations(tables: JSON, four_digits: str) -> list[Expectation]:
    """E11.1 by its exponentials: logits of 0, 1/2 and 1, divided by sqrt(2)."""
    whole, half = math.exp(1 / math.sqrt(2)), math.exp(0.5 / math.sqrt(2))
    total = whole + half + 1
    by_hand = {
        "weight of query 1 on key 1": (tables["A"][0][0], whole / total),
        "weight of query 1 on key 2": (tables["A"][0][1], 1 / total),
        "weight of query 1 on key 3": (tables["A"][0][2], half / total),
        "weight of query 3 on key 1": (tables["A"][2][0], 1 / 3),
        "output of query 1, feature 1": (tables["AV"][0][0], (whole + half / 2) / total),
        "output of query 2, feature 1": (tables["AV"][1][0], (1 + half / 2) / total),
        "output of query 3, feature 1": (tables["AV"][2][0], 1 / 2),
        "entropy of query 3": (tables["entropy"][2], math.log(3)),
        "entropy of query 2, as of query 1": (tables["entropy"][1], tables["entropy"][0]),
    }
    return [
        near(f"E11.1: {name}", "exact to 4 digits", measured, expected, 5e-5, four_digits)
        for name, (measured, expected) in by_hand.items()
    ]


if __name__ == "__main__":
    run_experiment(__name__)
