"""The words that the gradients of a reversal run are taken on."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from attention_jax.tasks.gradient_examples import Examples, GradientAnalysis
from attention_jax.tasks.reversal.data import random_batch
from attention_jax.tasks.reversal.evaluation import batch_of_words
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalConfig, reversal_task
from attention_jax.tasks.vocabulary import EOS


def reversal_examples(
    config: ReversalConfig, workdir: Path, analysis: GradientAnalysis
) -> Examples:
    """Random strings, and the words that are drawn."""
    batch = random_batch(
        jax.random.key(0),
        vocabulary=config.drawn,
        batch_size=analysis.strings,
        min_length=config.min_length,
        max_length=config.max_length,
        source_start=config.source_start,
    )
    words = list(dict.fromkeys(analysis.words))
    drawn = batch_of_words(words, source_start=config.source_start, width=config.max_length)
    source = np.asarray(drawn.source)
    labels = {}
    for index, word in enumerate(words):
        # Padding has columns where the model sees it.
        real = drawn.source_lengths[index] if config.model.mask_padding else source.shape[1]
        columns = [VOCABULARY.label(token) for token in source[index, : int(real)]]
        labels[word] = [*reversed(word), VOCABULARY.label(EOS)], columns
    return Examples(reversal_task(config), batch, drawn, labels)
