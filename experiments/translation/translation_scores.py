"""Scores of translations with intervals, by sacrebleu; the time that translating takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    score_translations,
    translate,
)
from attention_jax.training.metrics import mean_and_deviation
from experiments.experiment import JSON

_RESAMPLES = 1000  # of the sentences of a test set


def scored(by_seed: Sequence[Sequence[str]], references: Sequence[str]) -> JSON:
    """Returns BLEU and chrF of the translations of each seed, and their signatures."""
    scores = [score_translations(translations, references) for translations in by_seed]
    return {
        "bleu": [round(one.bleu, 4) for one in scores],
        "chrf": [round(one.chrf, 4) for one in scores],
        "signatures": [scores[0].bleu_signature, scores[0].chrf_signature],
    }


def over_seeds(by_seed: Sequence[float] | np.ndarray) -> str:
    """Returns "mean ± standard deviation", or the number of a single seed."""
    if len(by_seed) == 1:
        return f"{by_seed[0]:.1f}"
    mean, deviation = mean_and_deviation(by_seed)
    return f"{mean:.1f} ± {deviation:.1f}"


def bootstrapped(systems: Mapping[str, Sequence[str]], references: Sequence[str]) -> JSON:
    """Compares two or more lists of translations by sacrebleu's paired bootstrap.

    The sentences are drawn 1,000 times, with replacement, the same for all lists.

    Returns:
        for each name "bleu"; "half_width", half of the 95 % interval around the mean of the draws;
        and "p_value", that its difference from the first list is chance, None for the first.

    Source: Koehn 2004.
    """
    from sacrebleu.metrics import BLEU
    from sacrebleu.significance import PairedTest

    test = PairedTest(
        [(name, list(translations)) for name, translations in systems.items()],
        {"BLEU": BLEU(references=[list(references)])},
        references=None,
        test_type="bs",
        n_samples=_RESAMPLES,
    )
    found: list[Any] = test()[1]["BLEU"]
    return {
        name: {
            "bleu": round(float(result.score), 4),
            "half_width": round(float(result.ci), 4),
            "p_value": None if result.p_value is None else round(float(result.p_value), 4),
        }
        for name, result in zip(systems, found, strict=True)
    }


def seconds_of(translator: Translator, text: ParallelText, search: Search) -> float:
    """Returns how long a text that has been translated before takes again: nothing compiles."""
    began = time.monotonic()
    translate(translator, text.source, search)
    return round(time.monotonic() - began, 2)
