"""Which queries and keys make attention uniform, which one-hot, and what gradient is left?

Source:   topic 7: identical keys and orthogonal queries flatten attention, orthogonal keys with a
          peaked similarity make it nearly one-hot; watch the gradient when the softmax saturates.
Command:  .venv/bin/python -m experiments.scores.geometry
Time:     25 seconds on 2 CPU cores.
Expected: a query orthogonal to all keys: 1 / S for dot, scaled and general; not for additive.
          Orthogonal keys of growing length, the query along one of them: from uniform to one-hot as
          the formula below says, for all but additive. A saturated softmax sends back finite
          gradients.

Tokens have D features and, at key scale 1, length sqrt(D), as tokens of unit variance do. With S
orthogonal keys, c times as long, and the query along the first, the first logit is larger than the
others by g = c D (dot) or c sqrt(D) (scaled; general with a rotation W / sqrt(D)), and

    weight of the first = 1 / (1 + (S - 1) e^-g).

The norm of the softmax's Jacobian, the share of a gradient that the softmax passes back, then falls
as e^-g. Additive attention cannot be saturated in this way: |e| <= sum_a |v_a| whatever the keys
are, and with ever longer keys its weights tend to those of v . sign(Wk k). Its softmax goes on to
pass gradients, but its tanh is saturated and lets none through. Scores with parameters have fresh
ones; the bands are over draws of parameters and keys.

Saturated attention still learns where two keys tie: between two long keys, at 45 degrees, the
Jacobian has its largest norm, 1 / 2.

A saturated gradient is 0 in the reference implementation. In tiles it is a rounding error of the
gradient that an unsaturated softmax would send, since the two terms of dO . V - dO . O are summed
separately.

`--scores` measures other scores. The angle is measured for scaled dot alone. What holds by
construction is tested and not claimed: identical keys have weight 1 / S with every score, a query
orthogonal to the keys with those scores that are products, and the formula above.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax import attention, attention_weights
from attention_jax.analysis import softmax_jacobian_norm
from attention_jax.implementations import PORTABLE
from experiments.experiment import JSON, Expectation, ScoreNames, near, run_experiment
from experiments.scores.chosen_scores import check_scores, fresh_params
from experiments.scores.geometry_figures import CAPTIONS, plot
from experiments.scores.geometry_report import SATURATING_SCALE, report
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

Array = jax.Array

DOT_LIKE = ("dot", "scaled", "general")


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        dim: D.
        source_length: S, at most D - 1, so that one direction is orthogonal to all S keys.
        scales: number of key scales c in the sweep, from 0.01 to 1000.
        angle_scales: key scales of the sweep over angles.
        angles: number of angles from 0 to 90 degrees, odd so that 45 is among them.
        draws: random sets of keys, queries and parameters.
        scores: scores to compare.
    """

    dim: int = 32
    source_length: int = 16
    scales: int = 61
    angle_scales: tuple[float, ...] = (0.1, 0.5, 2.0, 10.0)
    angles: int = 91
    draws: int = 200
    scores: ScoreNames = ("dot", "scaled", "general", "additive")

    def __post_init__(self) -> None:
        if not 2 <= self.source_length < self.dim:
            raise ValueError(
                f"source_length must be from 2 to dim - 1 = {self.dim - 1}; got"
                f" {self.source_length}"
            )
        check_least(self, scales=2, draws=2)
        if self.draws < self.source_length:
            raise ValueError(
                f"draws must be at least source_length, {self.source_length}; got {self.draws}"
            )
        if self.angles < 3 or self.angles % 2 == 0:
            raise ValueError(f"angles must be odd and at least 3; got {self.angles}")
        if not self.angle_scales or min(self.angle_scales) < 0:
            raise ValueError(
                f"angle_scales must be one or more of at least 0; got {self.angle_scales}"
            )
        check_scores(self.scores, self.dim)


QUICK = Config(dim=13, source_length=7, scales=11, angles=5, draws=10)


class Draws(NamedTuple):
    """Everything random, n draws of each."""

    values: Array  # [n, 3]
    bases: Array  # [n, D, D] orthogonal rows of length sqrt(D)
    params: dict[str, Any]  # of each score, leaves [n, ...]


