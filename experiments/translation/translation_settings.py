"""Which settings matter for a translator that trains for ten minutes, and which for its search?

Source:   Multi30K, German to English (Elliott et al. 2016). Label smoothing improves BLEU:
          Vaswani et al. 2017, section 5.4.
Command:  .venv/bin/python -m experiments.translation.translation_settings --data FOLDER
Time:     75 to 150 minutes on 2 CPU cores.
Expected: on the validation text: no change of one setting improves the recipe by more than 1 BLEU.
          Label smoothing of 0.1, and a rate that falls to 0, do not lower BLEU. Four beams add 0.5
          to 3 BLEU to greedy search, and no length penalty adds more than 0.5 to that of 1.

FOLDER holds Multi30K's raw files (see translation_comparison.py). Each training differs from the
short recipe, with 3,000 batches, in the setting that its name says. All have one seed, so
differences below about half a BLEU say nothing. The test sets are not read. What is trained once is
found again in the run folder, if FOLDER is spelt the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.translation.translate import Search, translate
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.translation.recipes import SHORT, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_scores import scored
from experiments.translation.translation_trainings import (
    SEARCHES,
    Training,
    minutes_of,
    trained_translator,
)

CAPTIONS = {
    "translation_settings": "BLEU of the validation text after a training in which one setting is"
    " not that of the recipe. Vertical lines: the recipe."
}
RECIPE = "the recipe"
SEARCHES_OF_RECIPE = (
    Search(),
    Search(beams=2),
    *(Search(beams=4, length_penalty=penalty) for penalty in (0.0, 0.5, 1.0, 1.5)),
    Search(beams=8),
)
# Written before the runs, in BLEU.
MOST_GAINED = 1.0  # by another setting
LEAST_BY_BEAMS, MOST_BY_BEAMS = 0.5, 3.0
MOST_BY_PENALTY = 0.5


def _changes(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Returns what each trial changes; batches of another size come with as many subwords."""
    return {
        RECIPE: {},
        "dropout 0.2 of features": {"dropout_rate": 0.2},
        "dropout 0.1 of attention weights": {"attention_dropout_rate": 0.1},
        "no label smoothing": {"label_smoothing": 0.0},
        "peak rate 0.001": {"learning_rate": 1e-3},
        "peak rate 0.004": {"learning_rate": 4e-3},
        "rate falls as 1 / sqrt(batches)": {"schedule": "inverse-sqrt"},
        "embeddings not tied": {"tied_embeddings": "none"},
        "batches half as large": {
            "batch_tokens": recipe.batch_tokens // 2,
            "steps": 2 * recipe.steps,
            "checkpoint_every": 2 * recipe.checkpoint_every,
            "warmup_steps": 2 * recipe.warmup_steps,
        },
        "batches twice as large": {
            "batch_tokens": 2 * recipe.batch_tokens,
            "steps": recipe.steps // 2,
            "checkpoint_every": recipe.checkpoint_every // 2,
            "warmup_steps": recipe.warmup_steps // 2,
        },
        "12 buckets": {"buckets": 12},
    }


