"""How far apart are translators with additive and scaled dot cross attention, over seeds?

Source:   day 11, exercise E11.3; Multi30K (Elliott et al. 2016).
Command:  .venv/bin/python -m experiments.translation.translation_seeds --data FOLDER
Time:     80 to 150 minutes on 2 CPU cores; after translation_comparison.py, two thirds of it.
Expected: as in translation_comparison.py, for means over three seeds: detokenised BLEU of at least
          37 greedy and 38 with 4 beams for scaled dot, and 35 and 36 for additive. With 4 beams the
          mean over seeds is 0 to 2 higher for scaled dot. The standard deviation over seeds is at
          most 1 BLEU.

FOLDER holds Multi30K's raw files (see translation_comparison.py). Trainings are those of
translation_comparison.py, and lie in the same folders: what that has trained is not trained again,
if FOLDER is spelt the same way. For each seed, both scores train on the same batches. With long
short-term memory, Britz et al. 2017 found additive attention ahead of unscaled products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

from attention_jax.core.checks import check_integer
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.score_colors import score_indices
from experiments.translation.recipes import MIDDLE, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_trainings import (
    LEAST,
    MOST_BEHIND,
    SEARCHES,
    Training,
    scores_of_tests,
    trained_translator,
    training_of,
    training_record,
)

CAPTIONS = {
    "translation_seeds": "BLEU of each seed on the test set, with greedy search and with 4 beams."
}
SCORES = ("scaled", "additive")
MOST_DEVIATION = 1.0  # of BLEU, over seeds


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text.
        recipe: settings of every training.
        seeds: trainings of each score, with seeds 0, 1, ...
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    recipe: Annotated[Recipe, tyro.conf.OmitArgPrefixes] = MIDDLE
    seeds: int = 3
    workdir: Path = Path("runs/translation_comparison")

    def __post_init__(self) -> None:
        check_integer("seeds", self.seeds, 2)
        for score in SCORES:  # wrong settings fail before the data are read
            self.recipe.training(None, score)
        check_folder("workdir", self.workdir)

    def trainings(self) -> dict[str, list[Training]]:
        """Returns the trainings of each score."""
        return {
            score: [
                training_of(self.workdir, self.corpus, self.recipe, score, seed)
                for seed in range(self.seeds)
            ]
            for score in SCORES
        }


QUICK = Config(corpus=SMALL_CORPUS, recipe=SMALL, seeds=2)


def missing(config: Config) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    return config.corpus.missing()


def run(config: Config) -> JSON:
    """Trains and tests every score with every seed."""
    tests = {split: config.corpus.text(split) for split in config.corpus.tests}
    scores: JSON = {}
    for score, trainings in config.trainings().items():
        translators = [trained_translator(training) for training in trainings]
        by_test, _ = scores_of_tests(translators, tests)
        scores[score] = {"training": training_record(trainings), "tests": by_test}
    return {"scores": scores}


def expectations(numbers: JSON) -> list[Expectation]:
    """BLEU: means and deviations over seeds, and the difference of the two scores."""
    split = numbers["config"]["corpus"]["tests"][0]
    bleu = {
        (score, search): np.array(numbers["scores"][score]["tests"][split][search]["bleu"])
        for score in SCORES
        for search in SEARCHES
    }
    checks = [
        Expectation(
            f"{score}: mean BLEU of {split}, {search}", "",
            float(bleu[score, search].mean()), least - (MOST_BEHIND if score == "additive" else 0),
            100.0, "the bound for one seed",
        )
        for score in SCORES
        for search, least in LEAST.items()
    ]  # fmt: skip
    checks += [
        Expectation(
            f"{score}: standard deviation of BLEU over seeds, 4 beams", "",
            float(mean_and_deviation(bleu[score, "4 beams"])[1]), 0.0, MOST_DEVIATION,
            "a seed matters less than a recipe",
        )
        for score in SCORES
    ]  # fmt: skip
    ahead = float((bleu["scaled", "4 beams"] - bleu["additive", "4 beams"]).mean())
    claim = "scaled dot minus additive: BLEU, 4 beams, mean over seeds"
    return [*checks, Expectation(claim, "", ahead, 0.0, MOST_BEHIND, "as for one seed")]


def report(numbers: JSON) -> str:
    """Returns BLEU and chrF by seed, and how far apart the scores are."""
    return "\n".join(_tests(numbers))


def _tests(numbers: JSON) -> Iterator[str]:
    split, scores = numbers["config"]["corpus"]["tests"][0], numbers["scores"]
    recipe, seeds = numbers["config"]["recipe"], numbers["config"]["seeds"]
    yield f"{recipe['steps']:,} batches; test set {split}, detokenised and cased:"
    yield ""
    yield (
        f"| cross attention, search |{''.join(f' seed {seed} |' for seed in range(seeds))} BLEU,"
        " mean ± deviation | chrF |"
    )
    yield f"| --- |{' --- |' * (seeds + 2)}"
    for score in SCORES:
        for search in SEARCHES:
            by_seed = scores[score]["tests"][split][search]
            cells = [f"{bleu:.1f}" for bleu in by_seed["bleu"]]
            cells += [_over_seeds(by_seed[metric]) for metric in ("bleu", "chrf")]
            yield f"| {score}, {search} | {' | '.join(cells)} |"
    for search in SEARCHES:
        first, second = (np.array(scores[s]["tests"][split][search]["bleu"]) for s in SCORES)
        ahead = (first - second).tolist()
        cells = [f"{difference:+.1f}" for difference in ahead]
        yield f"| scaled - additive, {search} | {' | '.join(cells)} | {_over_seeds(ahead)} | |"
    bleu, chrf = by_seed["signatures"]
    yield ""
    minutes = [
        f"{score} {', '.join(f'{one:.0f}' for one in scores[score]['training']['minutes'])}"
        for score in SCORES
    ]
    yield (
        f"Minutes of training, on the cores that each had: {'; '.join(minutes)}. "
        "Deviations are standard deviations over seeds (n - 1). For each seed, both scores train on"
        f" the same batches. BLEU is `{bleu}`, chrF is `{chrf}`."
    )


def _over_seeds(values: list[float]) -> str:
    mean, deviation = mean_and_deviation(values)
    return f"{mean:.1f} ± {deviation:.1f}"


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws BLEU of every seed."""
    split = numbers["config"]["corpus"]["tests"][0]
    figure, (axes,) = plotting.new_figure(5.6, 3.2)
    for shift, (score, index) in zip((-0.06, 0.06), score_indices(SCORES).items(), strict=True):
        for place, search in enumerate(SEARCHES):
            values = numbers["scores"][score]["tests"][split][search]["bleu"]
            axes.scatter(
                [place + shift] * len(values), values,
                color=plotting.COLORS[index], marker=plotting.MARKERS[index],
                label=score if place == 0 else None,
            )  # fmt: skip
    axes.set_xticks(range(len(SEARCHES)), SEARCHES)
    axes.set_xlim(-0.5, len(SEARCHES) - 0.5)
    axes.set_ylabel(f"BLEU, {split}")
    axes.legend()
    return {"translation_seeds": figure}


if __name__ == "__main__":
    run_experiment(__name__)
