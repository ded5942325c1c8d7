"""The parts of READMEs that are generated from result files.

A part stands between two comments of the README, which name it:

    <!-- begin index -->                        the table of all experiments
    <!-- begin geometry -->                     the section of an experiment
    <!-- begin reversal_comparison.table -->    what that function of the experiment returns

each ended by <!-- end ... --> with the same name. `write` writes all parts anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from attention_jax.runs.run_folder import write_text
from experiments import catalogue
from experiments.experiment import (
    JSON,
    Expectation,
    labelled,
    numbers_path,
    question,
    verdicts,
)

_PART = re.compile(r"<!-- begin ([\w.]+) -->\n.*?<!-- end \1 -->", re.DOTALL)


def readmes() -> list[Path]:
    """Returns the READMEs that have generated parts."""
    project = catalogue.FOLDER.parent
    folders = [project, project / "scripts", catalogue.FOLDER]
    folders += [
        catalogue.FOLDER / subject for subject in dict.fromkeys(catalogue.SUBJECT_OF.values())
    ]
    return [path for folder in folders if (path := folder / "README.md").exists()]


def write() -> None:
    """Writes the generated parts of all READMEs anew."""
    for path in readmes():
        text = path.read_text()
        if (generated := regenerated(text, path.parent)) != text:
            write_text(path, generated)


def regenerated(text: str, folder: Path) -> str:
    """Returns the text of a README in `folder` with all its parts generated anew.

    A part whose numbers do not exist stays as it is.
    """

    return replaced(text, lambda name: _content(name, folder))


def replaced(text: str, content_of: Callable[[str], str | None]) -> str:
    """Returns a text with the content of each part replaced; a part stays as it is for None."""

    def part(found: re.Match[str]) -> str:
        name, content = found[1], content_of(found[1])
        return (
            found[0]
            if content is None
            else f"<!-- begin {name} -->\n{content}\n<!-- end {name} -->"
        )

    return _PART.sub(part, text)


def _content(part: str, folder: Path) -> str | None:
    if part == "index":
        return _index(folder)
    name, _, function = part.partition(".")
    if name not in catalogue.SUBJECT_OF or (numbers := _numbers(name)) is None:
        return None
    if function:
        return str(getattr(catalogue.load(name), function)(numbers))
    return "\n".join(_section(name, numbers))


def _numbers(name: str) -> JSON | None:
    path = numbers_path(catalogue.folder_of(name), name)
    content: JSON | None = json.loads(path.read_text()) if path.exists() else None
    return content


def _index(folder: Path) -> str:
    rows = ["| experiment | question | claims |", "| --- | --- | --- |"]
    for name in catalogue.SUBJECT_OF:
        experiment, numbers = catalogue.load(name), _numbers(name)
        page = os.path.relpath(catalogue.folder_of(name), folder)
        claims = "not run yet" if numbers is None else verdicts(experiment.expectations(numbers))
        first = f"[`{name}`]({page}/{name}.py)"
        rows.append(f"| {first} | {question(experiment)} | {claims} |")
    return "\n".join(rows)


def _section(name: str, numbers: JSON) -> Iterator[str]:
    experiment = catalogue.load(name)
    yield f"## {name}\n"
    yield f"**{question(experiment)}**\n"
    yield f"Source: {labelled(experiment, 'Source')}\n"
    yield f"```bash\n{labelled(experiment, 'Command')}\n```\n"
    yield f"{_measured(name, numbers)} {labelled(experiment, 'Time')}\n"
    yield f"{experiment.report(numbers)}\n"
    for stem, caption in experiment.CAPTIONS.items():
        if (catalogue.folder_of(name) / f"{stem}.png").exists():
            yield f"![{caption}]({stem}.png)\n"
    checks = experiment.expectations(numbers)
    yield f"<details><summary>Claims: {verdicts(checks)}</summary>\n"
    yield "| claim | source | measured | bounds | verdict |\n| --- | --- | --- | --- | --- |"
    yield from map(_row, checks)
    yield "\n</details>"


def _measured(name: str, numbers: JSON) -> str:
    """Which run the numbers are of."""
    environment = numbers["environment"]
    commit = environment["git_commit"] or "an unknown commit"
    words = [f"[Numbers]({name}.json): {environment['cpus']} CPU cores"]
    if "seconds" in numbers:
        words.append(f"{numbers['seconds']:.0f} s")
    words += [f"jax {environment['packages']['jax']}", f"commit {commit[:10]}"]
    if commit.endswith("-dirty"):
        words.append("with changes that were not committed")
    return f"{', '.join(words)}."


def _row(check: Expectation) -> str:
    cells = (check.claim, check.source, f"{check.measured:.5g}", check.bounds, check.verdict)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
