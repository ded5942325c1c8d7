"""At which scale of the scores does the softmax's gradient peak, and how does it vanish?

Source:   chapter 38 ("Attention Variants"), §38.3-38.4: the gradient of the largest weight against
          score scale, and softmax curves, raw and scaled, for d_k from 16 to 1024.
Command:  .venv/bin/python -m experiments.scores.softmax_saturation
Time:     1 minute on 2 CPU cores.
Expected: by the source, the gradient's norm peaks near unit-variance scores and is near zero from
          scale 10 on; raw softmax goes one-hot as d_k grows, scaled curves overlap. The source's
          own curve shows neither peak nor end there: it peaks at scale 5.86, and is at 44 % of its
          peak at scale 1, 84 % at 10 and 30 % at 20.

The experiment is about the softmax, and about dot products with and without their factor: there is
no choice of scores.

Why 5.86. The gradient of the largest weight a_m in its row's scores is a_m (e_m - a), of norm
    a_m sqrt((1 - a_m)² + sum_{j != m} a_j²),
which is small where a_m is near 1, and also where it is near 1/T: attention that looks everywhere
moves each single weight only a little. In between it peaks where the largest weight is about one
half. For T scores evenly from -1 to 1, times c, the weights are geometric,
a_m = (1 - r) / (1 - r^T) with r = exp(-2c / (T - 1)), and with r^T neglected the norm is
(1 - r) r sqrt(2 / (1 + r)). Its derivative vanishes where 3 r² + 3 r = 2, r = (sqrt(33) - 3) / 6
= 0.457, whence c = (T - 1)/2 log(1/r) = 5.87 for T = 16, and more for more keys. "Unit variance" is
not scale 1 either: the standard deviation of these scores is sqrt((T + 1) / (3 (T - 1))) = 0.61, so
that they have unit variance at scale 1.63.

One row says little. Scores of random queries and keys are normal; the gap between their two largest
has a density at 0 of m_T, the expected largest of T standard normal numbers. At a large scale c
only rows with a gap of order 1/c have a gradient left, sqrt(2) a (1 - a) with a = sigmoid(c g), so
    mean norm -> m_T / (sqrt(2) c),
no exponential decay: as 1 / sqrt(d_k). The median row does decay exponentially. Saturation takes
the gradient from most rows, and leaves it to the few rows that happen to be undecided.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import attention_weights
from attention_jax.analysis import ScaleSweep, logit_scale_sweep, softmax_jacobian_norm
from experiments.entropy_limits import expected_maximum
from experiments.experiment import JSON, Expectation, near, rounded, run_experiment
from experiments.scores.softmax_saturation_figures import CAPTIONS, plot
from experiments.scores.softmax_saturation_report import NO_GRADIENT_NORM, report
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

_list = functools.partial(rounded, decimals=6)

QUANTILES = (0.1, 0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        keys: T of the gradient curves.
        largest_scale: the largest scale of these curves.
        scales: number of scales, evenly from 0.1.
        dim: d_k of the random queries and keys.
        samples: random queries, each with keys of its own.
        curve_dims: d_k of the softmax curves, rising.
        curve_keys: T of the softmax curves.
        seed: seed of all samples.
    """

    keys: int = 16
    largest_scale: float = 20.0
    scales: int = 60
    dim: int = 256
    samples: int = 4096
    curve_dims: tuple[int, ...] = (16, 64, 256, 1024)
    curve_keys: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        check_least(self, keys=3, scales=20, dim=2, samples=2, curve_keys=3)
        if not 10 <= self.largest_scale < math.inf:
            raise ValueError(f"largest_scale must be at least 10; got {self.largest_scale}")
        dims = self.curve_dims
        if len(dims) < 2 or list(dims) != sorted(set(dims)) or dims[0] < 2:
            raise ValueError(f"curve_dims must be at least two, rising from 2 or more; got {dims}")


QUICK = Config(samples=256, dim=64, curve_dims=(16, 256))


def run(config: Config) -> JSON:
    """Computes the chapter's curve, the same for random scores, and softmax curves."""
    rngs = jax.random.split(jax.random.key(config.seed), 1 + len(config.curve_dims))
    scales = np.linspace(0.1, config.largest_scale, config.scales)
    return {
        "scales": scales.round(6).tolist(),
        "even": _even(config.keys, scales),
        "random": _random(rngs[0], config, scales),
        "curves": [
            _curve(rng, dim, config) for rng, dim in zip(rngs[1:], config.curve_dims, strict=True)
        ],
    }


