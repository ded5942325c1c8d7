"""The page of all experiments: figures, and every number beside the source's and its bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from attention_jax.reports import html_page
from experiments.experiment import JSON, Expectation, labelled, question, verdicts


def results_page(
    experiments: Mapping[str, ModuleType],
    numbers: Mapping[str, JSON],
    expected: Mapping[str, Sequence[Expectation]],
    folders: Mapping[str, Path],
    *,
    quick: bool,
) -> str:
    """Returns the page as HTML.

    Args:
        experiments: modules by name, in the order of the page.
        numbers: the numbers that each experiment wrote.
        expected: the expectations of each experiment.
        folders: the folder of the figures of each experiment.
        quick: whether the settings were small, so that expectations may be missed.
    """
    parts = [
        html_page.paragraph(
            "Every claim of the sources that can be measured, and the number that was measured."
            " Verdicts: reproduced, the source's number comes out; contradicted, it does not, and"
            " ours lies within the stated bounds; ours, the claim has no source; MISS, the number"
            " is outside its bounds. The last column says where the bounds come from."
        )
    ]
    if quick:
        parts.append(
            html_page.paragraph(
                "Small settings, for a first look: samples are few and trainings short, so that"
                " numbers may miss their bounds."
            )
        )
    parts.append(_summary(experiments, expected))
    for name, experiment in experiments.items():
        parts += _parts(name, experiment, numbers[name], expected[name], folders[name])
    return html_page.page("Experiments on attention", parts)


def _summary(
    experiments: Mapping[str, ModuleType], expected: Mapping[str, Sequence[Expectation]]
) -> str:
    rows = []
    for name, experiment in experiments.items():
        rows.append((name, question(experiment), verdicts(expected[name])))
    return html_page.table(("experiment", "question", "verdicts"), rows)


def _parts(
    name: str,
    experiment: ModuleType,
    numbers: JSON,
    expected: Sequence[Expectation],
    folder: Path,
) -> Iterator[str]:
    yield html_page.heading(name)
    yield html_page.paragraph(question(experiment))
    for label in ("Source", "Command", "Time"):
        text = labelled(experiment, label)
        if label == "Command":
            yield html_page.command(text)
        elif text:
            yield html_page.paragraph(f"{label}: {text}")
    for stem, caption in experiment.CAPTIONS.items():
        path = folder / f"{stem}.png"
        if path.exists():
            yield html_page.image(path.read_bytes(), caption)
    rows = [_row(expectation) for expectation in expected]
    columns = ("claim", "source", "measured", "bounds", "verdict", "where the bounds come from")
    yield html_page.table(columns, rows)
    environment = numbers["environment"]
    versions = ", ".join(f"{name} {environment['packages'][name]}" for name in ("jax", "flax"))
    commit = environment["git_commit"] or "unknown"
    seconds = numbers.get("seconds")
    took = "" if seconds is None else f" in {seconds:.0f} s"
    yield html_page.paragraph(
        f"Measured{took} with {versions} on {environment['device']}, {environment['cpus']} cores,"
        f" commit {commit}."
    )


def _row(expectation: Expectation) -> tuple[str, ...]:
    return (
        expectation.claim,
        expectation.source,
        f"{expectation.measured:.5g}",
        expectation.bounds,
        expectation.verdict,
        expectation.tolerance,
    )
