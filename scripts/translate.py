"""Translates with a trained run, from a file or standard input; see --help."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import rich.console
import rich.progress
import tyro

from attention_jax.commands.command_line import OfARun, run_command
from attention_jax.runs.progress import printable, say
from attention_jax.runs.run_folder import check_output
from attention_jax.tasks.files import decode_text
from attention_jax.tasks.translation.task import Translation
from attention_jax.tasks.translation.text import check_same_length, lines_of, read_sentences
from attention_jax.tasks.translation.translate import (
    Search,
    require_sacrebleu,
    score_translations,
    translate,
    translator_of,
)

_AT_ONCE = 1024  # sentences that are translated together, then written


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(OfARun):
    """Translate sentences, one per line, with a run of scripts/train.py --task translation.

    Translations go to standard output or a file, line by line, in order; the step, the seed and
    progress go to standard error. Ctrl-C keeps what has been written.

    Attributes:
        source: sentences to translate, UTF-8, plain or .gz; standard input if left out.
        out: where translations go; standard output if left out.
        search: settings of the beam search.
        reference: reference translations, line by line; BLEU and chrF by sacrebleu, detokenised and
            cased, are printed on standard error.
        seed_index: which of the run's seeds translates, from 0.
    """

    source: Path | None = None
    out: Path | None = None
    search: Annotated[Search, tyro.conf.OmitArgPrefixes] = Search(beams=4)
    reference: Path | None = None
    seed_index: int = 0

    def __post_init__(self) -> None:
        check_output(self.out)
        if self.reference is not None:
            require_sacrebleu()


def main(arguments: Arguments) -> int:
    if arguments.out is None and sys.stdout is None:
        raise ValueError("out must name a file where standard output is closed; got none")
    run = arguments.run()
    if not isinstance(run.task, Translation):
        raise ValueError(f"workdir {arguments.workdir} must be a run of task translation")
    translator = translator_of(run, arguments.seed_index)
    if arguments.source is None:
        sentences = lines_of(decode_text(sys.stdin.buffer.read(), "standard input"))
    else:
        sentences = read_sentences(arguments.source)
    references = None
    if arguments.reference is not None:
        references = read_sentences(arguments.reference)
        check_same_length(
            arguments.source or "standard input", sentences, arguments.reference, references
        )
    say(printable(run.describe(arguments.seed_index)), error=True)
    translations: list[str] = []
    where = sys.stdout.fileno() if arguments.out is None else arguments.out
    to_file = arguments.out is not None
    try:
        with (
            # whatever the locale and the system
            open(where, "w", encoding="utf-8", newline="\n", closefd=to_file) as out,
            _progress(len(sentences)) as progress,
        ):
            for first in range(0, len(sentences), _AT_ONCE):
                chunk = sentences[first : first + _AT_ONCE]
                done = translate(translator, chunk, arguments.search, progress=progress)
                out.writelines(f"{line}\n" for line in done)
                out.flush()
                translations += done
    except KeyboardInterrupt:
        say(f"stopped after {len(translations)} of {len(sentences)} sentences", error=True)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        return 141
    except OSError as error:
        name = f"out {where}" if to_file else "standard output"
        raise ValueError(f"{name} cannot be written: {error.strerror or error}") from error
    if references is not None:
        scores = score_translations(translations, references)
        say(f"BLEU {scores.bleu:.2f} ({scores.bleu_signature})", error=True)
        say(f"chrF {scores.chrf:.2f} ({scores.chrf_signature})", error=True)
    return 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; at the end one line with the speed, compilation included."""
    console, begun = rich.console.Console(stderr=True), time.monotonic()
    hidden = not console.is_terminal
    with rich.progress.Progress(console=console, disable=hidden, transient=True) as bar:
        task = bar.add_task("translating", total=total)
        yield lambda count: bar.advance(task, count)
        done = int(bar.tasks[task].completed)
    if done:
        seconds = max(time.monotonic() - begun, 1e-9)
        speed = f"{done} sentences in {seconds:.1f} s, {done / seconds:.1f} sentences/s"
        say(f"{speed}, compilation included", error=True)


if __name__ == "__main__":
    run_command(Arguments, main)
