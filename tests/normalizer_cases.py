"""The normalisers of the tests, each with its formula for one row in NumPy.

The NumPy side knows no gradient rule: it is differentiated by the complex step, as in
`conformance.py`, whose scores, masks and inputs it takes. Thresholds come from sorting, or from
bisection.

To add a normaliser, add its formula to `NORMALIZER_CASES`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance import DV, SCORE_CASES, TILE, B, S, T, allowed_table, inputs_of, short
from quick_compilation import quick_jit

import attention_jax as aj


@dataclasses.dataclass(frozen=True)
class NormalizerCase:
    """A normaliser, its parameters, and its weights: (params, logits [P, k]) -> [P, k]."""

    normalizer: aj.Normalizer
    weights: Callable[[dict, np.ndarray], np.ndarray]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class OwnSoftplus(aj.Normalizer):
    """w_j = log(1 + exp(scale (x_j - tau))), with sum_j w_j = 1; with a parameter."""

    def init(self, rng):
        return {"scale": jnp.ones(())}

    def weight(self, params, shifted):
        return jax.nn.softplus(params["scale"] * shifted)

    def inverse(self, params, weight):
        return jnp.log(jnp.expm1(weight)) / params["scale"]


@dataclasses.dataclass(frozen=True)
class OwnPower(aj.Normalizer):
    """w_j = scale max(x_j, 0)^2 / n, whose weights do not sum to 1; with a parameter."""

    sums_to_one = False
    uses_num_keys = True

    def init(self, rng):
        return {"scale": jnp.ones(())}

    def transform(self, params, logits, num_keys):
        return logits / jnp.sqrt(num_keys)

    def weight(self, params, shifted):
        return params["scale"] * jax.nn.relu(shifted) ** 2


# --- weights of rows in NumPy; the real parts of all P rows are equal ---


def softmax(logits, sink=None):
    largest = logits.real.max()
    exponentials = np.exp(logits - largest)
    total = exponentials.sum(1, keepdims=True)
    return exponentials / (total if sink is None else total + np.exp(sink - largest)[:, None])


def sigmoid(logits, bias):
    return 1 / (1 + np.exp(-logits - bias))


def sparsemax_by_sorting(logits):
    ordered = -np.sort(-logits.real[0])
    sums = np.cumsum(ordered)
    size = np.flatnonzero(1 + np.arange(1, len(ordered) + 1) * ordered > sums)[-1] + 1
    support = logits.real >= ordered[size - 1]
    tau = (np.where(support, logits, 0).sum(1, keepdims=True) - 1) / support.sum(1, keepdims=True)
    return np.where(support, logits - tau, 0)


def entmax_by_sorting(logits):
    """Alpha 1.5, by the closed form of each possible support."""
    halves = logits / 2
    ordered = -np.sort(-halves.real[0])
    for size in range(len(ordered), 0, -1):
        support = halves.real >= ordered[size - 1]
        count = support.sum(1, keepdims=True)
        mean = np.where(support, halves, 0).sum(1, keepdims=True) / count
        scatter = np.where(support, (halves - mean) ** 2, 0).sum(1, keepdims=True)
        tau = mean - np.sqrt((1 - scatter) / count + 0j)
        if scatter.real[0, 0] <= 1 and ordered[size - 1] > tau.real[0, 0]:
            return np.where(support, (halves - tau) ** 2, 0)
    raise AssertionError("no support")


def by_bisection(weight, lowest, logits):
    """Weights weight(x - tau) that sum to 1; then Newton steps carry the imaginary parts."""
    low, high = logits.real.max() - lowest, logits.real.max() + 10 * lowest
    low = logits.real.min() - lowest if low > high else low
    for _ in range(200):
        tau = (low + high) / 2
        above = weight(logits.real[0] - tau).sum() >= 1
        low, high = (tau, high) if above else (low, tau)
    tau = np.full((len(logits), 1), (low + high) / 2, complex)
    step = 1e-6
    for _ in range(4):
        shifted = logits - tau
        slope = (weight(shifted + step) - weight(shifted - step)).sum(1, keepdims=True) / (2 * step)
        tau = tau + (weight(shifted).sum(1, keepdims=True) - 1) / slope
    return weight(logits - tau)


def entmax_weight(alpha, shifted):
    line = 1 + (alpha - 1) * shifted
    positive = line.real > 0
    return np.where(positive, np.where(positive, line, 1) ** (1 / (alpha - 1)), 0)


def softplus_weight(scale, shifted):
    """Of all perturbations [P, k], or of their common real part [k]."""
    factor = scale[:, None] if shifted.ndim == 2 else scale.real[0]
    return np.log1p(np.exp(factor * shifted))


NORMALIZER_CASES = {
    "softmax": NormalizerCase(aj.Softmax(), lambda p, x: softmax(x)),
    "sink": NormalizerCase(
        aj.Softmax(sink=True), lambda p, x: softmax(x, p["sink"]), {"sink": 0.5}
    ),
    "ssmax": NormalizerCase(
        aj.LogScaled(learned=True),
        lambda p, x: softmax(p["scale"][:, None] * np.log(x.shape[1]) * x),
        {"scale": 0.75, "normalizer": {}},
    ),
    "log_scaled": NormalizerCase(
        aj.LogScaled(aj.Entmax(), scale=0.5, start=3),
        lambda p, x: entmax_by_sorting(0.5 * max(1, np.log1p(x.shape[1]) / np.log(4)) * x),
    ),
    "scaled_sink": NormalizerCase(
        aj.LogScaled(aj.Softmax(sink=True), learned=True),
        lambda p, x: softmax(p["scale"][:, None] * np.log(x.shape[1]) * x, p["normalizer"]["sink"]),
        {"scale": -0.75, "normalizer": {"sink": 0.5}},
    ),
    "scaled_sigmoid": NormalizerCase(
        aj.LogScaled(aj.Sigmoid()),
        lambda p, x: sigmoid(np.log(x.shape[1]) * x, -np.log(x.shape[1])),
    ),
    "sigmoid": NormalizerCase(aj.Sigmoid(), lambda p, x: sigmoid(x, -np.log(x.shape[1]))),
    "sigmoid_learned": NormalizerCase(
        aj.Sigmoid(bias=-1.0, learned=True),
        lambda p, x: sigmoid(x, p["bias"][:, None] - 1),
        {"bias": 0.25},
    ),
    "sparsemax": NormalizerCase(aj.Entmax(2.0), lambda p, x: sparsemax_by_sorting(x)),
    "entmax": NormalizerCase(aj.Entmax(), lambda p, x: entmax_by_sorting(x)),
    "entmax_1.2": NormalizerCase(
        aj.Entmax(1.2),
        lambda p, x: by_bisection(functools.partial(entmax_weight, 1.2), 5.0, x),
    ),
    "entmax_3": NormalizerCase(
        aj.Entmax(3.0),
        lambda p, x: by_bisection(functools.partial(entmax_weight, 3.0), 0.5, x),
    ),
    "own_softplus": NormalizerCase(
        OwnSoftplus(),
        lambda p, x: by_bisection(functools.partial(softplus_weight, p["scale"]), 2.0, x),
        {"scale": 1.25},
    ),
    "own_power": NormalizerCase(
        OwnPower(),
        lambda p, x: p["scale"][:, None] * np.where(x.real > 0, x, 0) ** 2 / x.shape[1],
        {"scale": 0.75},
    ),
}


# --- attention in NumPy ---


def numpy_weights(name, score_name, inputs, allowed):
    """The weights [P, T, S] of one example; arrays have a leading axis, of size 1 or P."""
    pair = SCORE_CASES[score_name].pair
    size = max(len(leaf) for leaf in jax.tree.leaves(inputs))
    weights = np.zeros((size, T, S), complex)
    for i in range(T):
        keys = np.flatnonzero(allowed[i])
        if keys.size == 0:
            continue
        logits = [
            pair(inputs["params"], inputs["query"][:, i], inputs["key"][:, j])
            + inputs["bias"][:, i, j]
            for j in keys
        ]
        row = np.stack([np.broadcast_to(logit, size) for logit in logits], axis=1)
        weights[:, i, keys] = NORMALIZER_CASES[name].weights(inputs["normalizer_params"], row)
    return weights


def numpy_output(name, score_name, inputs, allowed):
    value = inputs["value"]
    weights = numpy_weights(name, score_name, inputs, allowed)
    rows = [sum(weights[:, i, j, None] * value[:, j] for j in range(S)) for i in range(T)]
    return np.stack(rows, axis=1)


@functools.cache
def doutput() -> np.ndarray:
    return short(np.random.default_rng(8).normal(size=(B, T, DV)))


def inputs_for(name: str, score_name: str) -> dict[str, Any]:
    """The inputs of a batch, with the normaliser's parameters."""
    params = jax.tree.map(np.asarray, NORMALIZER_CASES[name].params)
    return {**inputs_of(score_name), "normalizer_params": params}


