"""The sentence pairs that the gradients of a translation run are taken on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attention_jax.runs.run_folder import RunFolder
from attention_jax.tasks.batch import Batch
from attention_jax.tasks.gradient_examples import Examples, GradientAnalysis
from attention_jax.tasks.translation.batches import Ids, encode_pairs, padded_batch
from attention_jax.tasks.translation.parallel_text import ParallelText
from attention_jax.tasks.translation.task import (
    TranslationConfig,
    Vocabularies,
    read_text,
    training_batches,
    translation_task,
)
from attention_jax.tasks.vocabulary import EOS


def translation_examples(
    config: TranslationConfig, workdir: Path, analysis: GradientAnalysis
) -> Examples:
    """Pairs of the validation text, or of the training text if the run has no other.

    Raises:
        ValueError: the text cannot be read, is not that of the run, or lacks a sentence.
    """
    training, validation = read_text(config)
    _check_text(workdir, {"training": training, "validation": validation})
    vocabularies = Vocabularies.kept(config, workdir)
    batches, _ = training_batches(config, training, vocabularies)
    text = training if validation is None else validation
    pairs = encode_pairs(text, *vocabularies, config.max_tokens)
    lines = list(dict.fromkeys(analysis.sentences))
    sides = _encoded(config, vocabularies, text, lines)
    drawn = _batch(*sides)
    labels = {}
    for index, line in enumerate(lines):
        # Padding has columns where the model sees it.
        source = sides[0][index] if config.model.mask_padding else drawn.source[index]
        rows = vocabularies.target.labels(sides[1][index])
        columns = vocabularies.source.labels(np.asarray(source).tolist())
        labels[f"{line}: {text.source[line - 1]}"] = rows, columns
    return Examples(
        translation_task(config, batches),
        _batch(pairs.source[: analysis.strings], pairs.target[: analysis.strings]),
        drawn,
        labels,
    )


def _check_text(workdir: Path, texts: dict[str, ParallelText | None]) -> None:
    """Raises ValueError unless the text is that which the run learned from."""
    digests = RunFolder(workdir).read_config().get("text_sha256", {})
    for name, text in texts.items():
        if text is not None and digests.get(name, text.digest) != text.digest:
            raise ValueError(
                f"workdir {workdir} must be a run on the {name} text that config.json names; its"
                " files have changed since"
            )


def _encoded(
    config: TranslationConfig, vocabularies: Vocabularies, text: ParallelText, lines: Sequence[int]
) -> list[list[Ids]]:
    """Both sides of some lines as ids, EOS last."""
    if max(lines) > len(text.source):
        raise ValueError(
            f"sentences must be lines of the text, 1 to {len(text.source)}; got {max(lines)}"
        )
    sides = []
    for sentences, subwords in zip(text, vocabularies, strict=True):
        side = subwords.encode([sentences[line - 1] for line in lines])
        for line, ids in zip(lines, side, strict=True):
            if not 1 <= len(ids) <= config.max_tokens:
                raise ValueError(
                    f"sentences must have 1 to max_tokens {config.max_tokens} subwords on both"
                    f" sides; line {line} has {len(ids)}"
                )
        sides.append([[*ids, EOS] for ids in side])
    return sides


def _batch(source: list[Ids], target: list[Ids]) -> Batch:
    return padded_batch(source, target, len(source), max(map(len, source)), max(map(len, target)))
