"""A page with the attention of a translation run while it reads sentences and its translations."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from attention_jax.analysis import AttentionView
from attention_jax.tasks.attention_views import Reading, viewer
from attention_jax.tasks.translation.task import bind
from attention_jax.tasks.translation.translate import (
    GREEDY,
    WIDTH,
    Search,
    Translator,
    translated_ids,
)


def sentences_view(
    translator: Translator, sentences: Sequence[str], search: Search = GREEDY
) -> AttentionView:
    """All attentions while the model reads sentences and its own translations of them.

    Args:
        translator: the model.
        sentences: at least one, each with text.
        search: settings of the search.

    Raises:
        ValueError: a sentence has no text.
    """
    vocabularies = translator.vocabularies
    readings = {}
    for number, sentence in enumerate(sentences, start=1):
        source, answer = translated_ids(translator, sentence, search, multiple=WIDTH)
        readings[f"{number}: {sentence}"] = Reading(
            source,
            answer,
            vocabularies.source.labels(source),
            vocabularies.target.labels(answer),
        )

    view_of = viewer(
        functools.partial(bind, translator.config),
        readings,
        title="Attention while sentences are translated",
    )
    return view_of(translator.params)
