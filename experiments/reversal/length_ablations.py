"""Which parts of the recipe make attention reverse strings of any length? Each part is removed.

Source:   ours; Delétang et al. 2022 for the task, Ruoss et al. 2023 for subsets of positions,
          Chiang and Cholak 2022 for logits that grow with the logarithm of the length.
Command:  .venv/bin/python -m experiments.reversal.length_ablations
Time:     25 minutes on 2 CPU cores beside two other jobs, 23 of processor time.
Expected: without codes that source and target share (another anchor, no positions) no accuracy is
          left beyond the trained lengths. With shared codes, positions that were never seen in
          training and logits that do not grow cost accuracy beyond the trained lengths, and codes
          whose neighbours hardly differ cost accuracy everywhere.

The recipe is that of `length_generalization.py`, with scaled dot. The size of logits is also varied
for additive attention, whose logits are bounded. Every arm is trained on lengths 1-40, and tested
on up to 5,000 letters with the previous letters given. Two arms differ from the recipe in more than
one setting: learned codes have no waves, and rotations have no factor and a fastest wave of 1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attention_jax.nn.position_config import ANY_LENGTH, PositionConfig
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import Additive, Params, ScaledDot, Score, WrappedScore
from attention_jax.tasks.reversal.task import ReversalConfig
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.reversal.arms import trained_arm
from experiments.reversal.length_evaluation import teacher_forced
from experiments.reversal.length_figures import ablation_figure
from experiments.reversal.length_generalization import TRAINED
from experiments.reversal.length_generalization import Config as Recipe

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LearnedTemperature(WrappedScore):
    """e(q, k) = exp(t) score(q, k), with t learned from 0

    Params: {"log_factor": t, []; "score": those of `score`}.

    Attributes:
        score: the `Score` to multiply.
    """

    param_shapes = Score.param_shapes

    def init(self, rng: Array, query_dim: int, key_dim: int) -> Params:
        return {"log_factor": jnp.zeros(()), "score": self.score.init(rng, query_dim, key_dim)}

    def project_query(self, params: Params, query: Array) -> Any:
        return self.score.project_query(params["score"], query)

    def project_key(self, params: Params, key: Array) -> Any:
        return self.score.project_key(params["score"], key)

    def pair(self, params: Params, q_features: Array, k_features: Array) -> Array:
        logits = self.score.pair(params["score"], q_features, k_features)
        return jnp.exp(params["log_factor"]).astype(logits.dtype) * logits


SCALED = LearnedTemperature(ScaledDot())
ADDITIVE = LearnedTemperature(Additive())
MODULE = "experiments.reversal.length_ablations"  # __name__ is "__main__" on the command line


def _positions(**settings: Any) -> dict[str, Any]:
    return {"positions": dataclasses.replace(ANY_LENGTH, **settings)}


_PLAIN = {"positions": PositionConfig(), "sharpen_from": None}
# {part: {arm: settings of the model that differ from the recipe's}}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "where the source is counted from": {
        "its end": {},
        "its start": _positions(anchor="start"),
        "both": _positions(anchor="both"),
    },
    "which positions are seen in training": {
        "subsets of a random window": {},
        "random subsets of 8,192": _positions(draw="subset"),
        "0, 1, 2, ...": _positions(draw="none"),
    },
    "how a position enters": {
        "sinusoidal, fast waves": {},
        "sinusoidal, 2017's": _positions(max_wavelength=10_000.0, min_wavelength=1.0, scale=1.0),
        "learned": _positions(kind="learned"),
        "rotary": _positions(kind="rotary"),
        "none": _positions(kind="none"),
    },
    "size of logits, scaled dot": {
        "growing with log n": {},
        "as they are": {"sharpen_from": None},
        "learned factor": {"sharpen_from": None, "score": f"{MODULE}:SCALED"},
    },
    "size of logits, additive": {
        "growing with log n": {"score": "additive"},
        "as they are": {"score": "additive", "sharpen_from": None},
        "learned factor": {"score": f"{MODULE}:ADDITIVE", "sharpen_from": None},
    },
    "other attention": {
        "none": {},
        "the decoder's self attention": {"decoder_self_attention": True},
        "that and an encoder": {"decoder_self_attention": True, "encoder_layers": 1},
        "the same, this library's defaults": {
            "decoder_self_attention": True, "encoder_layers": 1, **_PLAIN,
        },
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings; those of training are the recipe's.

    Attributes:
        parts: full names of the parts of the recipe to vary; none for all.
        seeds: trainings per arm.
        steps: optimiser steps per training.
        lengths: lengths of the test strings.
        strings: test strings per length.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    parts: tuple[str, ...] = ()
    seeds: int = 3
    steps: int = 1500
    lengths: tuple[int, ...] = (10, 20, 40, 60, 100, 200, 500, 1000, 2000, 5000)
    strings: int = 4
    workdir: Path = Path("runs/length_ablations")

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts must be of {', '.join(map(repr, PARTS))}; got {part!r}")
        for name in ("strings", "lengths"):
            values = np.ravel(getattr(self, name))
            if values.size == 0 or min(values) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if max(np.ravel(self.lengths)) >= ANY_LENGTH.limit - ANY_LENGTH.first_id:
            raise ValueError(
                f"lengths must be below {ANY_LENGTH.limit - ANY_LENGTH.first_id}, where learned"
                f" positions end; got {self.lengths}"
            )
        for part in self.varied:
            for settings in PARTS[part].values():
                self.training(settings)
        check_folder("workdir", self.workdir)

    @property
    def varied(self) -> tuple[str, ...]:
        return self.parts or tuple(PARTS)

    def training(self, settings: dict[str, Any]) -> ReversalConfig:
        """Returns the settings of one run."""
        recipe = Recipe(seeds=self.seeds, steps=self.steps).training("scaled", 26)
        return dataclasses.replace(recipe, model=recipe.model.with_settings(**settings))


QUICK = Config(
    parts=("where the source is counted from",), seeds=2, steps=100, lengths=(10, 60), strings=4
)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm once."""
    arms: dict[ReversalConfig, JSON] = {}
    parts: JSON = {}
    for part in config.varied:
        for arm, settings in PARTS[part].items():
            training = config.training(settings)
            if training not in arms:
                arms[training] = _arm(config, training, f"{part}-{arm}")
            parts.setdefault(part, {})[arm] = arms[training]
    return {"parts": parts}


