"""How far apart are translators with additive and scaled dot cross attention, over seeds?

Source:   day 11, exercise E11.3; Multi30K (Elliott et al. 2016), its test sets of 2017 (Elliott et
          al. 2017) and 2018 (Barrault et al. 2018).
Command:  .venv/bin/python -m experiments.translation.translation_seeds --data FOLDER
Time:     80 to 150 minutes on 2 CPU cores; after translation_comparison.py, two thirds of it.
Expected: as in translation_comparison.py, for means over three seeds: detokenised BLEU of at least
          37 greedy and 38 with 4 beams for scaled dot, and 35 and 36 for additive. With 4 beams the
          mean over seeds is 0 to 2 higher for scaled dot. The standard deviation over seeds is at
          most 1 BLEU. On the later test sets, which have other photographs and captions, BLEU with
          4 beams is at most 10 (2017, Flickr) and 13 (2017, COCO; 2018, Flickr) lower than on that
          of 2016, and again 0 to 2 higher for scaled dot.

FOLDER holds Multi30K's raw files (see translation_comparison.py), the test sets of 2017 and 2018
too; `--tests test_2016_flickr` does without these. Trainings are those of
translation_comparison.py, and lie in the same folders: what that has trained is not trained again,
if FOLDER is spelt the same way. For each seed, both scores train on the same batches. With long
short-term memory, Britz et al. 2017 found additive attention ahead of the unscaled dot product.
To see another score on another seed, give translation_comparison.py --scores scaled NAME --seed 1
--no-equal-minutes --results FOLDER.
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
from experiments.translation.recipes import (
    ALL_TESTS,
    MIDDLE,
    SMALL,
    SMALL_CORPUS,
    Corpus,
    Recipe,
)
from experiments.translation.translation_scores import over_seeds
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
    "translation_seeds": "BLEU of each seed on each test set, with 4 beams, two scores side by"
    " side."
}
SCORES = ("scaled", "additive")
MOST_DEVIATION = 1.0  # of BLEU, over seeds; written before the trainings
# How much lower BLEU is on a later test set than on the first, at most; written before any model
# had translated them.
MOST_LOWER = {"test_2017_flickr": 10.0, "test_2017_mscoco": 13.0, "test_2018_flickr": 13.0}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text.
        recipe: settings of every training.
        seeds: trainings of each score, with seeds 0, 1, ...
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus(tests=ALL_TESTS)
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
    return {
        "scores": scores,
        "sentences": {split: len(text.source) for split, text in tests.items()},
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """BLEU: means and deviations over seeds, the other test sets, and the scores' difference."""
    split, *others = numbers["config"]["corpus"]["tests"]
    checks = [
        Expectation(
            f"{score}: mean BLEU of {split}, {search}", "",
            float(_bleu(numbers, score, split, search).mean()),
            least - (MOST_BEHIND if score == "additive" else 0), 100.0, "the bound for one seed",
        )
        for score in SCORES
        for search, least in LEAST.items()
    ]  # fmt: skip
    checks += [
        Expectation(
            f"{score}: standard deviation of BLEU over seeds, 4 beams", "",
            float(mean_and_deviation(_bleu(numbers, score, split))[1]), 0.0, MOST_DEVIATION,
            "a seed matters less than a recipe",
        )
        for score in SCORES
    ]  # fmt: skip
    checks += [
        Expectation(
            f"{score}: BLEU of {split} minus that of {other}, 4 beams, means over seeds", "",
            float((_bleu(numbers, score, split) - _bleu(numbers, score, other)).mean()),
            -100.0, MOST_LOWER[other], "captions of other photographs, by other authors",
        )
        for score in SCORES
        for other in others
        if other in MOST_LOWER
    ]  # fmt: skip
    return checks + [
        Expectation(
            "scaled dot minus additive: BLEU"
            f"{'' if test == split else f' of {test}'}, 4 beams, mean over seeds",
            "", float(_ahead(numbers, test).mean()), 0.0, MOST_BEHIND, "as for one seed",
        )
        for test in (split, *others)
    ]  # fmt: skip


def _bleu(numbers: JSON, score: str, split: str, search: str = "4 beams") -> np.ndarray:
    """BLEU of each seed."""
    return np.array(numbers["scores"][score]["tests"][split][search]["bleu"])


def _ahead(numbers: JSON, split: str, search: str = "4 beams") -> np.ndarray:
    """BLEU of the first score minus that of the second, of each seed."""
    first, second = (_bleu(numbers, score, split, search) for score in SCORES)
    return first - second


def report(numbers: JSON) -> str:
    """Returns BLEU and chrF by seed, how far apart the scores are, and the other test sets."""
    parts = (_by_seed(numbers), _by_test(numbers), _notes(numbers))
    return "\n\n".join("\n".join(part) for part in parts)


def _by_seed(numbers: JSON) -> Iterator[str]:
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
            cells += [over_seeds(by_seed[metric]) for metric in ("bleu", "chrf")]
            yield f"| {score}, {search} | {' | '.join(cells)} |"
    for search in SEARCHES:
        ahead = _ahead(numbers, split, search)
        cells = [f"{difference:+.1f}" for difference in ahead]
        yield f"| scaled - additive, {search} | {' | '.join(cells)} | {over_seeds(ahead)} | |"


def _by_test(numbers: JSON) -> Iterator[str]:
    yield "| test set, 4 beams | sentences | scaled | additive | scaled - additive |"
    yield "| --- | --- | --- | --- | --- |"
    for split in numbers["config"]["corpus"]["tests"]:
        cells = [over_seeds(_bleu(numbers, score, split)) for score in SCORES]
        cells.append(over_seeds(_ahead(numbers, split)))
        yield f"| {split} | {numbers['sentences'][split]:,} | {' | '.join(cells)} |"


def _notes(numbers: JSON) -> Iterator[str]:
    split, scores = numbers["config"]["corpus"]["tests"][0], numbers["scores"]
    bleu, chrf = scores[SCORES[0]]["tests"][split]["4 beams"]["signatures"]
    minutes = [
        f"{score} {', '.join(f'{one:.0f}' for one in scores[score]['training']['minutes'])}"
        for score in SCORES
    ]
    yield (
        f"Minutes of training, on the cores that each had: {'; '.join(minutes)}. "
        "Deviations are standard deviations over seeds (n - 1); they say nothing about how much"
        " other test sentences would differ. For each seed, both scores train on"
        f" the same batches. BLEU is `{bleu}`, chrF is `{chrf}`."
    )


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws BLEU of every seed on every test set."""
    tests = numbers["config"]["corpus"]["tests"]
    figure, (axes,) = plotting.new_figure(6.4, 3.4)
    for shift, (score, index) in zip((-0.08, 0.08), score_indices(SCORES).items(), strict=True):
        points = [
            (column + shift, bleu)
            for column, test in enumerate(tests)
            for bleu in _bleu(numbers, score, test)
        ]
        axes.scatter(*zip(*points, strict=True), color=plotting.COLORS[index],
                     marker=plotting.MARKERS[index], label=score)  # fmt: skip
    axes.set_xticks(range(len(tests)), tests)
    axes.set_xlim(-0.5, len(tests) - 0.5)
    axes.set_ylabel("BLEU, 4 beams")
    axes.legend()
    return {"translation_seeds": figure}


if __name__ == "__main__":
    run_experiment(__name__)
