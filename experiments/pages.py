"""Writes what stands in result files into pages: the generated parts of READMEs, and index.html.

.venv/bin/python -m experiments.pages
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from attention_jax.reports import html_page
from attention_jax.runs.run_folder import write_text
from benchmarks.tables import committed
from experiments import lab
from experiments.lab import Claim, Row, labelled, load, markdown, name_of


def write_pages() -> None:
    """Writes the parts <!-- begin NAME --> ... <!-- end NAME --> of all pages anew.

    NAME is `index`, `misses`, an experiment (its section), NAME.FUNCTION (what that function of the
    experiment returns for the rows), or a table of benchmarks/tables.py. A part
    whose rows do not exist stays as it is.
    """
    for page in pages():
        text = page.read_text()
        written = replaced(text, functools.partial(part_of, folder=page.parent))
        if written != text:
            write_text(page, written)


def pages() -> list[Path]:
    """The Markdown files of the project, of all experiments, of benchmarks and of scripts."""
    root, subjects = lab.FOLDER.parent, [lab.FOLDER / subject for subject in lab.SUBJECTS]
    others = ("scripts", "scripts/device_checks", "benchmarks", "benchmarks/compilation")
    folders = (root, lab.FOLDER, *subjects, *(root / folder for folder in others))
    return [page for folder in folders for page in sorted(folder.glob("*.md"))]


def replaced(text: str, content: Callable[[str], str | None]) -> str:
    """A text with the content of each part replaced; a part stays as it is for None."""

    def part(found: re.Match[str]) -> str:
        new = content(found[1])
        marks = f"<!-- begin {found[1]} -->", f"<!-- end {found[1]} -->"
        return found[0] if new is None else f"{marks[0]}\n{new}\n{marks[1]}"

    return re.sub(r"<!-- begin ([\w.-]+) -->\n.*?<!-- end \1 -->", part, text, flags=re.DOTALL)


def part_of(part: str, folder: Path) -> str | None:
    if part == "index":
        return "\n\n".join(_index(folder))
    if part == "misses":
        return _misses()
    if part in (tables := _benchmark_tables()):
        return tables[part]
    name, _, function = part.partition(".")
    if name not in lab.SUBJECT_OF or (content := lab.content_of(name)) is None:
        return None
    experiment = load(name)
    if function:
        return str(getattr(experiment, function)(content["rows"]))
    return "\n\n".join(_section(experiment, content))


_benchmark_tables = functools.cache(committed)


def _index(folder: Path) -> Iterator[str]:
    for name, subject in lab.SUBJECT_OF.items():
        experiment = load(name)
        path = os.path.relpath(lab.FOLDER / subject, folder)
        question, answer = labelled(experiment), labelled(experiment, "Answer")
        yield f"**[{question}]({path}/README.md#{name})** {answer}"
        for stem, caption in [*experiment.CAPTIONS.items()][:1]:
            yield f'<img src="{path}/{stem}.png" alt="{caption}" width="420">'


def _misses() -> str:
    contents = {name: content for name in lab.SUBJECT_OF if (content := lab.content_of(name))}
    lines = [
        (f"[`{name}`]({lab.SUBJECT_OF[name]}/README.md#{name})", *claim.cells()[:-1])
        for name, claim in missed(contents)
    ]
    return markdown(("experiment", "claim", "source", "measured", "bounds"), lines)


def missed(contents: Mapping[str, Row]) -> list[tuple[str, Claim]]:
    """The claims that result files miss, each with the name of its experiment."""
    return [
        (name, claim)
        for name, content in contents.items()
        for claim in lab.claims_of(load(name), content)
        if claim.verdict == "MISS"
    ]


def _section(experiment: ModuleType, content: Row) -> Iterator[str]:
    """Answer, source, command and origin of the rows; table; figures."""
    name, measured = name_of(experiment), content["environment"]
    commit = measured["git_commit"] or "unknown"
    yield f"**{labelled(experiment)}** {labelled(experiment, 'Answer')}"
    yield f"Source: {labelled(experiment, 'Source')}"
    yield f"```bash\n{labelled(experiment, 'Command')}\n```"
    verdicts = [claim.verdict for claim in lab.claims_of(experiment, content)]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
    yield (
        f"[Rows]({name}.json) of commit {commit[:10]}, jax {measured['packages']['jax']}."
        f" Claims: {counts}."
    )
    yield experiment.table(content["rows"])
    for stem, caption in experiment.CAPTIONS.items():
        yield f"![{caption}]({stem}.png)"


def results_page(
    found: Mapping[str, Row], folders: Mapping[str, Path], left_out: Mapping[str, str]
) -> str:
    """Every figure, and every claim with its bounds, as one HTML page.

    Args:
        found: result files by name, in the order of the page.
        folders: the folder of each one's figures.
        left_out: why an experiment did not run, by name.
    """
    experiments = {name: load(name) for name in found}
    questions = [
        (name, labelled(each), labelled(each, "Answer")) for name, each in experiments.items()
    ]
    parts = [
        html_page.paragraph(
            "Every finding with the bounds that were written before the run. Verdicts: reproduced,"
            " our number agrees with the source; contradicted, it shows the opposite; ours, the"
            " finding has no source; MISS, the number is outside its bounds."
        ),
        html_page.table(("experiment", "question", "answer"), questions),
    ]
    if left_out:
        parts.append(html_page.table(("left out", "reason"), [*left_out.items()]))
    for name, experiment in experiments.items():
        parts += _of_experiment(experiment, found[name], folders[name])
    return html_page.page("Experiments on attention", parts)


def _of_experiment(experiment: ModuleType, content: Row, folder: Path) -> Iterator[str]:
    yield html_page.heading(name_of(experiment))
    yield html_page.paragraph(labelled(experiment))
    for label in ("Answer", "Source", "Command"):
        yield html_page.paragraph(f"{label}: {labelled(experiment, label)}")
    for stem, caption in experiment.CAPTIONS.items():
        if (path := folder / f"{stem}.png").exists():
            yield html_page.image(path.read_bytes(), caption)
    head = ("claim", "source", "measured", "bounds", "verdict")
    yield html_page.table(head, [claim.cells() for claim in lab.claims_of(experiment, content)])


if __name__ == "__main__":
    write_pages()