def _arm(config: Config, training: ReversalConfig, name: str) -> JSON:
    folder = "".join(letter if letter.isalnum() else "-" for letter in name)
    trained, measured = trained_arm(training, config.workdir / folder)
    accuracies = teacher_forced(trained, config.lengths, strings=config.strings)
    print(
        f"{name}: {[round(float(tokens.mean()), 4) for tokens, _ in accuracies.values()]}",
        flush=True,
    )
    return {
        "loss": measured["loss"][-1],
        "tokens": {
            str(length): tokens.round(6).tolist() for length, (tokens, _) in accuracies.items()
        },
    }


CAPTIONS = {
    "length_ablations": "Share of letters right against the length of the string, mean and one"
    " deviation over seeds, one panel per part of the recipe: the blue curve is the recipe, the"
    " other curves lack that part.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figure."""
    return {"length_ablations": ablation_figure(numbers["parts"], trained=TRAINED)}


def expectations(numbers: JSON) -> list[Expectation]:
    """The recipe works at any length; arms that cannot work beyond training fail there."""
    checks = []
    margin = "a clear margin"

    def mean(part: str, arm: str, length: int) -> float:
        return float(np.mean(numbers["parts"][part][arm]["tokens"][str(length)]))

    def add(part: str, arm: str, length: int, low: float, high: float) -> None:
        if part in numbers["parts"] and str(length) in numbers["parts"][part][arm]["tokens"]:
            claim = f"{part}: {arm}; letters right at length {length}"
            checks.append(Expectation(claim, "", mean(part, arm, length), low, high, margin))

    where, _, enters, logits, *_, other = PARTS
    add(where, "its end", 500, 0.99, 1)
    for part, arm in (
        (where, "its start"), (enters, "none"), (other, "the same, this library's defaults")
    ):  # fmt: skip
        add(part, arm, 500, 0, 0.2)
    add(logits, "growing with log n", 5000, 0.99, 1)
    return checks


def report(numbers: JSON) -> str:
    """Returns one table per part, as Markdown."""
    lines = []
    for part, arms in numbers["parts"].items():
        lengths = list(next(iter(arms.values()))["tokens"])
        lines += [
            f"| {part} |" + "".join(f" {int(length):,} |" for length in lengths),
            "| --- |" + " --- |" * len(lengths),
        ]
        for arm, measured in arms.items():
            cells = ""
            for length in lengths:
                mean, deviation = mean_and_deviation(100 * np.array(measured["tokens"][length]))
                cells += f" {mean:.1f} ± {deviation:.1f} |"
            lines.append(f"| {arm} |{cells}")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    run_experiment(__name__)
