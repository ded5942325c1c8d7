"""All experiments on one page: figures, numbers beside the source's, what is as expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from experiment import JSON, Expectation

from attention_jax.reports import html_page


def results_page(
    experiments: Mapping[str, ModuleType],
    numbers: Mapping[str, JSON],
    expected: Mapping[str, Sequence[Expectation]],
    results: Path,
    *,
    quick: bool,
) -> str:
    """The page.

    Args:
        experiments: modules by name, in the order of the page.
        numbers: what each wrote.
        expected: what each says of its numbers.
        results: where the figures are.
        quick: whether settings were small, and expectations with them not to be taken at their
            word.
    """
    parts = [
        html_page.paragraph(
            "Every claim of the sources that can be measured, and what came out. A number is as"
            " expected if it lies within the bounds; where they come from stands beside them."
        )
    ]
    if quick:
        parts.append(
            html_page.paragraph(
                "Small settings, for a look: samples are few and trainings short, so that"
                " numbers may miss their bounds."
            )
        )
    parts.append(_summary(experiments, expected))
    for name, experiment in experiments.items():
        parts += _parts(name, experiment, numbers[name], expected[name], results)
    return html_page.page("Experiments on attention", parts)


def _summary(
    experiments: Mapping[str, ModuleType], expected: Mapping[str, Sequence[Expectation]]
) -> str:
    rows = []
    for name, experiment in experiments.items():
        found = expected[name]
        met = sum(expectation.met for expectation in found)
        rows.append((name, question(experiment), f"{met} of {len(found)}"))
    return html_page.table(("experiment", "question", "as expected"), rows)


def _parts(
    name: str,
    experiment: ModuleType,
    numbers: JSON,
    expected: Sequence[Expectation],
    results: Path,
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
        path = results / f"{stem}.png"
        if path.exists():
            yield html_page.image(path.read_bytes(), caption)
    rows = [_row(expectation) for expectation in expected]
    columns = ("claim", "source", "measured", "bounds", "as expected", "where the bounds come from")
    yield html_page.table(columns, rows)
    where = numbers["environment"]
    versions = ", ".join(f"{name} {where['packages'][name]}" for name in ("jax", "flax"))
    yield html_page.paragraph(f"Measured with {versions} on {where['device']}.")


def _row(expectation: Expectation) -> tuple[str, ...]:
    return (
        expectation.claim,
        expectation.source,
        f"{expectation.measured:.5g}",
        expectation.bounds,
        "yes" if expectation.met else "NO",
        expectation.tolerance,
    )


def question(experiment: ModuleType) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(experiment) or "").partition("\n")[0]


def labelled(experiment: ModuleType, label: str) -> str:
    """What its docstring says under "Source:", "Command:", "Time:" or "Expected:"."""
    pattern = rf"^{label}:\s+(.*?)(?=^\S|\Z)"
    match = re.search(pattern, inspect.getdoc(experiment) or "", re.MULTILINE | re.DOTALL)
    return " ".join(match.group(1).split()) if match else ""
