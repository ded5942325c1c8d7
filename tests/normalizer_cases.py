"""The normalisers of the tests, each with its formula for one row in NumPy.

For the complex step, logits may be complex; their real parts are equal along the leading axis.
Thresholds come from sorting, or from bisection. To add a normaliser, add its formula to
`NORMALIZER_CASES`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention_jax as aj


@dataclasses.dataclass(frozen=True)
class NormalizerCase:
    """A normaliser, its parameters, and its weights: (params, logits [P, k]) -> [P, k]."""

    normalizer: aj.Normalizer
    weights: Callable[[dict, np.ndarray], np.ndarray]
    params: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0  # of the bias that its logits have in conformance.py


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
    # A weight w = sqrt(1 + 2 (x - tau)) has the slope 1 / w, so that a gradient loses the digits of
    # w^-3 roundings of a logit. No weight is below 0.09 with the bias of this seed.
    "entmax_3": NormalizerCase(
        aj.Entmax(3.0),
        lambda p, x: by_bisection(functools.partial(entmax_weight, 3.0), 0.5, x),
        seed=45,
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
