"""Translation for the trainer: text, subwords, batches, validation and results of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.runs.metrics_file import read_lines
from attention_jax.runs.run_folder import JSON, RunFolder
from attention_jax.tasks.translation.batches import Batches, encode_pairs
from attention_jax.tasks.translation.evaluation import (
    mean_loss,
    require_sacrebleu,
    score_translations,
)
from attention_jax.tasks.translation.parallel_text import ParallelText
from attention_jax.tasks.translation.task import (
    TranslationConfig,
    Vocabularies,
    optimizer,
    read_text,
    training_batches,
    translation_task,
    why_steps_are_fixed,
)
from attention_jax.tasks.translation.translate import Translator, translate
from attention_jax.training.run import TrainedRun
from attention_jax.training.run_results import training_loss
from attention_jax.training.task_definition import Result, Results, RunData, TaskDefinition
from attention_jax.training.validation import Line, Validation, ValidationPlan

Params = Any


def prepare(config: TranslationConfig, folder: Path, multiple_of: int) -> RunData:
    """Reads the text; learns the subwords, or reads those of a run that has begun.

    Args:
        config: all settings.
        folder: the run folder.
        multiple_of: divides the number of pairs in each batch.

    Raises:
        ValueError: a score fails for the model's sizes, the text or the run's subwords cannot be
            used, or sacrebleu is not installed.
    """
    config.model.check_scores_run()  # before the subwords are learned, which takes seconds
    text, validation_text = read_text(config)
    if validation_text is not None:
        require_sacrebleu()
    if all((folder / name).is_file() for name in Vocabularies.names(config)):
        vocabularies = Vocabularies.kept(config, folder)
    else:
        vocabularies = Vocabularies.learned(config, text)
    batches, description = training_batches(config, text, vocabularies, multiple_of)
    texts = {"training": text, "validation": validation_text}
    return RunData(
        translation_task(config, batches),
        digests={
            "text_sha256": {name: text.digest for name, text in texts.items() if text is not None},
            "subwords_sha256": vocabularies.digests,
        },
        files=vocabularies.files,
        validation=_validation(config, validation_text, vocabularies),
        description=description,
    )


def _validation(
    config: TranslationConfig, text: ParallelText | None, vocabularies: Vocabularies
) -> ValidationPlan | None:
    if text is None:
        return None
    pairs = encode_pairs(text, *vocabularies, config.max_tokens)
    batches = Batches(pairs, tokens=config.batch_tokens, buckets=3)

    def measure(params: Params) -> Line:
        line: Line = {"loss": [], "negative_log_likelihood": [], "bleu": []}
        for seed in range(config.loop.seeds):
            of_seed = jax.tree.map(lambda leaf: leaf[seed], params)  # noqa: B023 -- used at once
            for name, number in mean_loss(config, of_seed, batches).items():
                line[name].append(number)
            translations = translate(Translator(config, of_seed, vocabularies), text.source)
            line["bleu"].append(score_translations(translations, text.target).bleu)
        return line

    return _plan(config, measure)


def _plan(config: TranslationConfig, measure: Callable[[Params], Line]) -> ValidationPlan:
    larger_is_better = config.validation_metric == "bleu"
    return ValidationPlan(measure, config.validation_metric, larger_is_better, config.patience)


def translation_results(run: TrainedRun[TranslationConfig]) -> Results:
    """Each seed's best validation loss and best greedy BLEU over checkpoints; the training loss.

    A run without validation text has the training loss only.
    """
    results = {"training loss": training_loss(run)}
    lines = _validation_lines(run)
    if not lines:
        return results
    # NaN, from a seed that diverged, is never the best unless there is nothing else.
    losses, bleus = (np.array([line[name] for line in lines]) for name in ("loss", "bleu"))
    best_loss = Result(np.fmin.reduce(losses).tolist(), larger_is_better=False)
    best_bleu = Result(np.fmax.reduce(bleus).tolist(), larger_is_better=True, high=100.0)
    return {"best validation loss": best_loss, "best validation BLEU": best_bleu, **results}


def stopped_early(run: TrainedRun[TranslationConfig]) -> bool:
    """Whether the patience of validation ran out."""
    plan = _plan(run.config, lambda params: {})
    return Validation(plan, None, _validation_lines(run)).exhausted


def _validation_lines(run: TrainedRun[TranslationConfig]) -> list[JSON]:
    assert run.workdir is not None
    lines = read_lines(RunFolder(run.workdir).validation)
    return [line for line in lines if line["step"] <= run.step]


TRANSLATION = TaskDefinition(
    name="translation",
    config_class=TranslationConfig,
    task=translation_task,
    optimizer=optimizer,
    prepare=prepare,
    why_steps_are_fixed=why_steps_are_fixed,
    gradient_statistics=learning_statistics,
    results=translation_results,
    stopped_early=stopped_early,
)
