"""How well does the translator translate after 10 minutes of training, and after an hour?

Source:   Multi30K, German to English, test set of 2016 (Elliott et al. 2016). Published
          transformers of 9 to 11 million parameters reach 35 to 36.8 BLEU. A prototype of this
          project: 38.7 greedy, 40.0 with 4 beams.
Command:  .venv/bin/python -m experiments.translation.translation_budget --data FOLDER
Time:     70 minutes of training on 2 CPU cores that have nothing else to do.
Expected: detokenised, cased BLEU of at least 33.5 greedy after 10 minutes, and after an hour of at
          least 39 greedy and 40.5 with 4 beams. 1,000 sentences are translated with 4 beams in at
          most 20 seconds.

FOLDER holds Multi30K's raw files, train.de.gz, train.en.gz, val.*, test_2016_flickr.*, from
data/task1/raw of github.com/multi30k/dataset; they are not part of this project. Minutes are wall
time with everything: learning the subwords, compilation, training, validation, checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from matplotlib.figure import Figure

from attention_jax.reports import plotting
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import check_folder
from attention_jax.tasks.translation.translate import Search, translate
from experiments.experiment import JSON, Expectation, run_experiment
from experiments.translation.recipes import LONG, SHORT, SMALL, SMALL_CORPUS, Corpus, Recipe
from experiments.translation.translation_scores import bootstrapped, scored, seconds_of
from experiments.translation.translation_trainings import (
    Training,
    minutes_of,
    parameters_of,
    trained_translator,
)

CAPTIONS = {
    "translation_budget": "BLEU of greedy translations of the validation text, against minutes of"
    " training, with all compilation and validation.",
}
TRIALS = Path(__file__).parent / "translation_trials.json"
# Recipe -> search -> the least BLEU, written before the runs.
LEAST = {"short": {"greedy": 33.5}, "long": {"greedy": 39.0, "beams": 40.5}}
MINUTES = {"short": 10.0, "long": 60.0}
SECONDS = 20.0  # most for 1,000 sentences with beams


@dataclasses.dataclass(frozen=True)
class Budget:
    """Settings that both experiments on training time share.

    Attributes:
        corpus: the text.
        score: score of the cross attention.
        beams: of the search that is not greedy.
        length_penalty: of that search.
        workdir: folder of the runs; a run that is finished there is not trained again.
    """

    corpus: Annotated[Corpus, tyro.conf.OmitArgPrefixes] = Corpus()
    score: str = "scaled"
    beams: int = 4
    length_penalty: float = 1.0
    workdir: Path = Path("runs/translation_budget")

    def __post_init__(self) -> None:
        for recipe in self.recipes.values():  # wrong settings fail before the data are read
            recipe.training(None, self.score)
        if self.beams == 1:
            raise ValueError("beams must be at least 2; got 1")
        check_folder("workdir", self.workdir)
        _ = self.searches

    @property
    def recipes(self) -> dict[str, Recipe]:
        """The recipes by name: those of the fields."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if isinstance(value, Recipe)}

    @property
    def searches(self) -> dict[str, Search]:
        """The searches by name."""
        return {
            "greedy": Search(),
            "beams": Search(beams=self.beams, length_penalty=self.length_penalty),
        }


@dataclasses.dataclass(frozen=True)
class Config(Budget):
    """Settings.

    Attributes:
        corpus: the text.
        score: score of the cross attention.
        beams: of the search that is not greedy.
        length_penalty: of that search.
        workdir: folder of the runs; a run that is finished there is not trained again.
        short: what is trained within 10 minutes.
        long: what is trained within an hour.
    """

    short: Annotated[Recipe, tyro.conf.Suppress] = SHORT  # not on the command line
    long: Annotated[Recipe, tyro.conf.Suppress] = LONG


QUICK = Config(corpus=SMALL_CORPUS, short=SMALL, long=dataclasses.replace(SMALL, dropout_rate=0.1))


def missing(config: Budget) -> str:
    """Returns which file is missing, and where to get it; "" if all are there."""
    return config.corpus.missing()


def run(config: Config) -> JSON:
    """Trains both recipes and translates the test sets."""
    return {**train_and_test(config), "trials": json.loads(TRIALS.read_text())}


def train_and_test(config: Budget) -> JSON:
    """Trains all recipes of a budget and translates the test sets."""
    tests = {split: config.corpus.text(split) for split in config.corpus.tests}
    recipes: JSON = {}
    for name, recipe in config.recipes.items():
        workdir = config.workdir / name
        training = Training(workdir, recipe.training(config.corpus, config.score))
        translator = trained_translator(training)
        recipes[name] = {
            **_training(workdir),
            "parameters": parameters_of(translator),
            "tests": {},
            "seconds_of_search": {},
        }
        for split, text in tests.items():
            recipes[name]["tests"][split] = found = {}
            systems = {}
            for search_name, search in config.searches.items():
                systems[search_name] = translate(translator, text.source, search)
                found[search_name] = scored([systems[search_name]], text.target)
                if split == config.corpus.tests[0]:
                    seconds = seconds_of(translator, text, search)
                    recipes[name]["seconds_of_search"][search_name] = seconds
            for search_name, interval in bootstrapped(systems, text.target).items():
                found[search_name]["half_width"] = interval["half_width"]
    sentences = len(tests[config.corpus.tests[0]].source)
    return {"recipes": recipes, "sentences": sentences}


