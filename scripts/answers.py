"""Shows the answers of a trained run of any task, and its attention; see --help."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path

from attention_jax.commands.command_line import OfARun, run_command
from attention_jax.core.checks import check_integer
from attention_jax.reports import plotting
from attention_jax.runs.progress import printable, say
from attention_jax.runs.run_folder import check_output
from attention_jax.tasks.pages import AXES, answers_view, cross_attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments(OfARun):
    """Print the answers of a trained model to some inputs, and draw its attention.

    The step and the seed of the model go to standard error.

    Attributes:
        inputs: what to answer: strings to reverse, sentences to translate, the beginnings of texts;
            by default some examples of the task.
        seed_index: which of the run's seeds answers, from 0.
        beams: partial answers kept at each step of the search; 1 is greedy.
        figure: a .png, .pdf or .svg file; None for `workdir`/figures/answers.png.
        html: also write a page to explore every attention of the model, to this HTML file.
        compare: further run folders, whose attention stands beside that of `workdir` on the page.
        all_steps: the page has a slider through step 0 and all checkpoints that are kept.
    """

    inputs: tuple[str, ...] = ()
    seed_index: int = 0
    beams: int = 1
    figure: Path | None = None
    html: Path | None = None
    compare: tuple[Path, ...] = ()
    all_steps: bool = False

    def __post_init__(self) -> None:
        check_integer("beams", self.beams)
        for text in self.inputs:
            if text != text.encode(errors="replace").decode():
                raise ValueError(f"inputs must be text in UTF-8; got {text!r}")
        if self.html is not None:
            check_output(self.html, ".html", name="html")
        elif self.compare or self.all_steps:
            raise ValueError("compare and all_steps belong to a page, html; got no html")
        if self.figure is not None:
            plotting.check_figure(self.figure)


def main(arguments: Arguments) -> None:
    workdir = arguments.workdir
    run = arguments.run()
    params = run.params_of(arguments.seed_index)
    answers = run.task.answers(params, arguments.inputs, beams=arguments.beams, folder=workdir)
    if arguments.html is not None:  # first, because a run to compare with may be missing
        shown = answers_view(
            run,
            answers,
            seed_index=arguments.seed_index,
            compare=arguments.compare,
            all_steps=arguments.all_steps,
        )
    say(printable(run.describe(arguments.seed_index)), error=True)
    for given, answer, right in answers.texts:
        note = "" if right in (None, answer) else f"   (right would be {right})"
        say(printable(f"{given} -> {answer}{note}"))
    panels = cross_attention(run.task, params, answers.batch, answers.labels)
    tokens = max(max(weights.shape) for weights, _, _ in panels.values())
    size = max(3.1, 0.22 * tokens)
    panels = {textwrap.fill(title, int(8 * size)): panel for title, panel in panels.items()}
    figure = plotting.weight_heatmaps(panels, **AXES, size=size)
    path = arguments.figure or workdir / "figures" / "answers.png"
    say(str(plotting.save(figure, path)))
    if arguments.html is not None:
        say(str(shown.save(arguments.html)))


if __name__ == "__main__":
    run_command(Arguments, main)
