"""Which single settings matter for a translator after 3,000 batches, and which for its search?

Answer:   The peak rate, the size of the batches and dropout: twice the rate gains 1.5 BLEU and
          half of it loses 3.4; batches half as large gain 1.4 and twice as large lose 2.7; a
          dropout rate of 0.2 instead of 0.1 loses 2.1 (one seed each). In the search, 4 beams gain
          1.5 over greedy, a mean over the recipe's three seeds.
Source:   Multi30K, German to English (Elliott et al. 2016).
Command:  .venv/bin/python -m experiments.translation.translation_settings --data FOLDER
          # 2 to 3 hours on 2 CPU cores

FOLDER holds Multi30K's raw files (see translation_comparison.py). The recipe is the short one of
translation_budget.py. Each trial changes the setting in its name; trials with batches of another
size also change the number of batches and the warm-up, so that all read equally many subwords. Each
trial has one seed and the recipe has several, which shows how much BLEU varies by chance. The test
sets are not read: BLEU is that of the validation text.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.translate import Search, score_translations, translate
from experiments import lab
from experiments.lab import Claim, Row, column, main, markdown, spread, where
from experiments.translation import translators
from experiments.translation.translation_budget import SHORT
from experiments.translation.translators import SEARCHES, Texts, tested, trained

CAPTIONS: dict[str, str] = {}
TRIALS: dict[str, Row] = {
    "recipe": {},
    "dropout-0.2": {"dropout_rate": 0.2},
    "attention-dropout-0.1": {"attention_dropout_rate": 0.1},
    "label-smoothing-0": {"label_smoothing": 0.0},
    "rate-0.001": {"learning_rate": 1e-3},
    "rate-0.004": {"learning_rate": 4e-3},
    "inverse-sqrt-schedule": {"schedule": "inverse-sqrt"},
    "untied-embeddings": {"tied_embeddings": "none"},
    "batches-half-as-large": {"batch_tokens": 1280, "warmup_steps": 1000},
    "batches-twice-as-large": {"batch_tokens": 5120, "warmup_steps": 250},
    "12-buckets": {"buckets": 12},
}
# Beams and length penalty.
OTHER_SEARCHES = [(1, 1.0), (2, 1.0), *((4, x) for x in (0.0, 0.5, 1.0, 1.5)), (8, 1.0)]


@dataclasses.dataclass(frozen=True)
class Config(Texts):
    """Settings, beside those of `Texts`.

    Attributes:
        trials: the recipe, and what is changed, one setting at a time, as each name says.
        steps: batches of the recipe.
        seeds: trainings of the recipe; a trial has one.
    """

    trials: tuple[str, ...] = tuple(TRIALS)
    steps: int = 3000
    seeds: int = 3

    def __post_init__(self) -> None:
        lab.check_least(self, steps=1, seeds=2)
        if "recipe" not in self.trials or not {*self.trials} <= {*TRIALS}:
            raise ValueError(f"trials must be recipe and others of {[*TRIALS]}; got {self.trials}")


QUICK = Config(**translators.SMALL, trials=("recipe", "label-smoothing-0"), steps=25, seeds=2)


def missing(config: Config) -> str:
    """Which package or file is missing, and where to get it; "" if all are there."""
    return translators.missing(dataclasses.replace(config, tests=()))


def task_of(config: Config, trial: str, seed: int) -> Translation:
    """The settings of a training."""
    tokens = Translation.batch_tokens
    changes = {**SHORT, "checkpoint_every": 3000, **TRIALS[trial]}
    steps = config.steps * tokens // changes.get("batch_tokens", tokens)
    return config.training("scaled", steps, seed, **changes)


def run(config: Config) -> list[Row]:
    """A row for each training, and one for each search by the recipe's first model."""
    text = config.text(config.validation)
    rows, searches = [], []
    for trial in config.trials:
        for seed in range(config.seeds if trial == "recipe" else 1):
            folder = config.workdir / "settings" / trial / f"seed_{seed}"
            task = task_of(config, trial, seed)
            translator, training = trained(folder, task)
            bleu = {row["search"]: row["bleu"] for row, _ in tested(translator, {"": text})}
            rows.append({"trial": trial, "seed": seed, **training, **bleu})
            for beams, penalty in OTHER_SEARCHES if trial == "recipe" and seed == 0 else ():
                answers = translate(translator, text.source, Search(beams, penalty))
                score = round(score_translations(answers, text.target).bleu, 4)
                searches.append({"beams": beams, "length_penalty": penalty, "bleu": score})
    return rows + searches


def _gained(rows: list[Row], trial: str) -> float:
    """BLEU of a trial minus the mean of the recipe's seeds, greedy."""
    of_trial, recipe = (column(rows, "greedy", trial=name) for name in (trial, "recipe"))
    return float(np.mean(of_trial) - np.mean(recipe))


def claims(rows: list[Row]) -> list[Claim]:
    """How much settings, beams and length penalties gain; bounds in BLEU, from before the runs."""
    (greedy,) = column(rows, "bleu", beams=1)
    by_penalty = {row["length_penalty"]: row["bleu"] for row in where(rows, beams=4)}
    beams = by_penalty.pop(1.0)
    gained = [_gained(rows, trial) for trial in column(rows, "trial") if trial != "recipe"]
    penalty = max(by_penalty.values()) - beams
    text = "most BLEU that another setting gains over the recipe, greedy"
    return [
        Claim(text, max(gained), -100, 1),
        Claim("4 beams minus greedy: BLEU, the recipe's first model", beams - greedy, 0.5, 3),
        Claim("most BLEU that another length penalty gains over 1, 4 beams", penalty, -100, 0.5),
    ]


def table(rows: list[Row]) -> str:
    """Trials and searches."""
    lines = []
    for trial in dict.fromkeys(column(rows, "trial")):
        found = where(rows, trial=trial)
        cells = [f"{found[0]['steps']:,}", f"{np.mean(column(found, 'minutes')):.0f}"]
        for bleu in (column(found, search) for search in SEARCHES):
            cells.append(spread(bleu) if len(bleu) > 1 else f"{bleu[0]:.1f}")
        lines.append([trial.replace("-", " "), *cells, f"{_gained(rows, trial):+.1f}"])
    head = ["setting", "batches", "minutes", "BLEU, greedy", "4 beams"]
    head.append("gained over the recipe, greedy")
    searches = [(r["beams"], r["length_penalty"], f"{r['bleu']:.1f}") for r in rows if "beams" in r]
    by_search = markdown(("beams", "length penalty", "BLEU of the recipe's first model"), searches)
    return f"{markdown(head, lines)}\n\n{by_search}"


def plot(rows: list[Row]) -> dict[str, Any]:
    """No figure: the table has every number."""
    return {}


if __name__ == "__main__":
    main(__name__)
