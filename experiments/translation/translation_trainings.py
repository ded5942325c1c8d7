"""What the experiments on translators share: trainings by score and seed, and their tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attention_jax.runs.metrics_file import read_lines
from attention_jax.scores import score_folder
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.parallel_text import ParallelText
from attention_jax.tasks.translation.task import TranslationConfig
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    translate,
    translator_of,
)
from attention_jax.training.run import train_run
from experiments.experiment import JSON, exit_if_interrupted
from experiments.translation.recipes import Corpus, Recipe
from experiments.translation.translation_scores import scored

SEARCHES = {"greedy": Search(), "4 beams": Search(beams=4)}


class Training(NamedTuple):
    """Folder of a run, and its settings."""

    workdir: Path
    settings: TranslationConfig


def training_of(workdir: Path, corpus: Corpus, recipe: Recipe, score: str, seed: int) -> Training:
    """Returns the training with a score and a seed; its folder lies in `workdir`."""
    folder = workdir / score_folder(score) / f"seed_{seed}"
    return Training(folder, recipe.training(corpus, score, seed))


def trained_translator(training: Training) -> Translator:
    """Trains, unless the run is there and finished, and returns the translator."""
    trained = train_run(TRANSLATION, training.settings, training.workdir, resume=True)
    exit_if_interrupted(trained.interrupted)
    return translator_of(trained)


def validations(trainings: Sequence[Training]) -> JSON:
    """Returns validations and minutes, a number for each training."""
    by_seed = [read_lines(workdir / "validation.jsonl") for workdir, _ in trainings]
    sessions = [read_lines(workdir / "timing.jsonl") for workdir, _ in trainings]
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


def tested(
    translators: Sequence[Translator], tests: Mapping[str, ParallelText]
) -> tuple[JSON, dict[tuple[str, str], list[list[str]]]]:
    """Translates test sets with every search.

    Returns:
        scores by test set and search, a number for each translator (see `scored`); and the
        translations of each translator by (test set, search).
    """
    found: JSON = {}
    systems = {}
    for split, text in tests.items():
        found[split] = {}
        for name, search in SEARCHES.items():
            systems[split, name] = [translate(one, text.source, search) for one in translators]
            found[split][name] = scored(systems[split, name], text.target)
    return found, systems
