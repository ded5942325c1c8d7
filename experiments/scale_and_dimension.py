"""Is it the score, its scale, or its size? Comparisons with all but one of them held equal.

Source:   chapter 38 ("Attention Variants"), exercise 38.4: train unscaled dot and scaled dot on the
          reversal task with d = 256, compare their final losses, and plot the entropy of attention
          across training. The comparisons at equal logits and equal parameters are ours.
Command:  .venv/bin/python experiments/scale_and_dimension.py
Time:     10 minutes of processor time, on 2 CPU cores shared with much other work; a third of it
          compiles.
Expected: at d = 256 unscaled dot ends with a higher loss than scaled dot and with a lower entropy.
          §38.6 found scaled dot the worst score at d = 64; with padding masked it should not be.

All models are the reversal model with padding masked; only the cross attention's score changes.
Every arm is trained at several learning rates, and compared at the one where its mean loss in the
end is least, so that no arm pays for a rate that suits another.

1. Dimension: dot and scaled dot at d of 16, 64 and 256; the source's exercise is the last.
2. Size of logits: dot, times a constant that makes its logits begin with a given deviation within
   a row. A scaled dot product is the same function: at equal logits the two are one model.
3. The four scores at one d: as they are; their logits begin with equal deviations, by a constant
   factor measured for each seed; with equally many parameters; and with both equal. General has d^2
   parameters. Additive gets them with a hidden layer of d / 2 (and d / 2 for v), dot and scaled dot
   with projections of query and key to d / 2 each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scale_and_dimension_training as training
from experiment import JSON, conduct, run_command, significant
from scale_and_dimension_answers import expectations, report
from scale_and_dimension_figures import CAPTIONS, plot
from scale_and_dimension_training import Size

from attention_jax.nn.seq2seq_config import Seq2SeqConfig
from attention_jax.nn.transformer import BlockConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.reversal.task import ReversalConfig
from attention_jax.training.loop import LoopConfig

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "main", "plot", "report", "run"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; what is not here is as in `ReversalConfig`.

    Attributes:
        dims: model sizes d of the first question, multiples of 4.
        steps: optimiser steps at each of them, multiples of `look_every`.
        size_dims: of `dims`, those of the second question.
        sizes: deviations that dot's logits begin with, within a row.
        score_dim: of `dims`, that of the third question.
        score_size: the deviation that all scores' logits begin with there.
        rates: Adam's learning rates at the start, at d = `score_dim`; at other d they are
            `score_dim` / d times these, since the best rate of a hidden layer falls about as 1 / d
            (Yang et al. 2022). Each falls to 0 along a cosine.
        seeds: models of each kind and rate.
        batch: strings a step.
        look_every: steps between two looks at entropy and loss.
        strings: in the batch that is looked at.
        test_strings: strings on which loss and exact match are taken in the end.
        results: where numbers and figures go.
    """

    dims: tuple[int, ...] = (16, 64, 256)
    steps: tuple[int, ...] = (400, 400, 300)
    size_dims: tuple[int, ...] = (16, 64)
    sizes: tuple[float, ...] = (0.25, 1, 2, 4, 8, 16)
    score_dim: int = 64
    score_size: float = 1.0
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: int = 3
    batch: int = 32
    look_every: int = 25
    strings: int = 64
    test_strings: int = 512
    results: Path = Path("experiments/results")

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
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
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
        check_folder("results", self.results)

    def training(self, score: str, dim: int) -> ReversalConfig:
        """A model and its training, but for the rate."""
        return ReversalConfig(
            model=Seq2SeqConfig(score=training.name_of(score), block=BlockConfig(dim=dim)),
            loop=LoopConfig(seeds=self.seeds, steps=self.steps[self.dims.index(dim)]),
            batch_size=self.batch,
        )


_LEAST = {"seeds": 2, "batch": 1, "look_every": 1, "strings": 1, "test_strings": 1}

QUICK = Config(
    dims=(16,), steps=(4,), size_dims=(16,), sizes=(1, 16), score_dim=16, rates=(3e-3,), seeds=2,
    batch=4, look_every=2, strings=8, test_strings=8,
)  # fmt: skip

DRAWN_FROM = 0  # the seed of all that is drawn but models and their batches
CURVES = ("loss", "entropy", "logit_sd")


def run(config: Config) -> JSON:
    """The numbers of all three questions."""
    numbers: JSON = {"dimension": {}, "size": {}, "scores": {}}
    for dim, steps in zip(config.dims, config.steps, strict=True):
        as_it_is = {"dot": Size(), "scaled": Size(factor=dim**-0.5)}
        sizes = config.sizes if dim in config.size_dims else ()
        equal = (config.score_size,) if dim == config.score_dim else ()
        begun_with = {sd: Size(sd=sd) for sd in (*sizes, *equal)}
        found = _trained(config, "DOT", dim, {**as_it_is, **begun_with})
        numbers["dimension"][str(dim)] = {
            "steps": list(range(0, steps + 1, config.look_every)),
            **{score: found[score] for score in as_it_is},
        }
        plain = {key: _without_curves(arm) for key, arm in found.items()}
        if sizes:
            numbers["size"][str(dim)] = {f"{sd:g}": plain[sd] for sd in sizes}
        if equal:
            numbers["scores"] = _scores(config, plain)
    return numbers


def _scores(config: Config, dot: Mapping[Any, JSON]) -> JSON:
    """The third question; of dot it is known what without a projection comes out."""
    dim = config.score_dim
    equal = Size(sd=config.score_size)

    def both(score: str, **more: Size) -> dict[str, JSON]:
        sizes = {"as it is": Size(), "equal": equal, **more}
        found = _trained(config, score, dim, sizes)
        return {name: _without_curves(arm) for name, arm in found.items()}

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
    """One compiled program: each size at each rate, all seeds."""
    rates = [rate * config.score_dim / dim for rate in config.rates]
    runs = [(size, rate) for size in sizes.values() for rate in rates]
    found = training.trained(
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
        key: _arm(rates, found, slice(index * count, (index + 1) * count))
        for index, key in enumerate(sizes)
    }


def _arm(rates: Sequence[float], found: training.Arrays, rows: slice) -> JSON:
    """What came out of one size: by rate, lists over seeds, curves over looks of these."""
    curves = {name: found["curves"][name][rows] for name in CURVES}
    return {
        "parameters": int(found["parameters"]),
        "factor": significant(found["factor"][rows][0]),
        "initial_logit_sd": significant(curves["logit_sd"][0, :, 0]),
        "initial_entropy": significant(curves["entropy"][0, :, 0]),
        "rates": {
            f"{rate:g}": {
                "loss": significant(found["loss"][rows][index]),
                "exact_match": significant(found["exact_match"][rows][index]),
                "entropy": significant(curves["entropy"][index, :, -1]),
                "curves": {name: significant(values[index].T) for name, values in curves.items()},
            }
            for index, rate in enumerate(rates)
        },
    }


def _without_curves(arm: JSON) -> JSON:
    rates = {
        rate: {name: value for name, value in of_rate.items() if name != "curves"}
        for rate, of_rate in arm["rates"].items()
    }
    return {**arm, "rates": rates}


def main(config: Config) -> int:
    """Runs and writes, and says what was found."""
    return conduct("scale_and_dimension", config, run, plot, expectations, report=report)


if __name__ == "__main__":
    run_command(Config, main)
