"""Where two translators answer differently: three test sentences, chosen by rule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from attention_jax.tasks.translation.text import ParallelText
from experiments.experiment import JSON

_MOST_WORDS = 16  # of a sentence that is shown


def most_different(text: ParallelText, first: Sequence[str], second: Sequence[str]) -> list[JSON]:
    """Chooses three short sentences whose translations differ.

    The first is that where the first translator is ahead by most, by sentence chrF; the second that
    where the second is ahead by most; the third the one in the middle of all that differ.
    """
    from sacrebleu.metrics import CHRF

    chrf = CHRF()
    rows = [
        index
        for index, source in enumerate(text.source)
        if first[index] != second[index] and 0 < len(source.split()) <= _MOST_WORDS
    ]
    if not rows:
        return []
    scores = np.array(
        [
            [chrf.sentence_score(answers[i], [text.target[i]]).score for answers in (first, second)]
            for i in rows
        ]
    )
    order = np.argsort(scores[:, 0] - scores[:, 1], kind="stable")
    chosen = dict.fromkeys((int(order[-1]), int(order[0]), int(order[len(order) // 2])))
    return [
        {
            "index": rows[row],
            "source": text.source[rows[row]],
            "reference": text.target[rows[row]],
            "answers": [first[rows[row]], second[rows[row]]],
            "chrf": scores[row].round(1).tolist(),
            "of": len(rows),
        }
        for row in chosen
    ]
