"""Evaluates a trained run: reversal by string length, translation by BLEU; see --help."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rich.console
import rich.markup
import rich.table
import tyro
from command_line import run_command

from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.run_folder import check_output, write_json
from attention_jax.tasks import task_of
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.evaluation import Evaluation, check_beams, evaluate
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.evaluation import (
    TranslationScores,
    require_sacrebleu,
    score_translations,
)
from attention_jax.tasks.translation.parallel_text import read_parallel_text
from attention_jax.tasks.translation.translate import Search, translate, translator_of
from attention_jax.training.metrics import mean_and_deviation
from attention_jax.training.run import load_run


@dataclasses.dataclass(frozen=True)
class ReversalArguments:
    """Evaluate a checkpoint of a run on fresh random strings, length by length.

    A translation run has other options; --help shows them if --workdir names such a run.

    "letters" is the share of correct letters; "exact match" is the share of strings with every
    letter and the end correct. "forced": each letter is predicted from the correct letters before
    it (teacher forcing); "free": from the model's own letters.

    Attributes:
        workdir: a run folder made by scripts/train.py.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), or a step
            that is kept.
        lengths: lengths of the test strings.
        strings: how many test strings of each length.
        seed: of the random test strings.
        beams: partial answers kept at each step of the search; 1 is greedy.
        out: also write every seed's numbers to this JSON file.
    """

    workdir: Path
    step: StepName = "newest"
    lengths: tuple[int, ...] = (3, 4, 5, 6, 7, 8, 10)
    strings: int = 1000
    seed: int = 0
    beams: int = 1
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)
        check_beams(self.beams)
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must be from 0 to 2**32 - 1; got {self.seed}")


@dataclasses.dataclass(frozen=True)
class TranslationArguments:
    """Evaluate a translation run on a text: BLEU and chrF by sacrebleu, detokenised and cased.

    Attributes:
        workdir: a run folder made by scripts/train.py --task translation.
        source: sentences to translate, one per line, UTF-8, plain or .gz.
        reference: their reference translations, line by line.
        search: settings of the beam search.
        step: the newest good checkpoint, the best by validation, or a step that is kept.
        average: use the mean of the parameters of so many of the newest checkpoints.
        out: also write every seed's numbers to this JSON file.
    """

    workdir: Path
    source: Path
    reference: Path
    search: Annotated[Search, tyro.conf.OmitArgPrefixes] = Search(beams=4)
    step: StepName = "newest"
    average: int = 1
    out: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)


_HEADINGS = {
    "teacher_forced_tokens": "letters, forced",
    "free_running_tokens": "letters, free",
    "free_running_exact": "exact match, free",
}


def evaluate_reversal(arguments: ReversalArguments) -> None:
    trained = load_run(REVERSAL, arguments.workdir, arguments.step)
    results = evaluate(
        trained,
        lengths=arguments.lengths,
        strings=arguments.strings,
        seed=arguments.seed,
        beams=arguments.beams,
    )
    loop = trained.config.loop
    table = rich.table.Table(
        title=f"{rich.markup.escape(trained.config.label)}, step {trained.step},"
        f" {loop.seeds} seeds, {arguments.strings} strings per length: mean ± sd (worst seed), %"
    )
    table.add_column("length", justify="right", no_wrap=True)
    for metric in Evaluation._fields:
        table.add_column(_HEADINGS[metric], justify="right", no_wrap=True)
    for length, evaluation in results.items():
        table.add_row(str(length), *(_percent(np.asarray(shares)) for shares in evaluation))
    rich.console.Console().print(table)
    if arguments.out is not None:
        numbers = {
            str(length): {name: np.asarray(v).tolist() for name, v in evaluation._asdict().items()}
            for length, evaluation in results.items()
        }
        write_json(arguments.out, {"workdir": str(arguments.workdir), "accuracy": numbers})


def _percent(shares: np.ndarray) -> str:
    mean, deviation = mean_and_deviation(100 * shares)
    return f"{mean:.2f} ± {deviation:.2f} ({100 * shares.min():.2f})"


def evaluate_translation(arguments: TranslationArguments) -> None:
    require_sacrebleu()
    text = read_parallel_text(arguments.source, arguments.reference)
    run = load_run(TRANSLATION, arguments.workdir, arguments.step, average=arguments.average)
    scores: list[TranslationScores] = []
    for seed_index in range(run.config.loop.seeds):
        translations = translate(translator_of(run, seed_index), text.source, arguments.search)
        scores.append(score_translations(translations, text.target))
    print(
        f"{run.config.label}, step {', '.join(map(str, run.averaged))}, {len(scores)} seeds,"
        f" {len(text.source)} sentences, beams {arguments.search.beams}: %, mean ± sd"
    )
    table = rich.table.Table()
    cells = {}
    for name, heading in (("bleu", "BLEU"), ("chrf", "chrF")):
        mean, deviation = mean_and_deviation([getattr(of_seed, name) for of_seed in scores])
        cells[heading] = f"{mean:.2f}" + (f" ± {deviation:.2f}" if len(scores) > 1 else "")
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(*cells.values())
    rich.console.Console().print(table)
    print(f"BLEU {scores[0].bleu_signature}\nchrF {scores[0].chrf_signature}")
    if arguments.out is not None:
        search = dataclasses.asdict(arguments.search)
        by_seed = [of_seed._asdict() for of_seed in scores]
        run_content = {"workdir": str(arguments.workdir), "steps": list(run.averaged)}
        write_json(arguments.out, {**run_content, **search, "seeds": by_seed})


# What evaluates each task, and its options.
EVALUATIONS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    REVERSAL.name: (ReversalArguments, evaluate_reversal),
    TRANSLATION.name: (TranslationArguments, evaluate_translation),
}


def main(arguments: ReversalArguments | TranslationArguments) -> None:
    for kind, evaluate_task in EVALUATIONS.values():
        if isinstance(arguments, kind):
            evaluate_task(arguments)


def arguments_of(words: list[str]) -> type[Any]:
    """The arguments for the task of the run folder, and for reversal if there is no run."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workdir", nargs="?", type=Path)
    workdir = parser.parse_known_args(words)[0].workdir
    name = REVERSAL.name
    if workdir is not None:
        with contextlib.suppress(ValueError):  # `load_run` reports it
            name = task_of(workdir).name
    return EVALUATIONS[name][0]


if __name__ == "__main__":
    run_command(arguments_of, main)
