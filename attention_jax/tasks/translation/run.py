"""A translation run in its folder: trained, and loaded."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from attention_jax.analysis.learning_statistics import learning_statistics
from attention_jax.core.checks import check_integer
from attention_jax.runs.checkpoints import Checkpoints, StepName
from attention_jax.runs.run_folder import JSON, RunFolder, require_tensorboard
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
)
from attention_jax.tasks.translation.translate import Translator, translate
from attention_jax.training.loop import check_gradient_log_every, initial_state
from attention_jax.training.run import Reached, Run, tell_damage, train_in_folder
from attention_jax.training.sharding import Layout, MeshShape, whole_machine
from attention_jax.training.validation import Line, ValidationPlan

Params = Any


def train_run(
    config: TranslationConfig,
    workdir: Path,
    *,
    resume: bool = False,
    tensorboard: bool = False,
    log_gradients: int | None = None,
    mesh: MeshShape | None = None,
    tell: Callable[[str], None] = print,
) -> Reached:
    """Trains in a folder, from its newest good checkpoint if it has one and `resume` is set.

    Args:
        config: all settings.
        workdir: the folder.
        resume: go on with the run that is there.
        tensorboard: also write TensorBoard events.
        log_gradients: every so many steps, `analysis.learning_statistics` to gradients.jsonl.
        mesh: over which devices; one if left out, or all of them in a run of many processes.
        tell: told what there is to learn from.

    Raises:
        ValueError: the folder or the text is not fit for it, or a setting, and nothing has been
            changed; or no state there is as it was saved; or something cannot be written.
    """
    if tensorboard:
        require_tensorboard()
    if log_gradients is not None:
        check_gradient_log_every(log_gradients, config.loop)
    mesh = mesh or whole_machine()
    sharing = mesh.data * mesh.fsdp
    mesh.check(seeds=config.loop.seeds, batch_size=sharing)  # batches are made to fit
    text, validation_text = read_text(config)
    if validation_text is not None:
        require_sacrebleu()
    folder = RunFolder(workdir)
    vocabularies = _kept_or_learned(config, folder, text)
    # Text and subwords are part of what the run is: with others, it would go on as another.
    texts = {"training": text, "validation": validation_text}
    settings = config.to_json() | {
        "text_sha256": {name: one.digest for name, one in texts.items() if one is not None},
        "subwords_sha256": _digests(vocabularies),
    }
    folder.check(settings, resume=resume, completed=_completed)
    batches, description = training_batches(config, text, vocabularies, sharing)
    tell(description)
    run = Run(
        translation_task(config, batches),
        optimizer(config),
        config.loop,
        label=config.model.score,
        settings=settings,
        completed=_completed,
        files=vocabularies.files,
        validation=_validation(config, validation_text, vocabularies),
    )
    return train_in_folder(
        run,
        folder,
        resume=resume,
        tensorboard=tensorboard,
        gradient_statistics=(log_gradients, learning_statistics) if log_gradients else None,
        layout=Layout(mesh),
    )


def load_translator(
    workdir: Path, step: StepName = "newest", *, average: int = 1, seed_index: int = 0
) -> tuple[Translator, list[int]]:
    """The model of a run, and of which steps it is.

    Args:
        workdir: the run's folder; nothing in it is changed.
        step: "newest", "best" (by validation) or a step that is kept.
        average: parameters are the mean of those of so many of the newest checkpoints.
        seed_index: which of the run's seeds, from 0.

    Raises:
        ValueError: the folder holds no such run, step or seed, or too few checkpoints to average,
            or what it holds is damaged.
    """
    check_integer("average", average)
    folder = RunFolder(workdir)
    content = folder.read_config()
    config = _config_of(workdir, content)
    if not 0 <= seed_index < config.loop.seeds:
        raise ValueError(f"seed_index must be from 0 to {config.loop.seeds - 1}; got {seed_index}")
    vocabularies = Vocabularies.kept(config, workdir)
    if _digests(vocabularies) != content.get("subwords_sha256"):
        raise ValueError(f"workdir {workdir}: its subwords are not those that it was trained with")
    task, adam = translation_task(config), optimizer(config)
    like = jax.eval_shape(functools.partial(initial_state, task, adam, config.loop))
    params: list[Params] = []
    steps: list[int] = []
    if not folder.checkpoints.is_dir():
        raise ValueError(f"workdir {workdir} has no checkpoint yet; train it first")
    with Checkpoints(folder.checkpoints, read_only=True) as checkpoints:
        kept = checkpoints.steps()
        if not kept:
            raise ValueError(f"workdir {workdir} has no checkpoint yet; train it first")
        if average == 1:
            wanted = [checkpoints.step_called(step)]
        elif step != "newest":
            raise ValueError(f"average must be 1 with step {step}; got {average}")
        elif average > len(kept):
            raise ValueError(f"average must be at most {len(kept)}, the checkpoints; got {average}")
        else:
            wanted = list(kept[-average:])
        for one in wanted:
            restored = checkpoints.restore(like, step=one)
            assert restored is not None  # there are steps
            tell_damage(restored)
            steps.append(restored.step)
            params.append(jax.tree.map(lambda leaf: leaf[seed_index], restored.state.params))
    mean = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *params)
    return Translator(config, mean, vocabularies), steps


def _validation(
    config: TranslationConfig, text: ParallelText | None, vocabularies: Vocabularies
) -> ValidationPlan | None:
    if text is None:
        return None
    pairs = encode_pairs(text, *vocabularies, config.max_tokens)
    batches = Batches(pairs, tokens=config.batch_tokens, buckets=3)

    def measure(params: Params) -> Line:
        found: Line = {"loss": [], "negative_log_likelihood": [], "bleu": []}
        for seed in range(config.loop.seeds):
            own = jax.tree.map(lambda leaf: leaf[seed], params)  # noqa: B023 -- used at once
            for name, number in mean_loss(config, own, batches).items():
                found[name].append(number)
            answers = translate(Translator(config, own, vocabularies), text.source)
            found["bleu"].append(score_translations(answers, text.target).bleu)
        return found

    bleu = config.validation_metric == "bleu"
    return ValidationPlan(measure, config.validation_metric, bleu, config.patience)


def _kept_or_learned(
    config: TranslationConfig, folder: RunFolder, text: ParallelText
) -> Vocabularies:
    """The run's own, if it has begun: learning them again takes time."""
    if all((folder.path / name).is_file() for name in Vocabularies.names(config)):
        return Vocabularies.kept(config, folder.path)
    return Vocabularies.learned(config, text)


def _digests(vocabularies: Vocabularies) -> dict[str, str]:
    return {name: hashlib.sha256(model).hexdigest() for name, model in vocabularies.files.items()}


def _config_of(workdir: Path, content: JSON) -> TranslationConfig:
    try:
        return TranslationConfig.from_json(content)
    except ValueError as error:
        raise ValueError(f"workdir {workdir}: {error}") from error


def _completed(stored: JSON) -> JSON:
    return stored | TranslationConfig.from_json(stored).to_json()
