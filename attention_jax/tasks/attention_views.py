"""The attention of a sequence-to-sequence model while it reads sources and its own answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from attention_jax.analysis import AttentionView, Captured, capture, view
from attention_jax.nn.model import Model
from attention_jax.tasks.vocabulary import PAD, SOS

Params = Any


class Reading(NamedTuple):
    """A source and an answer, as ids and as labels of the same lengths."""

    source: list[int]
    answer: list[int]  # with EOS, if it is to have a row
    source_labels: list[str]
    answer_labels: list[str]


def viewer(
    model: Callable[[Params], Model],
    readings: Mapping[str, Reading],
    *,
    title: str,
    width: int = 0,
) -> Callable[[Params], AttentionView]:
    """Returns a function from parameters to a view of every attention, one example per reading.

    A row of the decoder's attentions has the label of the token that it predicts. The function
    compiles once for all parameters of the same shapes.

    Args:
        model: binds parameters to a model.
        readings: by the name of the example.
        title: of the page.
        width: sources are padded to so many tokens, or to the longest of them.
    """
    sources = _padded([reading.source for reading in readings.values()], width)
    lengths = np.array([len(reading.source) for reading in readings.values()], np.int32)
    inputs = _padded([[SOS, *reading.answer[:-1]] for reading in readings.values()])

    @jax.jit
    def captured(params: Params) -> Captured:
        return capture(model(params), sources, lengths, inputs)

    def view_of(params: Params) -> AttentionView:
        attentions = jax.device_get(captured(params))
        return AttentionView.by_example(
            {
                name: view(attentions, _tokens(reading), example=index, title=title)
                for index, (name, reading) in enumerate(readings.items())
            }
        )

    return view_of


def _tokens(reading: Reading) -> dict[str, tuple[list[str], list[str]]]:
    source, answer = reading.source_labels, reading.answer_labels
    return {
        "encoder_*": (source, source),
        "*/cross_attention": (answer, source),
        "decoder_*": (answer, ["SOS", *answer[:-1]]),
    }


def _padded(rows: list[list[int]], width: int = 0) -> np.ndarray:
    width = max(width, *map(len, rows))
    return np.array([row + [PAD] * (width - len(row)) for row in rows], np.int32)
