"""Which single settings matter for a translator after 3,000 batches, and which for its search?

Source:   Multi30K, German to English (Elliott et al. 2016).
Command:  .venv/bin/python -m experiments.translation.translation_settings --data FOLDER
Time:     80 to 160 minutes on 2 CPU cores, for 13 trainings.
Expected: on the validation text: no change of one setting improves the mean of the recipe's seeds
          by more than 1 BLEU, greedy. Four beams add 0.5 to 3 BLEU to greedy search, and no other
          length penalty adds more than 0.5 to that of 1.

FOLDER holds Multi30K's raw files (see translation_comparison.py). The recipe is the short one, with
3,000 batches. Each trial changes what its name says; those with other batches change the number of
batches and the warm-up too, so that all read as many subwords. Each trial has one seed and the
recipe has three, which shows how much BLEU varies by chance. The test sets are not read. A finished
training is reused, if FOLDER is spelt the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.figure import Figure

from attention_jax.core.checks import check_integer
from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.translation.translate import Search, Translator, translate
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.setting_checks import check_some
from experiments.translation.recipes import SHORT, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_scores import over_seeds, scored
from experiments.translation.translation_trainings import (
    SEARCHES,
    parameters_of,
    scores_of_tests,
    trained_translator,
    training_of,
    training_record,
)

CAPTIONS = {
    "translation_settings": "BLEU of the validation text after trainings in which one setting is"
    " not that of the recipe. Lines: the mean of the recipe's seeds."
}
RECIPE = "recipe"
SEARCHES_OF_RECIPE = (
    Search(),
    Search(beams=2),
    *(Search(beams=4, length_penalty=penalty) for penalty in (0.0, 0.5, 1.0, 1.5)),
    Search(beams=8),
)
# In BLEU, written before the runs.
MOST_GAINED = 1.0  # by another setting
LEAST_BY_BEAMS, MOST_BY_BEAMS = 0.5, 3.0
MOST_BY_PENALTY = 0.5


def _changes(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns what each trial changes."""
    return {
        "dropout-0.2": {"dropout_rate": 0.2},
        "attention-dropout-0.1": {"attention_dropout_rate": 0.1},
        "label-smoothing-0": {"label_smoothing": 0.0},
        "rate-0.001": {"learning_rate": 1e-3},
        "rate-0.004": {"learning_rate": 4e-3},
        "inverse-sqrt-schedule": {"schedule": "inverse-sqrt"},
        "untied-embeddings": {"tied_embeddings": "none"},
        "batches-half-as-large": {
            "batch_tokens": recipe.batch_tokens // 2,
            "steps": 2 * recipe.steps,
            "warmup_steps": 2 * recipe.warmup_steps,
        },
        "batches-twice-as-large": {
            "batch_tokens": 2 * recipe.batch_tokens,
            "steps": recipe.steps // 2,
            "warmup_steps": recipe.warmup_steps // 2,
        },
        "12-buckets": {"buckets": 12},
    }


