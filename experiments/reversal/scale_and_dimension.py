"""Is it the score, its scale, or its size? Comparisons with all but one of them held equal.

Source:   chapter 38 ("Attention Variants"), exercise 38.4: train unscaled dot and scaled dot on the
          reversal task with d = 256, compare their final losses, and plot the entropy of attention
          across training. The comparisons at equal logits and equal parameters are ours.
Command:  .venv/bin/python -m experiments.reversal.scale_and_dimension
Time:     35 minutes of processor time on 2 CPU cores; 50 minutes beside other work.
Expected: at d = 256 unscaled dot ends with a higher loss than scaled dot and with a lower entropy.
          §38.6 found scaled dot the worst score at d = 64; with padding masked it should not be.

All models are the reversal model for short strings (`SHORT_STRINGS` in `training_settings.py`) with
padding masked; only the cross attention's score changes. The scores are part of the question, so
that there is no setting for them. All trainings have the same number of steps, with which unscaled
dot at d = 16 and 64 stops improving; at d = 256 it takes more.

Every arm is trained at several learning rates, and compared at the rate with its lowest mean final
loss, so that no arm suffers from a rate that suits another.

1. Dimension: dot and scaled dot at d of 16, 64 and 256; the source's exercise is d = 256.
2. Size of logits: dot times a constant, chosen so that its logits begin with a given deviation
   within a row. Scaled dot is the same function: at equal logits both are one model.
3. The four scores at one d: as they are; with logits that begin with equal deviations, by a
   constant factor measured for each seed; with equally many parameters; and with both equal.
   General has d^2 parameters. Additive gets as many with a hidden layer of d / 2 (and d / 2 for v),
   dot and scaled dot with projections of query and key to d / 2 each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_jax.tasks.reversal import Reversal
from experiments.experiment import JSON, run_experiment, significant
from experiments.reversal import scale_and_dimension_training as training
from experiments.reversal.arms import Arrays
from experiments.reversal.scale_and_dimension_answers import best_rate, expectations, report
from experiments.reversal.scale_and_dimension_figures import CAPTIONS, plot
from experiments.reversal.scale_and_dimension_training import Size
from experiments.reversal.training_settings import SHORT_STRINGS
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; all others are the defaults of `Reversal`.

    Attributes:
        dims: model sizes d of part 1, multiples of 4.
        steps: optimiser steps for each of `dims`, multiples of `look_every`.
        size_dims: those of `dims` for part 2.
        sizes: initial deviations of dot's logits within a row, in part 2.
        score_dim: the one of `dims` for part 3.
        score_size: the initial deviation of all scores' logits in part 3.
        rates: Adam's initial learning rates at d = `score_dim`; at other d they are multiplied by
            `score_dim` / d, since the best rate of a hidden layer falls about as 1 / d (Yang et al.
            2022). Each falls to 0 along a cosine.
        seeds: trainings per arm and rate.
        batch_size: strings per step.
        look_every: steps between two measurements of entropy and loss.
        strings: strings in the batch for these measurements.
        test_strings: strings for the final loss and exact match.
    """

    dims: tuple[int, ...] = (16, 64, 256)
    steps: tuple[int, ...] = (1600, 1600, 1600)
    size_dims: tuple[int, ...] = (16, 64)
    sizes: tuple[float, ...] = (0.25, 1, 2, 4, 8, 16)
    score_dim: int = 64
    score_size: float = 1.0
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: int = 3
    batch_size: int = 32
    look_every: int = 50
    strings: int = 64
    test_strings: int = 512

    def __post_init__(self) -> None:
        for name in ("dims", "size_dims", "sizes", "rates"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be at least one, each once; got {values}")
        if len(self.steps) != len(self.dims):
            raise ValueError(f"steps must be one for each of dims {self.dims}; got {self.steps}")
        for name in ("sizes", "rates", "score_size"):
            for value in np.ravel(getattr(self, name)):
                if not 0 < value < np.inf:
                    raise ValueError(f"{name} must be finite and greater than 0; got {value}")
        check_least(self, seeds=2, batch_size=1, look_every=1, strings=1, test_strings=1)
        for name in ("size_dims", "score_dim"):
            for dim in np.ravel(getattr(self, name)):
                if dim not in self.dims:
                    raise ValueError(f"{name} must be among dims {self.dims}; got {dim}")
        for dim, steps in zip(self.dims, self.steps, strict=True):
            if dim % 4 or dim < 4:
                raise ValueError(f"dims must be multiples of 4; got {dim}")
            if steps < 1 or steps % self.look_every:
                raise ValueError(
                    f"steps must be multiples of look_every {self.look_every}; got {steps}"
                )

    def training(self, score: str, dim: int) -> Reversal:
        """Returns the settings of one run, without its learning rate."""
        return dataclasses.replace(
            SHORT_STRINGS,
            model=dataclasses.replace(SHORT_STRINGS.model, score=training.name_of(score), dim=dim),
            train=dataclasses.replace(
                SHORT_STRINGS.train,
                seeds=self.seeds,
                steps=self.steps[self.dims.index(dim)],
                batch_size=self.batch_size,
            ),
        )


QUICK = Config(
    dims=(16,), steps=(4,), size_dims=(16,), sizes=(1, 16), score_dim=16, rates=(3e-3,), seeds=2,
    batch_size=4, look_every=2, strings=8, test_strings=8,
)  # fmt: skip

DRAWN_FROM = 0  # seed of everything random, except models and their batches
CURVES = ("loss", "entropy", "logit_sd")


def run(config: Config) -> JSON:
    """Computes the numbers of all three parts."""
    numbers: JSON = {"dimension": {}, "size": {}, "scores": {}}
    for dim, steps in zip(config.dims, config.steps, strict=True):
        as_it_is = {"dot": Size(), "scaled": Size(factor=dim**-0.5)}
        sizes = config.sizes if dim in config.size_dims else ()
        equal = (config.score_size,) if dim == config.score_dim else ()
        begun_with = {sd: Size(sd=sd) for sd in (*sizes, *equal)}
        arms = _trained(config, "DOT", dim, {**as_it_is, **begun_with})
        numbers["dimension"][str(dim)] = {
            "steps": list(range(0, steps + 1, config.look_every)),
            **{score: _with_curves(arms[score]) for score in as_it_is},
        }
        plain = {key: _without_curves(arm) for key, arm in arms.items()}
        if sizes:
            numbers["size"][str(dim)] = {f"{sd:g}": plain[sd] for sd in sizes}
        if equal:
            numbers["scores"] = _scores(config, plain)
    return numbers


def _scores(config: Config, dot: Mapping[Any, JSON]) -> JSON:
    """Part 3; `dot` holds the results of dot without a projection."""
    dim = config.score_dim
    equal = Size(sd=config.score_size)

    def both(score: str, **more: Size) -> dict[str, JSON]:
        sizes = {"as it is": Size(), "equal": equal, **more}
        arms = _trained(config, score, dim, sizes)
        return {name: _without_curves(arm) for name, arm in arms.items()}

    additive, general, half = (both(score) for score in ("ADDITIVE", "GENERAL", "HALF_ADDITIVE"))
    projected = both("PROJECTED_DOT", scaled=Size(factor=(dim // 2) ** -0.5))
    return {
        "as they are": {
            "additive": additive["as it is"],
            "dot": dot["dot"],
            "general": general["as it is"],
            "scaled": dot["scaled"],
        },
        "equal logits": {
            "additive": additive["equal"],
            "dot = scaled": dot[config.score_size],
            "general": general["equal"],
        },
        "equal parameters": {
            "additive": half["as it is"],
            "dot": projected["as it is"],
            "general": general["as it is"],
            "scaled": projected["scaled"],
        },
        "equal logits and parameters": {
            "additive": half["equal"],
            "dot = scaled": projected["equal"],
            "general": general["equal"],
        },
    }


def _trained(config: Config, score: str, dim: int, sizes: Mapping[Any, Size]) -> dict[Any, JSON]:
    """Trains each size at each rate, all seeds, in one compiled program."""
    rates = [rate * config.score_dim / dim for rate in config.rates]
    runs = [(size, rate) for size in sizes.values() for rate in rates]
    results = training.trained(
        config.training(score, dim),
        runs,
        every=config.look_every,
        strings=config.strings,
        test_strings=config.test_strings,
        seed=DRAWN_FROM,
    )
    print(f"{score}, d = {dim}: {len(runs)} runs of {config.seeds} seeds", flush=True)
    count = len(rates)
    return {
        key: _arm(rates, results, slice(index * count, (index + 1) * count))
        for index, key in enumerate(sizes)
    }


def _arm(rates: Sequence[float], results: Arrays, rows: slice) -> JSON:
    """The results of one size: by rate, lists over seeds, and curves over looks."""
    curves = {name: results["curves"][name][rows] for name in CURVES}
    return {
        "parameters": int(results["parameters"]),
        "factor": significant(results["factor"][rows][0]),
        "initial_logit_sd": significant(curves["logit_sd"][0, :, 0]),
        "initial_entropy": significant(curves["entropy"][0, :, 0]),
        "rates": {
            f"{rate:g}": {
                "loss": significant(results["loss"][rows][index]),
                "exact_match": significant(results["exact_match"][rows][index]),
                "entropy": significant(curves["entropy"][index, :, -1]),
                "curves": {name: significant(values[index].T) for name, values in curves.items()},
            }
            for index, rate in enumerate(rates)
        },
    }


def _with_curves(arm: JSON) -> JSON:
    """The arm with the curves of its best rate, and no others."""
    return {**_without_curves(arm), "curves": arm["rates"][best_rate(arm)]["curves"]}


def _without_curves(arm: JSON) -> JSON:
    rates = {
        rate: {name: value for name, value in of_rate.items() if name != "curves"}
        for rate, of_rate in arm["rates"].items()
    }
    return {**arm, "rates": rates}


if __name__ == "__main__":
    run_experiment(__name__)
