"""How well does a translator with additive cross attention translate after an hour of training?

Source:   Multi30K, German to English, test set of 2016 (Elliott et al. 2016). Published
          transformers of 9 to 11 million parameters reach 35 to 36.8 BLEU.
Command:  .venv/bin/python -m experiments.translation.translation_budget_additive --data FOLDER
Time:     An hour of training on 2 CPU cores that have nothing else to do.
Expected: what translation_budget.py asks of scaled dot after an hour: detokenised, cased BLEU of at
          least 39 greedy and 40.5 with 4 beams; 1,000 sentences with 4 beams in 20 seconds.

FOLDER holds Multi30K's raw files (see translation_budget.py), the test sets of 2017 and 2018 too;
`--tests test_2016_flickr` does without these. A batch takes longer than with scaled dot: 20,000
batches, with a validation every 2,500, were chosen to take an hour. All other
settings are the same.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from matplotlib.figure import Figure

from experiments.experiment import JSON, run_experiment
from experiments.translation import translation_budget
from experiments.translation.recipes import (
    ALL_TESTS,
    LONG_ADDITIVE,
    SMALL,
    SMALL_CORPUS,
    Corpus,
    Recipe,
)
from experiments.translation.translation_budget import expectations, missing

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "missing", "plot", "report", "run"]

CAPTIONS = {
    "translation_budget_additive": "Additive cross attention: BLEU of greedy translations of the"
    " validation text, against minutes of training, with all compilation and validation.",
}


@dataclasses.dataclass(frozen=True)
class Config(translation_budget.Budget):
    """Settings.

    Attributes:
        corpus: the text.
        score: score of the cross attention.
        beams: of the search that is not greedy.
        length_penalty: of that search.
        workdir: folder of the run; if it is finished there it is not trained again.
        long: what is trained within an hour.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus(tests=ALL_TESTS)
    score: str = "additive"
    workdir: Path = Path("runs/translation_budget_additive")
    long: Annotated[Recipe, tyro.conf.Suppress] = LONG_ADDITIVE  # not on the command line


QUICK = Config(corpus=SMALL_CORPUS, long=SMALL)


def run(config: Config) -> JSON:
    """Trains and translates the test sets."""
    return translation_budget.train_and_test(config)


def report(numbers: JSON) -> str:
    """Returns BLEU and chrF."""
    return "\n".join(translation_budget.result_tables(numbers))


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws validation BLEU against minutes."""
    return {"translation_budget_additive": translation_budget.validation_curves(numbers)}


if __name__ == "__main__":
    run_experiment(__name__)
