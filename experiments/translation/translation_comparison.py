"""How do translators with additive and with scaled dot cross attention differ?

Source:   day 11, exercise E11.3; Bahdanau et al. 2014; Vaswani et al. 2017; Multi30K (Elliott et
          al. 2016). Heads that align and heads that spread: topic 7; rollout: Abnar and Zuidema
          2020, section 3. A prototype of this project in plain JAX: 38.4 greedy, 40.0 with 4 beams.
Command:  .venv/bin/python -m experiments.translation.translation_comparison --data FOLDER
Time:     80 to 150 minutes on 2 CPU cores.
Expected: detokenised BLEU on Multi30K's test set of 2016, German to English, of at least 37 greedy
          and 38 with 4 beams for scaled dot. Additive is at most 2 below. Both look at the same
          subwords: their rows differ by at most half of what they differ from uniform rows, and 6
          in 10 have the same largest weight. At least half of the heads align.

FOLDER holds Multi30K's raw files, train.de.gz, train.en.gz, val.*, test_2016_flickr.*, from
data/task1/raw of github.com/multi30k/dataset; they are not part of this project. Encoder, decoder,
self attention (scaled dot), subwords, batches and seeds are the same: only the score between
decoder and encoder differs. All scores get the same batches; the second is also trained with as
many batches as take the minutes that the first took. Give each training as many cores as the
others. `scripts/benchmark.py --benchmarks translation` measures the times. Each training has one
seed: translation_seeds.py says how much seeds differ. What is trained once is found again in the
run folder, if FOLDER is spelt the same way.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from attention_jax.core.checks import check_integer
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.translation.translate import Translator, translated_ids
from attention_jax.tasks.vocabulary import padded_batch
from attention_jax.training.task import TrainConfig
from experiments.experiment import JSON, ScoreNames, run_experiment
from experiments.translation.recipes import MIDDLE, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_attention import (
    Seen,
    agreement,
    attentions,
    heads,
    look,
    rollouts,
)
from experiments.translation.translation_differences import most_different
from experiments.translation.translation_figures import CAPTIONS, plot
from experiments.translation.translation_report import expectations, report
from experiments.translation.translation_scores import bootstrapped
from experiments.translation.translation_trainings import (
    SEARCHES,
    Training,
    minutes_of,
    scores_of_tests,
    trained_translator,
    training_of,
    training_record,
)

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text.
        recipe: settings of every training.
        scores: scores of the cross attention, two or more; the others are compared with the first.
        seed: of all trainings.
        equal_minutes: also trains the second score with fewer batches, which take the minutes that
            the first has taken.
        drawn: indices of the test sentences to draw.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    recipe: Annotated[Recipe, tyro.conf.OmitArgPrefixes] = MIDDLE
    scores: ScoreNames = ("scaled", "additive", "general", "dot")
    seed: int = 0
    equal_minutes: bool = True
    drawn: tuple[int, ...] = (0, 4)
    workdir: Path = Path("runs/translation_comparison")

    def __post_init__(self) -> None:
        if len(self.scores) < 2 or len(set(self.scores)) != len(self.scores):
            raise ValueError(f"scores must be two or more, each once; got {self.scores}")
        check_integer("seed", self.seed, 0)
        for score in self.scores:  # wrong settings fail before the data are read
            self.recipe.training(None, score)
        check_folder("workdir", self.workdir)

    def trainings(self) -> dict[str, Training]:
        """Returns the training of each score."""
        return {
            score: training_of(self.workdir, self.corpus, self.recipe, score, self.seed)
            for score in self.scores
        }

    def training_in_equal_minutes(self) -> Training:
        """Returns a training of the second score in the minutes of the first; both have trained."""
        minutes = [minutes_of(training.workdir) for training in self.trainings().values()][:2]
        in_one_call = TrainConfig.log_every
        steps = int(self.recipe.steps * minutes[0] / minutes[1] / in_one_call) * in_one_call
        recipe = dataclasses.replace(self.recipe, steps=max(steps, in_one_call))
        folder = self.workdir / "equal_minutes"
        return training_of(folder, self.corpus, recipe, self.scores[1], self.seed)


QUICK = Config(
    corpus=SMALL_CORPUS,
    recipe=SMALL,
    scores=("scaled", "additive"),
    drawn=(0,),
)


def missing(config: Config) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    return config.corpus.missing()


def run(config: Config) -> JSON:
    """Trains every arm, tests it, and measures its attention."""
    tests = {split: config.corpus.text(split) for split in config.corpus.tests}
    text = tests[config.corpus.tests[0]]
    sentences = [text.source[index] for index in config.drawn]
    arms: JSON = {}
    pairs: dict[str, list[Seen]] = {}
    answers: dict[str, list[str]] = {}

    def measure(arm: str, training: Training) -> None:
        translator = trained_translator(training)
        scores, translations = scores_of_tests([translator], tests)
        (answers[arm],) = translations[config.corpus.tests[0], "4 beams"]
        pairs[arm] = attentions(translator, text)
        drawn = sentences if arm in config.scores[:2] else []
        arms[arm] = {
            "training": training_record([training]),
            "tests": scores,
            "heads": heads(pairs[arm]),
            "rollout": rollouts(pairs[arm]),
            "drawn": [_drawn(translator, sentence) for sentence in drawn],
        }

    for score, training in config.trainings().items():
        measure(score, training)
    first, *others = config.scores
    if config.equal_minutes:
        measure(f"{others[0]}, equal minutes", config.training_in_equal_minutes())
    return {
        "arms": arms,
        "agreement": {
            f"{first} and {score}": agreement(pairs[first], pairs[score]) for score in others
        },
        "bootstrap": bootstrapped(answers, text.target),
        "differences": most_different(text, answers[first], answers[others[0]]),
    }


def _drawn(translator: Translator, sentence: str) -> JSON:
    source, target = translated_ids(translator, sentence, SEARCHES["4 beams"])
    batch = padded_batch([source], [target])
    _, cross = look(translator.task, translator.params, batch)
    subwords = translator.subwords
    return {
        "source": sentence,
        "translation": subwords.decode([target])[0],
        "rows": subwords.labels(target),
        "columns": subwords.labels(source),
        # [T, S], mean over layers and heads
        "weights": np.asarray(cross[:, 0]).mean((0, 1)).round(3).tolist(),
    }


if __name__ == "__main__":
    run_experiment(__name__)
