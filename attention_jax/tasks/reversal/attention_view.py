"""A page with the attention of reversal runs while they read words and the answers to them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax

from attention_jax.analysis import AttentionView
from attention_jax.nn.config import ModelConfig
from attention_jax.nn.model import Model
from attention_jax.tasks.attention_views import Params, Reading, viewer
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.evaluation import Reversed
from attention_jax.tasks.reversal.task import VOCABULARY, ReversalRun, bind
from attention_jax.tasks.vocabulary import EOS, SOS
from attention_jax.training.run import load_run, load_states


def words_view(
    trained: ReversalRun,
    answers: Sequence[Reversed],
    *,
    seed_index: int = 0,
    compare: Sequence[Path] = (),
    all_steps: bool = False,
) -> AttentionView:
    """All attentions while the model reads words and the answers that `trained` gave to them.

    Every panel and every step reads the same answers, so that their rows can be compared.

    Args:
        trained: the run.
        answers: from `reverse`.
        seed_index: which of each run's seeds.
        compare: folders of further runs, whose newest checkpoints stand beside that of `trained`.
        all_steps: show step 0 and all kept checkpoints of every run under a slider.

    Raises:
        ValueError: a folder holds no run, or a run has no such seed.
    """
    runs = [trained, *(load_run(REVERSAL, workdir) for workdir in compare)]
    views: dict[str, AttentionView] = {}
    for run in runs:
        seeds = run.config.loop.seeds
        if not 0 <= seed_index < seeds:
            raise ValueError(f"seed_index must be from 0 to {seeds - 1}; got {seed_index}")
        source_start = run.config.source_start
        readings = {answer.word: _reading(answer, source_start=source_start) for answer in answers}
        bound = functools.partial(_bound, run.config.model, seed_index)
        view_of = viewer(
            bound,
            readings,
            title="Attention while strings are reversed",
            width=run.config.max_length + int(source_start),
        )
        label = run.config.label
        label = label if label not in views else f"{label} ({run.workdir})"
        views[label] = view_of(run.params)
        if all_steps and run.workdir is not None:
            _, states = load_states(REVERSAL, run.workdir)
            steps = {str(step): view_of(states[step]().params) for step in sorted(states)}
            views[label] = AttentionView.step_by_step(steps)
    return AttentionView.side_by_side(views)


def _bound(config: ModelConfig, seed_index: int, params: Params) -> Model:
    return bind(config, jax.tree.map(lambda leaf: leaf[seed_index], params))


def _reading(answer: Reversed, *, source_start: bool) -> Reading:
    start = [SOS] * source_start
    return Reading(
        source=[*start, *VOCABULARY.encode(answer.word)],
        answer=[*VOCABULARY.encode(answer.answer), EOS],
        source_labels=[*map(VOCABULARY.label, start), *answer.word],
        answer_labels=[*answer.answer, VOCABULARY.label(EOS)],
    )