def _even(keys: int, scales: np.ndarray) -> JSON:
    """Norms for evenly spaced scores, and their peak on a finer grid."""
    query, key = jnp.ones((1, 1)), jnp.linspace(-1, 1, keys)[:, None]
    top = jax.nn.one_hot(jnp.array([keys - 1]), keys)

    @jax.jit
    def sweep(scales: Array) -> ScaleSweep:
        return logit_scale_sweep(query, key, jnp.eye(keys), top, scales, score="dot")

    fine = np.linspace(scales[0], scales[-1], 2000)
    norm = np.asarray(sweep(jnp.asarray(fine, jnp.float32)).gradient_norm, np.float64)
    coarse = sweep(jnp.asarray(scales, jnp.float32))
    deviation = float(np.std(np.linspace(-1, 1, keys)))
    return {
        "gradient_norm": _list(coarse.gradient_norm),
        "jacobian_norm": _list(coarse.jacobian_norm),
        "peak_scale": float(fine[norm.argmax()]),
        "peak": float(norm.max()),
        "deviation": deviation,
        "of_peak": {
            name: float(np.interp(scale, fine, norm) / norm.max())
            for name, scale in (
                ("1", 1.0), ("10", 10.0), ("20", 20.0), ("unit variance", 1 / deviation),
            )
        },
    }  # fmt: skip


def _random(rng: Array, config: Config, scales: np.ndarray) -> JSON:
    """Norms for random scores: scaled dot products times c, or raw ones with d_k = c²."""
    keys = config.keys
    at = jnp.asarray(scales, jnp.float32)

    @jax.jit
    def norms(rngs: Array) -> tuple[Array, Array]:
        def norms_of_sample(rng: Array) -> tuple[Array, Array]:
            query, key = _drawn(rng, config.dim, keys)
            top = jnp.argmax(attention_weights(query, key), axis=-1)
            sweep = logit_scale_sweep(query, key, jnp.eye(keys), jax.nn.one_hot(top, keys), at)
            return sweep.gradient_norm, sweep.jacobian_norm

        return jax.lax.map(norms_of_sample, rngs, batch_size=64)

    gradient, jacobian = (
        np.asarray(array, np.float64) for array in norms(jax.random.split(rng, config.samples))
    )  # [samples, scales]
    low, median, high = np.quantile(gradient, QUANTILES, axis=0)
    return {
        "mean": _list(gradient.mean(0)), "sd": _list(gradient.std(0, ddof=1)),
        "low": _list(low), "median": _list(median), "high": _list(high),
        "jacobian_mean": _list(jacobian.mean(0)),
        "without_gradient": _list((gradient < NO_GRADIENT_NORM).mean(0)),
    }  # fmt: skip


def _curve(rng: Array, dim: int, config: Config) -> JSON:
    """Weights in falling order, means and quantiles over samples."""

    @jax.jit
    def weights(rngs: Array) -> dict[str, Array]:
        def weights_of_sample(rng: Array) -> dict[str, Array]:
            query, key = _drawn(rng, dim, config.curve_keys)
            return {
                arm: attention_weights(query, key, score=score)[0]
                for arm, score in (("raw", "dot"), ("scaled", "scaled"))
            }

        return jax.lax.map(weights_of_sample, rngs, batch_size=64)

    weights_by_arm = weights(jax.random.split(rng, config.samples))
    numbers: JSON = {}
    for arm, drawn in weights_by_arm.items():
        falling = -np.sort(-np.asarray(drawn, np.float64), axis=-1)
        low, _, high = np.quantile(falling, QUANTILES, axis=0)
        numbers[arm] = {
            "mean": _list(falling.mean(0)), "sd": _list(falling.std(0, ddof=1)),
            "low": _list(low), "high": _list(high),
            "jacobian_norm": round(float(jax.jit(softmax_jacobian_norm)(drawn).mean()), 6),
        }  # fmt: skip
    return numbers


def _drawn(rng: Array, dim: int, keys: int) -> tuple[Array, Array]:
    query_rng, key_rng = jax.random.split(rng)
    return jax.random.normal(query_rng, (1, dim)), jax.random.normal(key_rng, (keys, dim))