def _training(workdir: Path) -> JSON:
    validations = read_lines(workdir / "validation.jsonl")
    speed = read_lines(workdir / "timing.jsonl")[-1]["steps_per_second"]
    return {
        "validated": [line["step"] for line in validations],
        "validation_bleu": [round(line["bleu"][0], 3) for line in validations],
        "minutes": round(minutes_of(workdir), 2),
        "steps_per_second": round(speed, 3),
    }


def expectations(numbers: JSON) -> list[Expectation]:
    """BLEU, the minutes of training, and the seconds of decoding."""
    split, recipes = numbers["config"]["corpus"]["tests"][0], numbers["recipes"]
    beams = f"{numbers['config']['beams']} beams"
    checks = [
        Expectation(
            f"{name}: BLEU of {split}, {beams if search == 'beams' else search}",
            "35 to 36.8" if name == "long" else "",
            recipe["tests"][split][search]["bleu"][0], least, 100.0,
            "above published transformers with 5 times the parameters"
            if name == "long" else "usable",
        )
        for name, recipe in recipes.items()
        for search, least in LEAST[name].items()
    ]  # fmt: skip
    checks += [
        Expectation(
            f"{name}: minutes of training", "", recipe["minutes"], 0, MINUTES[name], "budget"
        )
        for name, recipe in recipes.items()
    ]
    seconds = recipes["long"]["seconds_of_search"]["beams"] * 1000 / numbers["sentences"]
    claim = f"seconds for 1,000 sentences with {beams}, compilation not counted"
    return [*checks, Expectation(claim, "", seconds, 0, SECONDS, "an answer while one waits")]


def report(numbers: JSON) -> str:
    """Returns BLEU and chrF of both recipes, and the table of trials."""
    return "\n\n".join(
        "\n".join(part) for part in (result_tables(numbers), _trials(numbers["trials"]))
    )


def short(numbers: JSON) -> str:
    """Returns what the short recipe, the command of scripts/README.md, takes and gives."""
    recipe = numbers["recipes"]["short"]
    split = numbers["config"]["corpus"]["tests"][0]
    found, beams = recipe["tests"][split], numbers["config"]["beams"]
    return (
        f"Training takes {recipe['minutes']:.1f} minutes on {numbers['environment']['cpus']} CPU"
        " cores that have nothing else to do, with all compilation and"
        f" {len(recipe['validated'])} validations. BLEU on {split} is"
        f" {found['greedy']['bleu'][0]:.1f} with greedy search and {found['beams']['bleu'][0]:.1f}"
        f" with {beams} beams, the default of both scripts (detokenised, cased,"
        f" `{found['beams']['signatures'][0]}`; one seed)."
    )


def result_tables(numbers: JSON) -> Iterator[str]:
    """Lines: tables of the tests and of the trainings, and the seconds of decoding."""
    beams = numbers["config"]["beams"]
    yield f"| recipe | test set | BLEU, greedy | BLEU, {beams} beams | chrF, {beams} beams |"
    yield "| --- | --- | --- | --- | --- |"
    for name, recipe in numbers["recipes"].items():
        for split, found in recipe["tests"].items():
            cells = [
                f"{found[search]['bleu'][0]:.1f} ± {found[search]['half_width']:.1f}"
                for search in ("greedy", "beams")
            ]
            chrf = found["beams"]["chrf"][0]
            yield f"| {name} | {split} | {' | '.join(cells)} | {chrf:.1f} |"
    bleu, chrf = found["beams"]["signatures"]
    yield ""
    yield (
        "Detokenised and cased; ± is half of the 95 % interval over test sentences drawn with"
        f" replacement, for one seed. BLEU is `{bleu}`, chrF is `{chrf}`."
    )
    yield ""
    yield "| recipe | minutes | batches a second | dropout | batches | parameters |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, recipe in numbers["recipes"].items():
        settings = numbers["config"][name]
        yield (
            f"| {name} | {recipe['minutes']:.1f} | {recipe['steps_per_second']:.1f} |"
            f" {settings['dropout_rate']:g} | {settings['steps']:,} |"
            f" {recipe['parameters'] / 1e6:.1f} M |"
        )
    yield ""
    seconds = numbers["recipes"]["long"]["seconds_of_search"]
    yield (
        f"The long recipe's model translates the {numbers['sentences']:,} sentences in"
        f" {seconds['greedy']:.1f} s with greedy search and in {seconds['beams']:.1f} s with"
        f" {beams} beams, after compilation."
    )


def _trials(trials: JSON) -> Iterator[str]:
    yield trials["about"]
    yield ""
    yield f"| {' | '.join(trials['columns'])} |"
    yield f"|{' --- |' * len(trials['columns'])}"
    for row in trials["rows"]:
        yield f"| {' | '.join(str(cell) for cell in row)} |"


def plot(numbers: JSON) -> dict[str, Figure]:
    """Draws validation BLEU against minutes."""
    return {"translation_budget": validation_curves(numbers)}


def validation_curves(numbers: JSON) -> Figure:
    """Draws validation BLEU of every recipe against minutes."""
    figure, (axes,) = plotting.new_figure(5.6, 3.6)
    for index, (name, recipe) in enumerate(numbers["recipes"].items()):
        validated = np.array(recipe["validated"])
        minutes = validated / validated[-1] * recipe["minutes"]
        axes.plot(
            minutes, recipe["validation_bleu"], label=name, color=plotting.COLORS[index],
            marker=plotting.MARKERS[index], markersize=3,
        )  # fmt: skip
    axes.set_xlabel("minutes")
    axes.set_ylabel("BLEU, greedy")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    run_experiment(__name__)