@functools.cache
def numpy_side(name: str, score_name: str, mask_name: str) -> tuple[np.ndarray, dict]:
    """The output, and the gradients of <doutput, output>; those of parameters are summed."""
    inputs, allowed = inputs_for(name, score_name), allowed_table(mask_name)
    outputs, gradients = [], []
    for b in range(B):
        shared = ("params", "normalizer_params")
        example = {key: leaf if key in shared else leaf[b] for key, leaf in inputs.items()}
        leaves, structure = jax.tree.flatten(example)

        def forward(leaves, structure=structure, b=b):
            return numpy_output(name, score_name, jax.tree.unflatten(structure, leaves), allowed[b])

        outputs.append(forward([leaf[None] for leaf in leaves])[0].real)
        example_gradients = []
        for number, leaf in enumerate(leaves):
            perturbed = [other[None].astype(complex) for other in leaves]
            directions = np.eye(leaf.size).reshape(leaf.size, *leaf.shape)
            perturbed[number] = leaf + 1e-30j * directions
            dforward = forward(perturbed).imag / 1e-30
            gradient = np.sum(doutput()[b] * dforward, axis=(1, 2))
            example_gradients.append(gradient.reshape(leaf.shape))
        gradients.append(jax.tree.unflatten(structure, example_gradients))
    stacked = jax.tree.map(lambda *examples: np.stack(examples), *gradients)
    for shared in ("params", "normalizer_params"):
        stacked[shared] = jax.tree.map(lambda leaf: leaf.sum(0), stacked[shared])
    return np.stack(outputs), stacked


# --- attention in JAX ---


@functools.cache
def output_and_gradients(name: str, score_name: str, implementation: str) -> Callable:
    """(arrays, mask table, doutput) -> (output, gradients), compiled once."""

    def forward(arrays, mask):
        return aj.attention(
            **arrays,
            mask=mask,
            score=SCORE_CASES[score_name].score,
            normalizer=NORMALIZER_CASES[name].normalizer,
            implementation=implementation,
            block_sizes=TILE,
        )

    def both(arrays, mask, doutput):
        output, pull_back = jax.vjp(lambda arrays: forward(arrays, mask), arrays)
        return output, pull_back(doutput)[0]

    return quick_jit(both)
