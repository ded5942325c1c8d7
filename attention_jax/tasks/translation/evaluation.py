"""The quality of translations: BLEU and chrF by sacrebleu, and the loss."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.tasks.batch import Batch
from attention_jax.tasks.translation.batches import Batches
from attention_jax.tasks.translation.task import TranslationConfig, loss_sums

Params = Any


class TranslationScores(NamedTuple):
    """Percent, detokenised and cased. A signature names sacrebleu's settings and version."""

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str


def score_translations(translations: Sequence[str], references: Sequence[str]) -> TranslationScores:
    """Scores of a whole text, with one reference per sentence.

    Raises:
        ValueError: the numbers of translations and references differ, or there are none, or
            sacrebleu is not installed.

    Source: Papineni et al. 2002 (BLEU); Popović 2015 (chrF); Post 2018 for the signatures.
    """
    if len(translations) != len(references) or not references:
        raise ValueError(
            f"references must be one for each of the {len(translations)} translations, at least 1;"
            f" got {len(references)}"
        )
    metrics = _sacrebleu_metrics()
    bleu, chrf = metrics.BLEU(), metrics.CHRF()
    hypotheses, streams = list(translations), [list(references)]
    return TranslationScores(
        bleu=bleu.corpus_score(hypotheses, streams).score,
        chrf=chrf.corpus_score(hypotheses, streams).score,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )


def mean_loss(config: TranslationConfig, params: Params, batches: Batches) -> dict[str, float]:
    """Mean over all pairs, without dropout, in nats per subword: {"loss" with label smoothing,
    "negative_log_likelihood" without it}.
    """
    sums = np.zeros(3)
    config = config.model.known(config)
    for step in range(batches.steps_per_epoch):
        batch_sums, tokens = _sums(config, params, batches.batch(0, step))
        sums += np.array([batch_sums.loss, batch_sums.negative_log_likelihood, tokens], float)
    return {"loss": sums[0] / sums[2], "negative_log_likelihood": sums[1] / sums[2]}


@functools.partial(jax.jit, static_argnums=0)
def _sums(config: TranslationConfig, params: Params, batch: Batch) -> Any:
    return loss_sums(config, params, batch, None)


def require_sacrebleu() -> None:
    """Raises ValueError unless sacrebleu is installed."""
    _sacrebleu_metrics()


def _sacrebleu_metrics() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise ValueError(
            "BLEU needs the package sacrebleu: .venv/bin/pip install -e '.[translate]'"
        ) from error
    return sacrebleu.metrics
