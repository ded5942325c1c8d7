"""The attention of translators, and how similar that of two translators is.

Weights are taken with the right answers given. Every number is a mean over rows: the target's
subwords and its EOS, each with its weights over the source's subwords and EOS.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.analysis import attention_rollout, capture, cross_rollout, jensen_shannon
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import ParallelText
from attention_jax.tasks.translation.translate import Translator
from attention_jax.tasks.vocabulary import EOS, Batch, padded_batch
from experiments.experiment import JSON

Array = jax.Array

_BATCH = 32  # sentence pairs per batch
_WIDTH = 8  # lengths are padded to multiples of it


class Seen(NamedTuple):
    """The weights of one sentence pair, and the subwords of its rows."""

    encoder: np.ndarray  # [L, N, S, S]
    cross: np.ndarray  # [L, N, T, S]
    rows: list[str]  # the target's subwords, EOS last


def attentions(translator: Translator, text: ParallelText) -> list[Seen]:
    """Returns all weights of each sentence pair, in the order of the text."""
    sides = [[[*ids, EOS] for ids in translator.subwords.encode(sentences)] for sentences in text]
    sources, targets = sides
    widths = [
        tuple(-(-len(ids) // _WIDTH) * _WIDTH for ids in pair) for pair in zip(*sides, strict=True)
    ]
    captured: list[Seen | None] = [None] * len(sources)
    for shape in sorted(set(widths)):
        members = [index for index, width in enumerate(widths) if width == shape]
        for first in range(0, len(members), _BATCH):
            chunk = members[first : first + _BATCH]
            batch = padded_batch(
                [sources[i] for i in chunk], [targets[i] for i in chunk], _BATCH, *shape
            )
            encoder, cross = map(np.asarray, look(translator.task, translator.params, batch))
            for row, index in enumerate(chunk):
                s, t = len(sources[index]), len(targets[index])
                labels = translator.subwords.labels(targets[index])
                captured[index] = Seen(encoder[:, row, :, :s, :s], cross[:, row, :, :t, :s], labels)
    return [pair for pair in captured if pair is not None]


@functools.partial(jax.jit, static_argnums=0)
def look(task: Translation, params: Any, batch: Batch) -> tuple[Array, Array]:
    """Weights of the encoder [L, B, N, S, S], and between decoder and encoder [L, B, N, T, S]."""
    model = task.bind(params)
    captured = capture(model, batch.source, batch.source_lengths, batch.target_inputs).attentions

    def stacked(name: str, layers: int) -> Array:
        weights: Any = [captured[name.format(layer)].weights for layer in range(layers)]
        return jnp.stack(weights)

    return (
        stacked("encoder_{}/self_attention", task.model.encoder_layers),
        stacked("decoder_{}/cross_attention", task.model.decoder_layers),
    )


def heads(pairs: Sequence[Seen]) -> JSON:
    """Measures each head of the cross attention, [L, N].

    "sharpness" is the mean of its rows' largest weights, "spread" their mean entropy over that of
    uniform rows.
    """
    largest, spread, rows = 0.0, 0.0, 0
    for pair in pairs:
        weights = np.asarray(pair.cross, np.float64)
        entropy = -np.sum(weights * np.log(np.where(weights > 0, weights, 1)), axis=-1)
        largest = largest + weights.max(-1).sum(-1)
        spread = spread + (entropy / np.log(weights.shape[-1])).sum(-1)
        rows += weights.shape[-2]
    return {
        "sharpness": np.round(np.asarray(largest) / rows, 4).tolist(),
        "spread": np.round(np.asarray(spread) / rows, 4).tolist(),
    }


def rollouts(pairs: Sequence[Seen]) -> JSON:
    """Follows the last cross attention through the encoder to the source's subwords.

    "on_the_largest" is the weight of a row's most attended position, "of_its_subword" the rollout's
    weight on that position's own subword.
    """
    error = on_the_largest = of_its_subword = 0.0
    rows = 0
    for pair in pairs:
        cross = pair.cross[-1]
        t, s = cross.shape[-2:]
        rollout = np.asarray(_rollout(_square(pair.encoder), _square(cross)))[:t, :s]
        error = max(error, float(np.abs(rollout.sum(-1) - 1).max()))
        weights = cross.mean(0)
        largest = weights.argmax(-1)
        on_the_largest += float(np.take_along_axis(weights, largest[:, None], -1).sum())
        of_its_subword += float(np.take_along_axis(rollout, largest[:, None], -1).sum())
        rows += len(largest)
    return {
        "largest_row_sum_error": error,
        "on_the_largest": round(on_the_largest / rows, 4),
        "of_its_subword": round(of_its_subword / rows, 4),
    }


def agreement(first_pairs: Sequence[Seen], second_pairs: Sequence[Seen]) -> JSON:
    """Compares the cross attention of two models.

    Measures the Jensen-Shannon divergence of their rows in nats, and how often both have the same
    largest weight. Rows are means over heads; they are compared for every pair of layers, and as
    the mean over layers, which is also compared with uniform rows and with the diagonal, j / S
    nearest to i / T.
    """
    layers = np.zeros((len(first_pairs[0].cross), len(second_pairs[0].cross)))
    kinds: dict[str, list[tuple[float, bool]]] = {}
    to_uniform, to_diagonal, rows = np.zeros(2), np.zeros(2), 0
    for first, second in zip(first_pairs, second_pairs, strict=True):
        by_layer = [np.asarray(pair.cross).mean(1) for pair in (first, second)]
        rows += by_layer[0].shape[1]
        for i, left in enumerate(by_layer[0]):
            for j, right in enumerate(by_layer[1]):
                layers[i, j] += _divergence(left, right).sum()
        means = [weights.mean(0) for weights in by_layer]
        divergence = _divergence(*means)
        largest = [weights.argmax(-1) for weights in means]
        t, s = means[0].shape
        uniform = np.full((t, s), 1 / s, np.float32)
        diagonal = np.round((np.arange(t) + 0.5) / t * s - 0.5).astype(int)
        for index, (weights, at) in enumerate(zip(means, largest, strict=True)):
            to_uniform[index] += _divergence(weights, uniform).sum()
            to_diagonal[index] += int((at == diagonal).sum())
        for row, label in enumerate(first.rows):
            same = bool(largest[0][row] == largest[1][row])
            kinds.setdefault(_kind(label), []).append((float(divergence[row]), same))
    every = np.array([row for values in kinds.values() for row in values])
    return {
        "rows": rows,
        "divergence": round(float(every[:, 0].mean()), 4),
        "same_largest": round(float(every[:, 1].mean()), 4),
        "divergence_from_uniform": (to_uniform / rows).round(4).tolist(),
        "largest_on_the_diagonal": (to_diagonal / rows).round(4).tolist(),
        "divergence_of_layers": (layers / rows).round(4).tolist(),
        "kinds": {
            kind: {
                "rows": len(values),
                "divergence": round(float(np.mean([d for d, _ in values])), 4),
                "same_largest": round(float(np.mean([same for _, same in values])), 4),
            }
            for kind, values in sorted(kinds.items())
        },
    }


def _divergence(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The divergence of each row, [T]."""
    divergence = _compiled_divergence(_square(one), _square(other))
    return np.asarray(divergence, np.float64)[: len(one)]


_compiled_divergence = jax.jit(jensen_shannon)


@jax.jit
def _rollout(encoder: Array, cross: Array) -> Array:
    return cross_rollout(cross, attention_rollout(encoder))


def _square(weights: np.ndarray) -> Array:
    """Appends rows and columns of zeros, so that few shapes are compiled; results are the same."""
    side = -(-max(weights.shape[-2:]) // 64) * 64
    missing = [(0, 0)] * (weights.ndim - 2) + [(0, side - size) for size in weights.shape[-2:]]
    return jnp.asarray(np.pad(weights, missing))


def _kind(label: str) -> str:
    if label == "EOS":
        return "end of sentence"
    if not any(letter.isalnum() for letter in label):
        return "punctuation"
    return "first of a word" if label.startswith("▁") else "rest of a word"
