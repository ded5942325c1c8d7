"""How do translators with additive and with scaled dot cross attention differ?

Source:   day 11, exercise E11.3; Bahdanau et al. 2014; Vaswani et al. 2017; Multi30K (Elliott et
          al. 2016). Heads that align and heads that spread: topic 7; rollout: Abnar and Zuidema
          2020, section 3. A prototype of this project in plain JAX: 38.4 greedy, 40.0 with 4 beams.
Command:  .venv/bin/python -m experiments.translation.translation_comparison --data FOLDER
Time:     Two to three hours on 2 CPU cores.
Expected: detokenised BLEU on Multi30K's test set of 2016, German to English, of at least 37 greedy
          and 38 with 4 beams for scaled dot. Additive is at most 2 below. Both look at the same
          subwords: their rows differ by at most half of what they differ from uniform rows, and 6
          in 10 have the same largest weight. At least half of the heads align.

FOLDER holds Multi30K's raw files, train.de.gz, train.en.gz, val.*, test_2016_flickr.*, from
data/task1/raw of github.com/multi30k/dataset; they are not part of this project. Encoder, decoder,
self attention (scaled dot), subwords, batches and seeds are the same: only the score between
decoder and encoder differs. All scores get the same batches; the second is also trained with as
many batches as take the minutes of the first. `scripts/benchmark.py --benchmarks translation`
measures the times.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import jax
import tyro

from attention_jax.core.checks import check_integer
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import check_folder
from attention_jax.scores import score_folder
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.task import TranslationConfig
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    align,
    translate,
    translator_of,
)
from attention_jax.training.run import train_run
from experiments.experiment import JSON, ScoreNames, exit_if_interrupted, run_experiment
from experiments.translation.recipes import MIDDLE, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_attention import (
    Seen,
    agreement,
    attentions,
    heads,
    rollouts,
)
from experiments.translation.translation_differences import most_different
from experiments.translation.translation_figures import CAPTIONS, plot
from experiments.translation.translation_report import expectations, report
from experiments.translation.translation_scores import bootstrapped, scored

__all__ = ["CAPTIONS", "QUICK", "Config", "expectations", "plot", "report", "run"]

SEARCHES = {"greedy": Search(), "4 beams": Search(beams=4)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text.
        recipe: settings of every training.
        scores: scores of the cross attention, two or more; the others are compared with the first.
        seeds: trainings of each of the first two scores.
        seeds_of_others: trainings of each further score.
        steps_in_equal_minutes: batches of the second score in the minutes of the first; 0 to leave
            this training out. A batch took 137 ms with additive and 100 ms with scaled.
        drawn: indices of the test sentences to draw.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    recipe: Annotated[Recipe, tyro.conf.OmitArgPrefixes] = MIDDLE
    scores: ScoreNames = ("scaled", "additive", "general", "dot")
    seeds: int = 3
    seeds_of_others: int = 1
    steps_in_equal_minutes: int = 5100
    drawn: tuple[int, ...] = (0, 4)
    workdir: Path = Path("runs/translation_comparison")

    def __post_init__(self) -> None:
        if len(self.scores) < 2 or len(set(self.scores)) != len(self.scores):
            raise ValueError(f"scores must be two or more, each once; got {self.scores}")
        for name in ("seeds", "seeds_of_others"):
            check_integer(name, getattr(self, name))
        check_integer("steps_in_equal_minutes", self.steps_in_equal_minutes, 0)
        for score in self.scores:  # wrong settings fail before the data are read
            self.recipe.training(None, score)
        check_folder("workdir", self.workdir)

    def trainings(self) -> dict[str, list[tuple[Path, TranslationConfig]]]:
        """Returns folder and settings of each training, by arm."""
        arms: dict[str, list[tuple[Path, TranslationConfig]]] = {}
        for index, score in enumerate(self.scores):
            folder = self.workdir / score_folder(score)
            seeds = self.seeds if index < 2 else self.seeds_of_others
            arms[score] = [
                (folder / f"seed_{seed}", self.recipe.training(self.corpus, score, seed))
                for seed in range(seeds)
            ]
        if self.steps_in_equal_minutes:
            score = self.scores[1]
            recipe = dataclasses.replace(self.recipe, steps=self.steps_in_equal_minutes)
            folder = self.workdir / f"{score_folder(score)}_equal_minutes"
            arms[f"{score}, equal minutes"] = [(folder, recipe.training(self.corpus, score))]
        return arms


QUICK = Config(
    corpus=SMALL_CORPUS,
    recipe=SMALL,
    scores=("scaled", "additive"),
    seeds=2,
    steps_in_equal_minutes=25,
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
    for arm, trainings in config.trainings().items():
        translators = []
        for workdir, settings in trainings:
            trained = train_run(TRANSLATION, settings, workdir, resume=True)
            exit_if_interrupted(trained.interrupted)
            translators.append(translator_of(trained))
        found: JSON = {}
        for split, one in tests.items():
            found[split] = {}
            for name, search in SEARCHES.items():
                by_seed = [translate(translator, one.source, search) for translator in translators]
                found[split][name] = scored(by_seed, one.target)
                if (split, name) == (config.corpus.tests[0], "4 beams"):
                    answers[arm] = by_seed[0]
        pairs[arm] = attentions(translators[0], text)
        arms[arm] = {
            "training": _training([workdir for workdir, _ in trainings]),
            "tests": found,
            "heads": heads(pairs[arm]),
            "rollout": rollouts(pairs[arm]),
            "drawn": [
                _drawn(translators[0], sentence)
                for sentence in sentences
                if arm in config.scores[:2]
            ],
        }
        jax.clear_caches()  # of programs: Linux gives a process no more than 65,530 memory maps
    first, *others = config.scores
    return {
        "arms": arms,
        "agreement": {
            f"{first} and {score}": agreement(pairs[first], pairs[score]) for score in others
        },
        "bootstrap": bootstrapped(answers, text.target),
        "differences": most_different(text, answers[first], answers[others[0]]),
    }


def _training(folders: list[Path]) -> JSON:
    """Validations and minutes, a number for each seed."""
    by_seed = [read_lines(folder / "validation.jsonl") for folder in folders]
    sessions = [read_lines(folder / "timing.jsonl") for folder in folders]
    names = ("negative_log_likelihood", "bleu")
    minutes = [round(sum(session["seconds"] for session in one) / 60, 1) for one in sessions]
    return {
        "validated": [line["step"] for line in by_seed[0]],
        **{
            f"validation_{name}": [
                [round(line[name][0], 4) for line in lines] for lines in zip(*by_seed, strict=True)
            ]
            for name in names
        },
        "minutes": minutes,
    }


def _drawn(translator: Translator, sentence: str) -> JSON:
    alignment = align(translator, sentence, SEARCHES["4 beams"])
    return {
        "source": sentence,
        "translation": alignment.translation,
        "rows": alignment.target_labels,
        "columns": alignment.source_labels,
        "weights": alignment.weights.mean(0).round(3).tolist(),  # [T, S], mean over layers
    }


if __name__ == "__main__":
    run_experiment(__name__)