def run(config: Config) -> JSON:
    """Measures queries orthogonal to the keys, the two sweeps, and gradients at saturation."""
    draws = draw(config)
    scales = jnp.concatenate([jnp.zeros(1), jnp.logspace(-2, 3, config.scales)])
    return {
        "orthogonal_query": {
            name: _orthogonal_query(config, draws, name) for name in config.scores
        },
        # All digits: the Jacobian's norm changes by 70 times as much as they do.
        "key_scales": np.asarray(scales, np.float64).tolist(),
        "scales": {name: scale_sweep(config, draws, name, scales) for name in config.scores},
        "additive_limit": (additive_limit(config, draws) if "additive" in config.scores else None),
        "angles": _angle_sweep(config, draws.bases[0]),
        "saturated": {
            name: {
                implementation: saturated(config, draws, name, implementation)
                for implementation in PORTABLE
            }
            for name in config.scores
        },
    }


def draw(config: Config) -> Draws:
    """Draws values, keys and parameters."""
    value_rng, basis_rng, param_rng = jax.random.split(jax.random.key(0), 3)
    count, dim = config.draws, config.dim
    orthonormal, _ = jnp.linalg.qr(jax.random.normal(basis_rng, (count, dim, dim)))
    param_rngs = jax.random.split(param_rng, count)
    return Draws(
        values=jax.random.normal(value_rng, (count, 3)),
        bases=orthonormal.mT * math.sqrt(dim),
        params={
            name: jax.vmap(lambda rng, name=name: fresh_params(name, rng, dim))(param_rngs)
            for name in config.scores
        },
    )


def _orthogonal_query(config: Config, draws: Draws, name: str) -> float:
    """Mean largest difference from 1 / S, the query (projected by W) orthogonal to the keys."""
    length, params = config.source_length, draws.params[name]
    query, key = draws.bases[:, length : length + 1], draws.bases[:, :length]
    if name == "general":
        query = jnp.linalg.solve(
            params["kernel"].mT, query.mT
        ).mT  # query @ W is orthogonal to the keys
    weights = attention_weights(query, key, score=name, params=params)
    return float(jnp.abs(weights - 1 / length).max(axis=-1).mean())


def scale_sweep(config: Config, draws: Draws, name: str, scales: Array) -> JSON:
    """Returns the largest weight and the Jacobian norm by scale of orthogonal keys, over draws."""

    @jax.jit
    def measures(bases: Array, params: Any, scales: Array) -> tuple[Array, Array]:
        key = scales[:, None, None, None] * bases[None, :, : config.source_length]
        query = jnp.broadcast_to(bases[:, :1], (len(scales), config.draws, 1, config.dim))
        weights = attention_weights(query, key, score=name, params=params)[:, :, 0]
        return weights.max(axis=-1), softmax_jacobian_norm(weights)

    arrays = measures(draws.bases, draws.params[name], scales)
    summary: JSON = {}
    for measure, array in zip(("largest_weight", "jacobian_norm"), arrays, strict=True):
        values = np.asarray(array, np.float64)
        low, median, high = np.quantile(values, (0.025, 0.5, 0.975), axis=1)
        mean = values.mean(axis=1)
        curves = {"mean": mean, "low": low, "median": median, "high": high}
        summary[measure] = {curve: _digits(numbers) for curve, numbers in curves.items()}
    return summary


def additive_limit(config: Config, draws: Draws) -> float:
    """Returns the mean largest weight of additive attention for infinitely long keys."""
    bases, params = jax.device_get((draws.bases, draws.params["additive"]))
    signs = np.sign(bases[:, : config.source_length] @ params["key_kernel"])
    exponentials = np.exp((signs @ params["v"][..., None])[..., 0])
    return float((exponentials.max(axis=-1) / exponentials.sum(axis=-1)).mean())


def _angle_sweep(config: Config, basis: Array) -> JSON:
    """Weights of scaled dot attention while the query turns from the first key to the second."""
    key = basis[: config.source_length]
    angles = jnp.linspace(0, jnp.pi / 2, config.angles)
    query = jnp.cos(angles)[:, None] * key[:1] + jnp.sin(angles)[:, None] * key[1:2]
    at_scales = {}
    for scale in config.angle_scales:
        weights = attention_weights(query, scale * key)
        at_scales[str(scale)] = {
            "first": _digits(weights[:, 0]),
            "second": _digits(weights[:, 1]),
            "jacobian_norm": _digits(softmax_jacobian_norm(weights)),
        }
    return {"degrees": np.linspace(0, 90, config.angles).tolist(), "scales": at_scales}


