"""Evaluates a trained run: reversal by string length, translation by BLEU; see --help."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import rich.console
import rich.table
import tyro
from command_line import run_command

from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.run_folder import RunFolder, check_output, write_json
from attention_jax.tasks.reversal.evaluation import Evaluation, check_beams, evaluate
from attention_jax.tasks.reversal.task import load_run
from attention_jax.tasks.translation.evaluation import (
    TranslationScores,
    require_sacrebleu,
    score_translations,
)
from attention_jax.tasks.translation.parallel_text import read_parallel_text
from attention_jax.tasks.translation.run import load_translator
from attention_jax.tasks.translation.translate import Search, translate
from attention_jax.training.metrics import mean_and_deviation


@dataclasses.dataclass(frozen=True)
class ReversalArguments:
    """Evaluate a checkpoint of a run on fresh random strings, length by length.

    (A translation run is evaluated with other options, and --help shows them if --workdir names
    one.)

    "letters" is the share of letters that are right, "exact match" that of strings with every
    letter and the end in its place; "forced": each letter is predicted from the right ones before
    it (teacher forcing), "free": from the model's own.

    Attributes:
        workdir: a run folder made by scripts/train.py.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), or that
            of a step which is kept.
        lengths: which lengths.
        strings: test strings of each length.
        seed: of the test strings.
        beams: how many beginnings of an answer are kept while it is searched for; 1 is greedy.
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
        source: sentences to translate, one a line, UTF-8, plain or .gz.
        reference: their right translations, line by line.
        search: how translations are searched for.
        step: the newest good checkpoint, the best by validation, or that of a step which is kept.
        average: the mean of the parameters of so many of the newest checkpoints.
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
    trained = load_run(arguments.workdir, arguments.step)
    results = evaluate(
        trained,
        lengths=arguments.lengths,
        strings=arguments.strings,
        seed=arguments.seed,
        beams=arguments.beams,
    )
    loop = trained.config.loop
    table = rich.table.Table(
        title=f"{trained.config.model.label}, step {trained.step}, {loop.seeds} seeds,"
        f" {arguments.strings} strings a length: mean ± sd (worst seed), %"
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
    options: Any = {"step": arguments.step, "average": arguments.average}
    scores: list[TranslationScores] = []
    while True:
        seed_index = len(scores)
        translator, steps = load_translator(arguments.workdir, seed_index=seed_index, **options)
        answers = translate(translator, text.source, arguments.search)
        scores.append(score_translations(answers, text.target))
        if len(scores) == translator.config.loop.seeds:
            break
    config = translator.config
    print(
        f"{config.model.label}, step {', '.join(map(str, steps))}, {len(scores)} seeds,"
        f" {len(text.source)} sentences, beams {arguments.search.beams}: %, mean ± sd"
    )
    table = rich.table.Table()
    cells = {}
    for name, heading in (("bleu", "BLEU"), ("chrf", "chrF")):
        mean, deviation = mean_and_deviation([getattr(one, name) for one in scores])
        cells[heading] = f"{mean:.2f}" + (f" ± {deviation:.2f}" if len(scores) > 1 else "")
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row(*cells.values())
    rich.console.Console().print(table)
    print(f"BLEU {scores[0].bleu_signature}\nchrF {scores[0].chrf_signature}")
    if arguments.out is not None:
        search = dataclasses.asdict(arguments.search)
        by_seed = [one._asdict() for one in scores]
        content = {"workdir": str(arguments.workdir), "steps": steps, **search, "seeds": by_seed}
        write_json(arguments.out, content)


def main(arguments: ReversalArguments | TranslationArguments) -> None:
    if isinstance(arguments, TranslationArguments):
        evaluate_translation(arguments)
    else:
        evaluate_reversal(arguments)


def arguments_of(words: list[str]) -> type[ReversalArguments] | type[TranslationArguments]:
    """Those of the task that the run folder is of."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--workdir", nargs="?", type=Path)
    workdir = parser.parse_known_args(words)[0].workdir
    task = None if workdir is None else RunFolder(workdir).task
    return TranslationArguments if task == "translation" else ReversalArguments


if __name__ == "__main__":
    run_command(arguments_of, main)
