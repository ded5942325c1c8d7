"""What the experiments on translators share: trainings by score and seed, and their tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from attention_jax.runs.metrics_file import read_lines
from attention_jax.scores import score_folder
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.translation.translate import Search, Translator, translate, translator_of
from attention_jax.training.run import train_run
from experiments.experiment import JSON, exit_if_interrupted
from experiments.translation.recipes import Corpus, Recipe
from experiments.translation.translation_scores import scored

SEARCHES = {"greedy": Search(), "4 beams": Search(beams=4)}
# The least BLEU, written before the runs: by search for scaled dot, and how much lower others are.
LEAST = {"greedy": 37.0, "4 beams": 38.0}
MOST_BEHIND = 2.0


class Training(NamedTuple):
    """Folder of a run, and its settings."""

    workdir: Path
    settings: Translation


def training_of(workdir: Path, corpus: Corpus, recipe: Recipe, score: str, seed: int) -> Training:
    """Returns the training with a score and a seed; its folder lies in `workdir`."""
    folder = workdir / score_folder(score) / f"seed_{seed}"
    return Training(folder, recipe.training(corpus, score, seed))


def trained_translator(training: Training) -> Translator:
    """Trains, unless the run is there and finished, and returns the translator."""
    # Linux gives a process no more than 65,530 memory maps: the last training's programs can go.
    jax.clear_caches()
    trained = train_run(training.settings, training.workdir, resume=True)
    exit_if_interrupted(trained.interrupted)
    return translator_of(trained)


def minutes_of(workdir: Path) -> float:
    """Returns how long a run has trained, with compilation and validation."""
    return sum(float(line["seconds"]) for line in read_lines(workdir / "timing.jsonl")) / 60


def parameters_of(translator: Translator) -> int:
    """Returns the number of parameters of a model."""
    return sum(int(leaf.size) for leaf in jax.tree.leaves(translator.params))


def training_record(trainings: Sequence[Training]) -> JSON:
    """Returns validations, minutes, steps and commits, a number for each training."""
    by_seed = [read_lines(workdir / "validation.jsonl") for workdir, _ in trainings]
    names = ("negative_log_likelihood", "bleu")
    return {
        "validated": [line["step"] for line in by_seed[0]],
        **{
            f"validation_{name}": [
                [round(line[name][0], 4) for line in lines] for lines in zip(*by_seed, strict=True)
            ]
            for name in names
        },
        "steps": trainings[0].settings.train.steps,
        "minutes": [round(minutes_of(workdir), 1) for workdir, _ in trainings],
        "git_commits": [
            json.loads((workdir / "env.json").read_text())["git_commit"] for workdir, _ in trainings
        ],
    }


def scores_of_tests(
    translators: Sequence[Translator], tests: Mapping[str, ParallelText]
) -> tuple[JSON, dict[tuple[str, str], list[list[str]]]]:
    """Translates test sets with every search.

    Returns:
        scores by test set and search, a number for each translator (see `scored`); and the
        translations of each translator by (test set, search).
    """
    scores: JSON = {}
    translations = {}
    for split, text in tests.items():
        scores[split] = {}
        for name, search in SEARCHES.items():
            by_seed = [translate(translator, text.source, search) for translator in translators]
            scores[split][name] = scored(by_seed, text.target)
            translations[split, name] = by_seed
    return scores, translations
