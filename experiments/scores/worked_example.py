"""What are the four scores of one query and one key, and attention over three tokens, by hand?

Source:   chapter 38 ("Attention Variants"), §38.1 (four scores on one pair), §38.9 (matrix form and
          loop form), exercise 38.1 (general is dot on projected keys); day 11, E11.1 (three tokens
          by hand).
Command:  .venv/bin/python -m experiments.scores.worked_example
Time:     10 seconds on 2 CPU cores.
Expected: dot 1.18, scaled 0.59, general 0.3471, additive -0.6569. Matrix and loop form differ by
          less than 1e-6. E11.1 to 4 digits: query 3 is uniform, queries 1 and 2 are as focused as
          each other.

General and additive have random parameters in the source; `torch_random` draws the same ones. The
summands of each score are kept and drawn.

Exercise 38.1 writes h' = W^T h, and §38.1 K' = K W^T. These differ: the rows of K W^T are W h, for
which s . h' = s^T W h, the score; with W^T h it is s^T W^T h, another number unless W is symmetric.
W^T does belong to the query, which is cheaper to project where there are fewer queries than keys.
The general score of T queries, S keys and D features takes

    T S (D^2 + D)      multiplications, one pair at a time,
    S D^2 + T S D      with keys projected once,
    T D^2 + T S D      with queries projected once, as `General` does,

counted here in the programs that JAX traces.

§38.1 also says that additive is the only score that can fall where s . h rises. General can as well
(W = -I reverses every order): counted here for random keys and the source's parameters.
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
from experiments.experiment import JSON, Expectation, near, rounded, run_experiment
from experiments.scores.general_score_cost import multiplications
from experiments.scores.worked_example_figures import CAPTIONS, plot
from experiments.torch_random import TorchRandom

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "run"]

Array = jax.Array

_rounded = functools.partial(rounded, decimals=6)

NAMES = ("dot", "scaled", "general", "additive")
STEPS = {
    "dot": (),
    "scaled": ("s / sqrt(4)",),
    "general": ("s W",),
    "additive": ("Wq s", "Wk h", "tanh(Wq s + Wk h)"),
}

# §38.1
QUERY = (1.0, -0.5, 0.3, 0.8)
KEY = (0.6, 0.2, -0.4, 1.0)
PARAMETER_SEED, PARAMETER_SCALE = 11, 0.3
PRINTED = {"dot": 1.1800, "scaled": 0.5900, "general": 0.3471, "additive": -0.6569}
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
        draws: random problems for comparing two forms of the same computation.
        keys: random keys, whose order by each score is compared with that by dot product.
        dim: D for counting multiplications.
        target_length: T for counting multiplications.
        source_lengths: values of S for counting multiplications.
    """

    draws: int = 1000
    keys: int = 1000
    dim: int = 64
    target_length: int = 32
    source_lengths: tuple[int, ...] = (4, 16, 64, 256, 1024)

    def __post_init__(self) -> None:
        for name, least in (("draws", 1), ("keys", 2), ("dim", 1), ("target_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if not self.source_lengths or min(self.source_lengths) < 1:
            raise ValueError(
                f"source_lengths must be one or more of at least 1; got {self.source_lengths}"
            )


QUICK = Config(draws=20, keys=50, dim=8, target_length=5, source_lengths=(3, 7))


def run(config: Config) -> JSON:
    """Computes the numbers of the sources' examples, and tests their general claims."""
    params = source_parameters()
    return {
        "scores": {name: trace(name, params[name]) for name in NAMES},
        "transposed": _transposed(params["general"]["kernel"]),
        "same_order_as_dot": _same_order_as_dot(params, config.keys),
        "forms": _forms(config.draws),
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
    """Returns the projections, the summands and the sum of one score for the one pair."""
    steps, summands, logit = jax.device_get(_trace(name, params))
    return {
        "steps": {step: _rounded(array) for step, array in zip(STEPS[name], steps, strict=True)},
        "summands": _rounded(summands),
        "logit": _rounded(logit),
    }


@functools.partial(jax.jit, static_argnums=0)
def _trace(name: str, params: Any) -> tuple[list[Array], Array, Array]:
    score, query, key = SCORES[name], jnp.array([QUERY]), jnp.array([KEY])
    q_features, k_features = (
        score.project_query(params, query)[0],
        score.project_key(params, key)[0],
    )
    if name == "additive":
        hidden = jnp.tanh(q_features + k_features)
        steps = [q_features, k_features, hidden]
        summands = params["v"] * hidden
    else:
        steps, summands = [q_features] * len(STEPS[name]), q_features * k_features
    return steps, summands, score(params, query, key)[0, 0]


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
        return {name: SCORES[name](params[name], query, key)[0] for name in NAMES}

    rows = jax.device_get(logits(jnp.array([QUERY]), key))
    first, second = np.triu_indices(count, k=1)
    rises = {name: row[first] > row[second] for name, row in rows.items()}
    return {name: _rounded(np.mean(rises[name] == rises["dot"])) for name in NAMES}


def _forms(draws: int) -> JSON:
    """Largest differences between two forms, on the source's problem and on random ones."""
    random = TorchRandom(FORMS_SEED)
    source = [jnp.asarray(random.randn(FORMS_LENGTH, FORMS_DIM)) for _ in range(3)]
    shapes = ((draws, 5, 8), (draws, 7, 8), (draws, 7, 3), (draws, 8, 8))
    rngs = jax.random.split(jax.random.key(1), len(shapes))
    query, key, value, kernel = map(jax.random.normal, rngs, shapes)
    kernel = kernel / 8  # logits of standard deviation sqrt(8) / sqrt(8)

    def projected_keys(query: Array, key: Array, value: Array, kernel: Array) -> Array:
        return attention(query, key @ kernel.T, value, score="dot")

    general = attention(query, key, value, score="general", params={"kernel": kernel})
    on_projected = jax.jit(jax.vmap(projected_keys))(query, key, value, kernel)
    looped = jax.jit(jax.vmap(loop_form))(query, key, value)
    return {
        "matrix and loop, the source's problem": _distance(attention(*source), loop_form(*source)),
        "matrix and loop": _distance(attention(query, key, value), looped),
        "general and dot on projected keys": _distance(general, on_projected),
    }


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


def _distance(one: Array, other: Array) -> float:
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


def expectations(numbers: JSON) -> list[Expectation]:
    """The sources' numbers and claims."""
    four_digits = "half of the last digit printed, and float32 rounding"
    checks = [
        near(
            f"{name} score of the worked example", f"{printed:+.4f}",
            numbers["scores"][name]["logit"], printed, 5.1e-5, four_digits,
        )
        for name, printed in PRINTED.items()
    ]  # fmt: skip
    for (name, step), printed in PRINTED_STEPS.items():
        error = np.abs(np.subtract(numbers["scores"][name]["steps"][step], printed)).max()
        claim = f"largest difference from the printed {step}"
        checks.append(Expectation(claim, str(list(printed)), error, 0, 5.1e-4, four_digits))
    transposed = numbers["transposed"]
    checks.append(
        near(
            "dot product with W h minus the general score", "0",
            transposed["W h"] - transposed["general"], 0, 2e-6, "rounding to 6 digits",
        )
    )  # fmt: skip
    checks.append(
        Expectation(
            "dot product with W^T h minus the general score, absolute (the source says 0)", "0",
            abs(transposed["W^T h"] - transposed["general"]), 1e-3, math.inf,
            "not 0, because W is not symmetric",
        )
    )  # fmt: skip
    for name, distance in numbers["forms"].items():
        source = "2.4e-07" if "source" in name else "less than 1e-6"
        tolerance = "the source's; up to 4 float32 roundings of outputs below 4"
        checks.append(
            Expectation(f"largest difference: {name}", source, distance, 0, 1e-6, tolerance)
        )
    checks.append(
        Expectation(
            "pairs of keys that general puts in the order of s . h (the source says all)", "1",
            numbers["same_order_as_dot"]["general"], 0, 0.9,
            "W is far from a multiple of the identity",
        )
    )  # fmt: skip
    checks.extend(_three_token_expectations(numbers["three_tokens"], four_digits))
    differences = [
        abs(count[way]["counted"] - count[way]["formula"])
        for count in numbers["multiplications"]
        for way in ("pairs", "keys", "queries")
    ]
    claim = "largest difference between counted multiplications and their formula"
    checks.append(near(claim, "", max(differences), 0, 0, "counts"))
    return checks


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