def even_norm(keys: int, scale: float) -> float:
    """Returns the norm for evenly spaced scores, from sums of geometric series."""
    r = math.exp(-2 * scale / (keys - 1))
    top = (1 - r) / (1 - r**keys)
    others = top**2 * r**2 * (1 - r ** (2 * (keys - 1))) / (1 - r**2)
    return top * math.sqrt((1 - top) ** 2 + others)


def even_peak(keys: int) -> float:
    """Returns the scale of the peak for evenly spaced scores, with r^T neglected."""
    return (keys - 1) / 2 * math.log(6 / (math.sqrt(33) - 3))


def expectations(numbers: JSON) -> list[Expectation]:
    """The true shape of the source's curve, and its claims for random scores."""
    config, even, random = numbers["config"], numbers["even"], numbers["random"]
    keys, root = config["keys"], config["samples"] ** 0.5
    scales = np.array(numbers["scales"])
    step = (config["largest_scale"] - 0.1) / 1999
    checks = [
        near(
            "scale at which the gradient of the largest of evenly spaced scores peaks",
            "near 1 (unit variance)", even["peak_scale"], even_peak(keys), 0.02 + step,
            "a step of the grid, and float32 on a flat top", contradicts=True,
        )
    ]  # fmt: skip
    peak = even_norm(keys, even_peak(keys))
    for scale, source in (("1", "at its peak"), ("10", "near zero"), ("20", "near zero")):
        if float(scale) <= config["largest_scale"]:
            checks.append(
                near(
                    f"norm at scale {scale} / peak", source, even["of_peak"][scale],
                    even_norm(keys, float(scale)) / peak, 1e-3, "interpolation on the grid",
                    contradicts=True,
                )
            )  # fmt: skip
    norms = even["jacobian_norm"]
    checks.append(
        Expectation(
            "evenly spaced scores: largest norm of the Jacobian / that at the smallest scale",
            "1 (largest when uniform)", max(norms) / norms[0], 1.1, math.inf,
            "two keys that tie have 1/2, uniform attention sqrt(T - 1) / T", contradicts=True,
        )
    )  # fmt: skip
    mean, deviation = np.array(random["mean"]), np.array(random["sd"])
    at_ten, last = int(np.abs(scales - 10).argmin()), len(scales) - 1
    limit = expected_maximum(keys) / math.sqrt(2)
    for index, claim, unit, source in (
        (at_ten, "largest mean norm", mean.max(), "near zero"),
        (last, "(m_T / (sqrt(2) c))", limit / scales[last], ""),
    ):
        at = float(scales[index])
        expected = limit / at / unit
        checks.append(
            near(
                f"random scores: mean norm at scale {at:.3g} / {claim}", source,
                mean[index] / unit, expected,
                4 * deviation[index] / root / unit + 2 / at * expected,
                "4 standard errors; the next term is of relative order 1/c",
                contradicts=bool(source),
            )
        )  # fmt: skip
    checks += [
        Expectation(
            "random scores: median norm / mean norm at the largest scale", "near zero",
            random["median"][last] / mean[last], 0, 0.1,
            "the median gap, of order 1/m_T, is far above 1/c",
        ),
    ]  # fmt: skip
    return checks + _curve_expectations(numbers)


def _curve_expectations(numbers: JSON) -> list[Expectation]:
    config = numbers["config"]
    root, dims = config["samples"] ** 0.5, config["curve_dims"]
    tops = [
        (of_dim["scaled"]["mean"][0], of_dim["scaled"]["sd"][0]) for of_dim in numbers["curves"]
    ]
    raw, dim = numbers["curves"][-1]["raw"], dims[-1]
    missing = math.log(2) * expected_maximum(config["curve_keys"]) / dim**0.5
    checks = [
        near(
            f"scaled: largest weight at d_k = {size} minus that at {dim}", "all curves overlap",
            mean - tops[-1][0], 0, 4 * math.hypot(deviation, tops[-1][1]) / root + 1 / (2 * size),
            "4 standard errors; |q| / sqrt(d_k) has variance 1 / (2 d_k)",
        )
        for size, (mean, deviation) in zip(dims[:-1], tops[:-1], strict=True)
    ]  # fmt: skip
    checks.append(
        near(
            f"raw: 1 - largest weight at d_k = {dim} / (log 2 m_T / sqrt(d_k))", "one-hot",
            (1 - raw["mean"][0]) / missing, 1,
            4 * raw["sd"][0] / root / missing + 2 / dim**0.5,
            "4 standard errors; the next term is of relative order 1/sqrt(d_k)",
        )
    )  # fmt: skip
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
