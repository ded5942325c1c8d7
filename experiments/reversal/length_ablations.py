"""Which parts of the recipe make attention reverse strings of any length? Each part is removed.

Source:   ours; Delétang et al. 2022 for the task, Ruoss et al. 2023 for subsets of positions,
          Chiang and Cholak 2022 for logits that grow with the logarithm of the length.
Command:  .venv/bin/python -m experiments.reversal.length_ablations
Time:     20 minutes on 2 CPU cores beside other jobs.
Expected: without codes that source and target share (another anchor, no positions) no accuracy is
          left beyond the trained lengths. With shared codes, positions that were never seen in
          training, logits that do not grow, and codes whose neighbours hardly differ cost accuracy,
          the more the longer the string.

The recipe has the positions, the factor of the logits and the one attention of the task's default
model, with scaled dot, and neither SOS in the source nor weight decay. The size of logits is also
varied for additive attention, whose logits are bounded. There is no choice of scores here:
`length_generalization.py --scores` compares scores. Every arm is trained on lengths 1-40, and
tested on up to 5,000 letters with the previous letters given. Two arms differ from the recipe in
more than one setting: learned codes have no waves, and rotations have no factor and a fastest wave
of 1.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.reversal import Reversal
from experiments.experiment import JSON, Expectation, rounded, run_experiment
from experiments.reversal.arms import above_zero, trained_arm
from experiments.reversal.length_ablation_parts import PARTS, RECIPE
from experiments.reversal.length_ablations_report import report
from experiments.reversal.length_evaluation import teacher_forced
from experiments.reversal.length_figures import panels_figure
from experiments.reversal.length_generalization import TRAINED
from experiments.reversal.training_settings import TrainingSettings
from experiments.setting_checks import check_least

__all__ = ["CAPTIONS", "PARTS", "QUICK", "Config", "expectations", "plot", "report", "run"]


@dataclasses.dataclass(frozen=True)
class Config(TrainingSettings):
    """Settings beside those of every training; those that are not here are the recipe's.

    Attributes:
        parts: full names of the parts of the recipe to vary; none for all.
        lengths: lengths of the test strings.
        strings: test strings per length.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    parts: tuple[str, ...] = ()
    steps: int = 1500
    batch_size: int = 32
    learning_rate: float = RECIPE.train.learning_rate
    lengths: tuple[int, ...] = (10, 20, 40, 60, 100, 200, 500, 1000, 2000, 5000)
    strings: int = 4
    workdir: Path = Path("runs/length_ablations")

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise ValueError(f"parts must be of {', '.join(map(repr, PARTS))}; got {part!r}")
        check_least(self, strings=1, lengths=1)
        available = RECIPE.model.position_limit - RECIPE.model.first_position_id
        if max(np.ravel(self.lengths)) >= available:
            raise ValueError(
                f"lengths must be below {available}, where learned"
                f" positions end; got {self.lengths}"
            )
        for part in self.varied:
            for settings in PARTS[part].values():
                self.training(settings)
        check_folder("workdir", self.workdir)

    @property
    def varied(self) -> tuple[str, ...]:
        return self.parts or tuple(PARTS)

    def training(self, settings: dict[str, Any]) -> Reversal:
        """Returns the settings of one run."""
        return self.training_of(RECIPE, **settings)


QUICK = Config(
    parts=("where the source is counted from",), seeds=2, steps=100, lengths=(10, 60), strings=4
)


def run(config: Config) -> JSON:
    """Trains and evaluates every arm once."""
    arms: dict[Reversal, JSON] = {}
    parts: JSON = {}
    for part in config.varied:
        for arm, settings in PARTS[part].items():
            training = config.training(settings)
            if training not in arms:
                arms[training] = _arm(config, training, f"{part}-{arm}")
            parts.setdefault(part, {})[arm] = arms[training]
    return {"parts": parts}


def _arm(config: Config, training: Reversal, name: str) -> JSON:
    folder = "".join(letter if letter.isalnum() else "-" for letter in name)
    trained, _ = trained_arm(training, config.workdir / folder)
    accuracies = teacher_forced(trained, config.lengths, strings=config.strings)
    print(
        f"{name}: {[round(float(tokens.mean()), 4) for tokens, _ in accuracies.values()]}",
        flush=True,
    )
    return {
        "tokens": {str(length): rounded(tokens, 6) for length, (tokens, _) in accuracies.items()}
    }


CAPTIONS = {
    "length_ablations": "Share of letters right against the length of the string, mean and one"
    " deviation over seeds, one panel per part of the recipe: the blue points are the recipe, the"
    " others lack that part.",
}


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws the figure."""
    panels = {
        part: {name: arm["tokens"] for name, arm in arms.items()}
        for part, arms in numbers["parts"].items()
    }
    trained = [TRAINED] * len(panels)
    figure = panels_figure(
        panels, trained=trained, ylabel="letters right (%)", title="Blue: the recipe. "
    )
    return {"length_ablations": figure}


WHERE, SEEN, ENTERS, SCALED, ADDITIVE, OTHER = PARTS
FAIL = ((WHERE, "its start"), (ENTERS, "none"), (OTHER, "that, and positions from the start"))
COSTLY = (
    (SEEN, "0, 1, 2, ..."), (ENTERS, "sinusoidal, 2017's"),
    (SCALED, "as they are"), (ADDITIVE, "as they are"),
)  # fmt: skip


def expectations(numbers: JSON) -> list[Expectation]:
    """The recipe works at any length; arms without a part fail, or get worse with length."""
    checks: list[Expectation] = []

    def right(part: str, arm: str, length: int) -> np.ndarray | None:
        """The share of letters right by seed; None if it was not measured."""
        tokens = numbers["parts"].get(part, {}).get(arm, {}).get("tokens", {})
        return np.array(tokens[str(length)]) if str(length) in tokens else None

    def add(part: str, arm: str, length: int, low: float, high: float) -> None:
        if (shares := right(part, arm, length)) is not None:
            claim = f"{part}: {arm}; letters right at length {length}"
            mean = float(shares.mean())
            checks.append(Expectation(claim, "", mean, low, high, "a clear margin"))

    add(WHERE, "its end", 500, 0.99, 1)
    for part, arm in FAIL:
        add(part, arm, 500, 0, 0.2)
    add(SCALED, "growing with log n", 5000, 0.99, 1)
    for part, arm in COSTLY:
        recipe, *_ = PARTS[part]
        best, costly = right(part, recipe, 500), right(part, arm, 500)
        if best is not None and costly is not None:
            claim = f"{part}: {arm}; letters right at length 500: the recipe's - this arm's"
            checks.append(above_zero(claim, "", best - costly))
        near, far = right(part, arm, 60), right(part, arm, 5000)
        if near is not None and far is not None:
            claim = f"{part}: {arm}; the longer the worse: letters right at 60 - at 5,000"
            checks.append(above_zero(claim, "", near - far))
    return checks


if __name__ == "__main__":
    run_experiment(__name__)
