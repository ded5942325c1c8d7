"""Translates with a trained run, from a file or standard input; see --help."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import rich.console
import rich.progress
import tyro
from command_line import run_command

from attention_jax.analysis.attention_page.view import check_page_file
from attention_jax.reports import plotting
from attention_jax.runs.checkpoints import StepName
from attention_jax.runs.run_folder import check_output
from attention_jax.tasks.translation.attention_view import sentences_view
from attention_jax.tasks.translation.definition import TRANSLATION
from attention_jax.tasks.translation.parallel_text import decode_sentences, read_sentences
from attention_jax.tasks.translation.translate import (
    Search,
    Translator,
    align,
    check_n_best,
    translate,
    translate_n_best,
    translator_of,
)
from attention_jax.training.run import load_run

_AT_ONCE = 1024  # sentences that are translated together, then written
_ON_PAGE = 8  # sentences on the page of --html


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Translate sentences, one per line, with a run of scripts/train.py --task translation.

    Translations go to standard output or a file, line by line, in order; progress goes to standard
    error. Ctrl-C keeps what has been written.

    Attributes:
        workdir: the run folder.
        source: sentences to translate, UTF-8, plain or .gz; standard input if left out.
        out: where translations go; standard output if left out.
        search: settings of the beam search.
        n_best: write so many of the beams of each sentence, best first, a line each: the number of
            the sentence from 1, a tab, the score (log-probability in nats over length penalty), a
            tab, the translation. An empty sentence has no line.
        step: the newest good checkpoint, the best by validation, or a step that is kept.
        average: use the mean of the parameters of so many of the newest checkpoints.
        seed_index: which of the run's seeds translates, from 0.
        heatmap: also draw each decoder layer's cross attention for the first sentence, to this PNG
            file.
        html: also write a page to explore every attention of the model, for the first eight
            sentences, to this HTML file.
    """

    workdir: Path
    source: Path | None = None
    out: Path | None = None
    search: Annotated[Search, tyro.conf.OmitArgPrefixes] = Search(beams=4)
    n_best: int | None = None
    step: StepName = "newest"
    average: int = 1
    seed_index: int = 0
    heatmap: Path | None = None
    html: Path | None = None

    def __post_init__(self) -> None:
        check_output(self.out)
        if self.n_best is not None:
            check_n_best(self.n_best, self.search)
        if self.html is not None:
            check_page_file(self.html)
        if self.heatmap is not None:
            plotting.check_png(self.heatmap)


def main(arguments: Arguments) -> int:
    run = load_run(TRANSLATION, arguments.workdir, arguments.step, average=arguments.average)
    translator = translator_of(run, arguments.seed_index)
    if arguments.source is None:
        sentences = decode_sentences(sys.stdin.buffer.read(), "standard input")
    else:
        sentences = read_sentences(arguments.source)
    for name in ("heatmap", "html"):
        if getattr(arguments, name) is not None and not any(sentences):
            raise ValueError(f"{name} needs a sentence; got none")
    done = 0
    try:
        with _written(arguments.out) as out, _progress(len(sentences)) as progress:
            for first in range(0, len(sentences), _AT_ONCE):
                chunk = sentences[first : first + _AT_ONCE]
                out.writelines(_lines(arguments, translator, chunk, first, progress))
                out.flush()
                done += len(chunk)
    except KeyboardInterrupt:
        print(f"stopped after {done} of {len(sentences)} sentences", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        return 141
    except OSError as error:
        where = "standard output" if arguments.out is None else f"out {arguments.out}"
        raise ValueError(f"{where} cannot be written: {error.strerror or error}") from error
    if arguments.heatmap is not None:
        sentence = next(filter(None, sentences))
        aligned = align(translator, sentence, arguments.search)
        panels = {
            f"decoder layer {layer}": (weights, aligned.target_labels, aligned.source_labels)
            for layer, weights in enumerate(aligned.weights)
        }
        figure = plotting.weight_heatmaps(
            panels,
            ylabel="subword written (query)",
            xlabel="source subword (key)",
            size=max(3.1, 0.22 * max(aligned.weights.shape[1:])),
        )
        try:
            print(plotting.save(figure, arguments.heatmap), file=sys.stderr)
        except OSError as error:
            raise ValueError(
                f"heatmap {arguments.heatmap} cannot be written: {error.strerror}"
            ) from error
    if arguments.html is not None:
        on_page = list(filter(None, sentences))[:_ON_PAGE]
        shown = sentences_view(translator, on_page, arguments.search)
        print(shown.save(arguments.html), file=sys.stderr)
    return 0


def _lines(
    arguments: Arguments,
    translator: Translator,
    sentences: Sequence[str],
    first: int,
    progress: Callable[[int], None],
) -> Iterator[str]:
    """The lines of output for some sentences, of which `first` is the index of the first."""
    search = arguments.search
    if arguments.n_best is None:
        for answer in translate(translator, sentences, search, progress=progress):
            yield f"{answer}\n"
        return
    by_sentence = translate_n_best(
        translator, sentences, search, count=arguments.n_best, progress=progress
    )
    for number, found in enumerate(by_sentence, first + 1):
        for hypothesis in found:
            yield f"{number}\t{hypothesis.score:.4f}\t{hypothesis.translation}\n"


@contextlib.contextmanager
def _written(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        # UTF-8 whatever the locale.
        with open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False) as file:
            yield file
        return
    with path.open("w", encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal; at the end one line with the speed, compilation included."""
    console = rich.console.Console(stderr=True)
    begun, done = time.monotonic(), 0
    with rich.progress.Progress(
        *rich.progress.Progress.get_default_columns(),
        "{task.fields[speed]}",
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("translating", total=total, speed="")

        def advance(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(time.monotonic() - begun, 1e-9)
            bar.update(task, advance=count, speed=f"{speed:.1f} sentences/s")

        yield advance
    if done:
        seconds = max(time.monotonic() - begun, 1e-9)
        told = f"{done} sentences in {seconds:.1f} s, {done / seconds:.1f} sentences/s"
        print(f"{told}, compilation included", file=sys.stderr)


if __name__ == "__main__":
    run_command(Arguments, main)