TRIALS = tuple(_changes(SHORT))


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text; its test sets are not read.
        recipe: what the trials change.
        trials: what is changed, one setting at a time, as each name says.
        recipe_seeds: trainings of the recipe, with seeds 0, 1, ...; a trial has seed 0.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    recipe: Annotated[Recipe, tyro.conf.OmitArgPrefixes] = dataclasses.replace(
        SHORT, steps=3000, checkpoint_every=3000
    )
    trials: tuple[str, ...] = TRIALS
    recipe_seeds: int = 3
    workdir: Path = Path("runs/translation_settings")

    def __post_init__(self) -> None:
        check_some(self, "trials")
        if unknown := [name for name in self.trials if name not in TRIALS]:
            raise ValueError(f"trials must be of {', '.join(TRIALS)}; got {', '.join(unknown)}")
        check_integer("recipe_seeds", self.recipe_seeds, 2)
        for name, recipe in self.recipes.items():  # wrong settings fail before the data are read
            recipe.training(None, "scaled")
            if name != RECIPE and recipe == self.recipe:
                raise ValueError(f"recipe must not have the setting of the trial {name}")
        check_folder("workdir", self.workdir)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The settings of the recipe and of each trial."""
        changes = _changes(self.recipe)
        trials = {name: dataclasses.replace(self.recipe, **changes[name]) for name in self.trials}
        return {RECIPE: self.recipe, **trials}


QUICK = Config(
    corpus=SMALL_CORPUS,
    recipe=dataclasses.replace(SMALL, checkpoint_every=50),
    trials=("label-smoothing-0",),
    recipe_seeds=2,
)


def missing(config: Config) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    return config.corpus.missing(tests=False)


def run(config: Config) -> JSON:
    """Trains the recipe and all trials, and translates the validation text."""
    split = config.corpus.validation
    text = config.corpus.text(split)
    trials: JSON = {}
    searches: list[JSON] = []
    for name, recipe in config.recipes.items():
        seeds = range(config.recipe_seeds if name == RECIPE else 1)
        trainings = [
            training_of(config.workdir / name, config.corpus, recipe, "scaled", seed)
            for seed in seeds
        ]
        translators = [trained_translator(training) for training in trainings]
        scores, _ = scores_of_tests(translators, {split: text})
        trials[name] = {
            "training": training_record(trainings),
            "parameters": parameters_of(translators[0]),
            "scores": scores[split],
        }
        if name == RECIPE:
            searches = [
                {**dataclasses.asdict(search), "bleu": _bleu(translators[0], text, search)}
                for search in SEARCHES_OF_RECIPE
            ]
    return {"trials": trials, "searches": searches}


def _bleu(translator: Translator, text: ParallelText, search: Search) -> float:
    return float(scored([translate(translator, text.source, search)], text.target)["bleu"][0])


def expectations(numbers: JSON) -> list[Expectation]:
    """How much settings, beams and length penalties gain."""
    by_search = {
        (line["beams"], line["length_penalty"]): line["bleu"] for line in numbers["searches"]
    }
    other_penalties = [
        bleu for (beams, penalty), bleu in by_search.items() if beams == 4 and penalty != 1
    ]
    gained = [_gained(numbers, name) for name in numbers["trials"] if name != RECIPE]
    return [
        Expectation(
            "most BLEU that another setting gains over the recipe, greedy", "", max(gained),
            -100.0, MOST_GAINED, "the largest of several differences, one seed each",
        ),
        Expectation(
            "4 beams minus greedy: BLEU", "", by_search[4, 1.0] - by_search[1, 1.0],
            LEAST_BY_BEAMS, MOST_BY_BEAMS, "as in trials before",
        ),
        Expectation(
            "most BLEU that another length penalty gains over 1, 4 beams", "",
            max(other_penalties) - by_search[4, 1.0], -100.0, MOST_BY_PENALTY,
            "captions are short",
        ),
    ]  # fmt: skip


def _gained(numbers: JSON, name: str) -> float:
    """BLEU of a trial minus that of the recipe, greedy."""
    trial, recipe = (numbers["trials"][key]["scores"]["greedy"]["bleu"] for key in (name, RECIPE))
    return float(np.mean(trial) - np.mean(recipe))


def report(numbers: JSON) -> str:
    """Returns the table of trials and that of searches."""
    return "\n\n".join("\n".join(part) for part in (_trials(numbers), _searches(numbers)))


def _trials(numbers: JSON) -> Iterator[str]:
    settings, recipe = numbers["config"]["recipe"], numbers["trials"][RECIPE]
    bleu, _ = recipe["scores"]["greedy"]["signatures"]
    seeds = numbers["config"]["recipe_seeds"]
    yield (
        f"The recipe: {settings['steps']:,} batches of at most {settings['batch_tokens']:,}"
        f" subwords, dropout {settings['dropout_rate']:g} of features, label smoothing"
        f" {settings['label_smoothing']:g}, peak rate {settings['learning_rate']:g}, a cosine to"
        f" 0, all embeddings tied, {settings['buckets']} buckets; {seeds} seeds,"
        " mean ± standard deviation. A trial has one seed: a difference of the size of that"
        f" deviation may be chance. BLEU of the validation text is `{bleu}`. Minutes are those of"
        " this run, on the cores that each training had."
    )
    yield ""
    yield "| setting | batches | minutes | parameters | BLEU, greedy | gained | BLEU, 4 beams |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, trial in numbers["trials"].items():
        training, scores = trial["training"], trial["scores"]
        greedy, beams = (over_seeds(scores[search]["bleu"]) for search in SEARCHES)
        gained = "" if name == RECIPE else f"{_gained(numbers, name):+.1f}"
        yield (
            f"| {name} | {training['steps']:,} | {np.mean(training['minutes']):.0f} |"
            f" {trial['parameters'] / 1e6:.1f} M | {greedy} | {gained} | {beams} |"
        )


def _searches(numbers: JSON) -> Iterator[str]:
    yield "| search by the recipe's model, seed 0 | length penalty | BLEU |"
    yield "| --- | --- | --- |"
    for line in numbers["searches"]:
        beams = line["beams"]
        name, penalty = ("greedy", "") if beams == 1 else (f"{beams} beams", line["length_penalty"])
        yield f"| {name} | {penalty} | {line['bleu']:.1f} |"


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws BLEU of every training."""
    trials = numbers["trials"]
    names = list(trials)[::-1]
    figure, (axes,) = plotting.new_figure(7.2, 0.9 + 0.3 * len(names))
    for index, search in enumerate(SEARCHES):
        color = plotting.COLORS[index]
        bleu = {name: trials[name]["scores"][search]["bleu"] for name in names}
        points = [(value, row) for row, name in enumerate(names) for value in bleu[name]]
        axes.scatter(*zip(*points, strict=True), color=color, marker=plotting.MARKERS[index],
                     label=search)  # fmt: skip
        axes.axvline(np.mean(bleu[RECIPE]), color=color, alpha=0.4, linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("BLEU, validation")
    axes.legend()
    return {"translation_settings": figure}


if __name__ == "__main__":
    run_experiment(__name__)
