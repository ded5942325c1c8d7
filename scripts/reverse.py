"""Reverses words with a trained run and shows the attention; see --help."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import tyro
from command_line import run_command

from attention_jax.analysis.attention_page.view import check_page_file
from attention_jax.reports import plotting
from attention_jax.runs.checkpoints import StepName
from attention_jax.tasks.reversal.attention_view import words_view
from attention_jax.tasks.reversal.definition import REVERSAL
from attention_jax.tasks.reversal.evaluation import LETTER_AXES, check_beams, reverse
from attention_jax.training.run import load_run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Reverse words with a trained run; print the answers and draw the attention as a PNG.

    Attributes:
        words: lower-case words.
        workdir: a run folder made by scripts/train.py.
        step: the newest good checkpoint, the best (see --keep-best of scripts/train.py), or a step
            that is kept.
        seed_index: which of the run's seeds answers, from 0.
        beams: partial answers kept at each step of the search; 1 is greedy.
        figure: the PNG file; None for `workdir`/figures/reverse.png.
        html: also write a page to explore every attention of the model, to this HTML file.
        compare: further run folders, whose attention stands beside that of `workdir` on the page.
        all_steps: the page has a slider through step 0 and all checkpoints that are kept.
    """

    words: tyro.conf.Positional[tuple[str, ...]]
    workdir: Path
    step: StepName = "newest"
    seed_index: int = 0
    beams: int = 1
    figure: Path | None = None
    html: Path | None = None
    compare: tuple[Path, ...] = ()
    all_steps: bool = False

    def __post_init__(self) -> None:
        check_beams(self.beams)
        if self.html is not None:
            check_page_file(self.html)
        elif self.compare or self.all_steps:
            raise ValueError("compare and all_steps belong to a page, html; got no html")
        if self.figure is not None:
            plotting.check_png(self.figure)


def main(arguments: Arguments) -> None:
    trained = load_run(REVERSAL, arguments.workdir, arguments.step)
    config = trained.config
    panels = {}
    answers = reverse(
        trained, arguments.words, seed_index=arguments.seed_index, beams=arguments.beams
    )
    for answer in answers:
        right = answer.answer == answer.word[::-1]
        note = "" if right else f"   (right would be {answer.word[::-1]})"
        if not right and not config.min_length <= len(answer.word) <= config.max_length:
            note += f", trained on lengths {config.min_length}-{config.max_length}"
        print(f"{answer.word} -> {answer.answer}{note}")
        panels[answer.word] = (np.asarray(answer.weights), answer.row_labels, answer.column_labels)
    if arguments.html is not None:  # first, because a run to compare with may be missing
        shown = words_view(
            trained,
            answers,
            seed_index=arguments.seed_index,
            compare=arguments.compare,
            all_steps=arguments.all_steps,
        )
    figure = plotting.weight_heatmaps(panels, **LETTER_AXES)
    path = arguments.figure or arguments.workdir / "figures" / "reverse.png"
    try:
        print(plotting.save(figure, path))
    except OSError as error:
        raise ValueError(f"figure {path} cannot be written: {error.strerror}") from error
    if arguments.html is not None:
        print(shown.save(arguments.html))


if __name__ == "__main__":
    run_command(Arguments, main)