TRIALS = tuple(_changes(SHORT))


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings.

    Attributes:
        corpus: the text; its test sets are not read.
        recipe: what the trials change.
        trials: names of two or more trainings, the recipe first.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    recipe: Annotated[Recipe, tyro.conf.OmitArgPrefixes] = dataclasses.replace(
        SHORT, steps=3000, checkpoint_every=3000
    )
    trials: tuple[str, ...] = TRIALS
    workdir: Path = Path("runs/translation_settings")

    def __post_init__(self) -> None:
        if unknown := [name for name in self.trials if name not in TRIALS]:
            raise ValueError(f"trials must be among {', '.join(TRIALS)}; got {', '.join(unknown)}")
        once = len({*self.trials}) == len(self.trials)
        if len(self.trials) < 2 or self.trials[0] != RECIPE or not once:
            raise ValueError(
                f"trials must be {RECIPE} and at least one other, each once; got"
                f" {', '.join(self.trials) or 'none'}"
            )
        for recipe in self.recipes.values():  # wrong settings fail before the data are read
            recipe.training(None, "scaled")
        check_folder("workdir", self.workdir)

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The settings of each trial."""
        changes = _changes(self.recipe)
        return {name: dataclasses.replace(self.recipe, **changes[name]) for name in self.trials}


QUICK = Config(
    corpus=SMALL_CORPUS,
    recipe=dataclasses.replace(SMALL, checkpoint_every=50),
    trials=(RECIPE, "no label smoothing", "rate falls as 1 / sqrt(batches)"),
)


def missing(config: Config) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    return dataclasses.replace(config.corpus, tests=(config.corpus.validation,)).missing()


def run(config: Config) -> JSON:
    """Trains all trials and translates the validation text."""
    text = config.corpus.text(config.corpus.validation)
    trials: JSON = {}
    searches: list[JSON] = []
    for name, recipe in config.recipes.items():
        workdir = config.workdir / "".join(c if c.isalnum() else "_" for c in name)
        translator = trained_translator(Training(workdir, recipe.training(config.corpus, "scaled")))

        def bleu_of(search: Search) -> float:
            answers = translate(translator, text.source, search)  # noqa: B023 -- used at once
            return float(scored([answers], text.target)["bleu"][0])

        trials[name] = {
            "steps": recipe.steps,
            "minutes": round(minutes_of(workdir), 1),
            "parameters": sum(int(leaf.size) for leaf in jax.tree.leaves(translator.params)),
            "bleu": {search: bleu_of(settings) for search, settings in SEARCHES.items()},
        }
        if name == RECIPE:
            searches = [
                {**dataclasses.asdict(search), "bleu": bleu_of(search)}
                for search in SEARCHES_OF_RECIPE
            ]
    return {"trials": trials, "searches": searches}


def expectations(numbers: JSON) -> list[Expectation]:
    """How much settings, beams and length penalties gain."""
    trials = numbers["trials"]
    bleu = {name: trial["bleu"]["greedy"] for name, trial in trials.items()}
    gained = {name: value - bleu[RECIPE] for name, value in bleu.items() if name != RECIPE}
    best = max(gained, key=lambda name: gained[name])
    found = {(line["beams"], line["length_penalty"]): line["bleu"] for line in numbers["searches"]}
    four_beams = [bleu for (beams, _), bleu in found.items() if beams == 4]
    checks = [
        Expectation(
            "most BLEU gained by another setting, greedy", "", gained[best], -100.0, MOST_GAINED,
            "one seed each",
        ),
    ]  # fmt: skip
    for name, source in (
        ("no label smoothing", "improves BLEU"),
        ("rate falls as 1 / sqrt(batches)", ""),
    ):
        if name in gained:
            checks.append(
                Expectation(
                    f"the recipe minus {name}: BLEU, greedy", source, -gained[name], 0.0, 100.0,
                    "the sign",
                )
            )  # fmt: skip
    return [
        *checks,
        Expectation(
            "4 beams minus greedy: BLEU", "", found[4, 1.0] - found[1, 1.0],
            LEAST_BY_BEAMS, MOST_BY_BEAMS, "as in trials before",
        ),
        Expectation(
            "most BLEU gained by another length penalty than 1, 4 beams", "",
            max(four_beams) - found[4, 1.0], 0.0, MOST_BY_PENALTY, "captions are short",
        ),
    ]  # fmt: skip


def report(numbers: JSON) -> str:
    """Returns the table of trials and that of searches."""
    return "\n\n".join("\n".join(part) for part in (_trials(numbers), _searches(numbers)))


def _trials(numbers: JSON) -> Iterator[str]:
    trials = numbers["trials"]
    yield (
        f"Validation text only; {trials[RECIPE]['steps']:,} batches of at most"
        f" {numbers['config']['recipe']['batch_tokens']:,} subwords, one seed. Minutes are those"
        " of this run, on the cores that each training had."
    )
    yield ""
    yield (
        "| setting | batches | minutes | parameters | BLEU, greedy | against the recipe |"
        " BLEU, 4 beams |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, trial in trials.items():
        greedy, beams = (trial["bleu"][search] for search in ("greedy", "4 beams"))
        against = "" if name == RECIPE else f"{greedy - trials[RECIPE]['bleu']['greedy']:+.1f}"
        yield (
            f"| {name} | {trial['steps']:,} | {trial['minutes']:.0f} |"
            f" {trial['parameters'] / 1e6:.1f} M | {greedy:.1f} | {against} | {beams:.1f} |"
        )


def _searches(numbers: JSON) -> Iterator[str]:
    yield "| search by the recipe's model | length penalty | BLEU |"
    yield "| --- | --- | --- |"
    for line in numbers["searches"]:
        beams = line["beams"]
        name, penalty = ("greedy", "") if beams == 1 else (f"{beams} beams", line["length_penalty"])
        yield f"| {name} | {penalty} | {line['bleu']:.1f} |"


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws BLEU of every trial."""
    trials = numbers["trials"]
    names = list(trials)[::-1]
    figure, (axes,) = plotting.new_figure(7.2, 0.9 + 0.3 * len(names))
    for index, search in enumerate(SEARCHES):
        values = np.array([trials[name]["bleu"][search] for name in names])
        axes.scatter(
            values, range(len(names)), color=plotting.COLORS[index],
            marker=plotting.MARKERS[index], label=search,
        )  # fmt: skip
        axes.axvline(
            trials[RECIPE]["bleu"][search], color=plotting.COLORS[index], alpha=0.4, linewidth=1
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("BLEU, validation")
    axes.legend()
    return {"translation_settings": figure}


if __name__ == "__main__":
    run_experiment(__name__)
