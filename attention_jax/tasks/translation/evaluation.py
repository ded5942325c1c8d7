"""How good translations are: BLEU and chrF, as sacrebleu counts them, and the loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.tasks.batch import Batch
from attention_jax.tasks.translation.batches import Batches
from attention_jax.tasks.translation.task import TranslationConfig, sums_of

Params = Any


class TranslationScores(NamedTuple):
    """Detokenised, cased; percent. A signature says with what settings and version."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score_translations(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores of a whole text, one reference a sentence.

    Raises:
        ValueError: there are not as many, or none, or sacrebleu is not installed.

    Source: Papineni et al. 2002 (BLEU); Popović 2015 (chrF); Post 2018 for the signatures.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"references must be as many as the {len(translations)} translations, and not none;"
            f" got {len(references)}"
        )
    metrics = _sacrebleu_metrics()
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    said, right = list(translations), [list(references)]
    return TranslationScores(
        bleu=bleu.corpus_score(said, right).score,
        chrf=chrf.corpus_score(said, right).score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def mean_loss(config: TranslationConfig, params: Params, batches: Batches) -> dict[str, float]:
    """Of every pair once, without dropout, in nats a subword: "loss" smoothed, and without."""
    sums = np.zeros(3)
    for step in range(batches.steps_per_epoch):
        found, tokens = _sums(config, params, batches.batch(0, step))
        sums += np.array([found.loss, found.negative_log_likelihood, tokens], float)
    return {"loss": sums[0] / sums[2], "negative_log_likelihood": sums[1] / sums[2]}


@functools.partial(jax.jit, static_argnums=0)
def _sums(config: TranslationConfig, params: Params, batch: Batch) -> Any:
    return sums_of(config, params, batch, None)


def require_sacrebleu() -> None:
    """Raises ValueError unless translations can be scored."""
    _sacrebleu_metrics()


def _sacrebleu_metrics() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise ValueError(
            "BLEU needs the package sacrebleu: .venv/bin/pip install -e '.[translate]'"
        ) from error
    return sacrebleu.metrics