def saturated(config: Config, draws: Draws, name: str, implementation: str) -> JSON:
    """Returns sizes of gradients where keys have scale 10,000 and each query lies along a key."""
    basis = draws.bases[0, : config.source_length]
    params = jax.tree.map(lambda leaf: leaf[0], draws.params[name])
    if name == "general":
        params = {"kernel": jnp.eye(config.dim) / math.sqrt(config.dim)}
    arrays = {
        "query": basis,
        "key": SATURATING_SCALE * basis,
        "value": draws.values[: config.source_length],
        "params": params,
    }

    def loss(arrays: dict[str, Any]) -> tuple[Array, Array]:
        output = attention(**arrays, score=name, implementation=implementation)
        return jnp.sum(output**2), output

    gradients, output = jax.device_get(jax.jit(jax.grad(loss, has_aux=True))(arrays))
    key, value = np.asarray(arrays["key"]), np.asarray(arrays["value"])
    unsaturated = np.abs(2 * output @ value.T).max() * np.abs(key).max()
    leaves = [output, *jax.tree.leaves(gradients)]
    return {
        "not_finite": int(sum(np.sum(~np.isfinite(leaf)) for leaf in leaves)),
        "output_from_one_hot": float(np.abs(output - value).max()),
        "largest_dquery": float(np.abs(gradients["query"]).max()),
        "share_of_unsaturated": float(np.abs(gradients["query"]).max() / unsaturated),
    }


def _digits(array: Any) -> Any:
    return [float(f"{number:.6g}") for number in np.asarray(array, np.float64)]


def expectations(numbers: JSON) -> list[Expectation]:
    """Limits and formulas, up to rounding."""
    config, checks = numbers["config"], []
    if "additive" in numbers["orthogonal_query"]:
        checks.append(
            Expectation(
                "orthogonal query, additive: largest difference from 1 / S, mean over draws", "0",
                numbers["orthogonal_query"]["additive"], 0.5 / config["source_length"], math.inf,
                "its logits differ: deviation about 0.7 within a row", contradicts=True,
            )
        )  # fmt: skip
    for name, sweep in numbers["scales"].items():
        checks += _sweep_expectations(name, sweep, numbers["additive_limit"])
    middle = len(numbers["angles"]["degrees"]) // 2
    longest = max(numbers["angles"]["scales"], key=float)
    norm = numbers["angles"]["scales"][longest]["jacobian_norm"][middle]
    claim = f"Jacobian's norm at 45 degrees and key scale {longest}"
    checks.append(near(claim, "", norm, 0.5, 1e-4, "the other keys' weights"))
    for name, by_implementation in numbers["saturated"].items():
        for implementation, measured in by_implementation.items():
            checks += _saturated_expectations(name, implementation, measured)
    return checks


def _sweep_expectations(
    name: str, sweep: JSON, limit_of_additive: float | None
) -> list[Expectation]:
    largest = sweep["largest_weight"]["mean"][-1]
    if name == "additive" and limit_of_additive is not None:
        claim = "additive: largest weight at the largest scale minus that of infinite keys, mean"
        difference = largest - limit_of_additive
        return [near(claim, "one-hot", difference, 0, 0.01, "tanh near 0", contradicts=True)]
    if name not in DOT_LIKE:
        return []
    least, tolerance = (0.99, "near ties of random logits") if name == "general" else (1, "exact")
    claim = f"{name}: largest weight at the largest scale, mean"
    return [Expectation(claim, "1", largest, least, 1 + 1e-6, tolerance)]


def _saturated_expectations(name: str, implementation: str, measured: JSON) -> list[Expectation]:
    what = f"saturated backward, {name}, {implementation}"
    checks = [
        near(f"{what}: numbers that are not finite", "", measured["not_finite"], 0, 0, "exact")
    ]
    if name == "additive":
        claim = f"{what}: largest gradient of the query, behind a saturated tanh"
        tolerance = "1 - tanh^2 is 0 except where Wk k is small, which is rare"
        checks.append(near(claim, "", measured["largest_dquery"], 0, 1e-3, tolerance))
    if name in DOT_LIKE:
        claim = f"{what}: gradient of the query / that of an unsaturated softmax"
        within = 0 if implementation == "reference" else 1e-6
        share = measured["share_of_unsaturated"]
        checks.append(near(claim, "", share, 0, within, "exact; in tiles, rounding"))
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
