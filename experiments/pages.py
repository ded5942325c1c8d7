"""Writes what stands in result files into pages: the generated parts of READMEs.

.venv/bin/python -m experiments.pages
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from attention_jax.runs.run_folder import write_text
from benchmarks.tables import committed
from experiments import lab
from experiments.lab import Claim, Row, labelled, load, markdown, name_of

CLAIM = ("claim", "source", "measured", "bounds", "verdict")  # the columns of `Claim.cells`


def write_pages() -> None:
    """Writes the parts <!-- begin NAME --> ... <!-- end NAME --> of all pages anew.

    NAME is `index`, `misses`, an experiment (its section), NAME.FUNCTION (what that function of the
    experiment returns for the rows), or a table of benchmarks/tables.py. A part
    whose rows do not exist stays as it is.
    """
    for page in pages():
        text = page.read_text(encoding="utf-8")
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
    return "\n\n".join(section(experiment, content))


_benchmark_tables = functools.cache(committed)


def _index(folder: Path) -> Iterator[str]:
    for name, subject in lab.SUBJECT_OF.items():
        experiment = load(name)
        path = Path(os.path.relpath(lab.FOLDER / subject, folder)).as_posix()
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
    return markdown(("experiment", *CLAIM[:-1]), lines)


def missed(contents: Mapping[str, Row]) -> list[tuple[str, Claim]]:
    """The claims that result files miss, each with the name of its experiment."""
    return [
        (name, claim)
        for name, content in contents.items()
        for claim in lab.claims_of(load(name), content)
        if claim.verdict == "MISS"
    ]


def section(experiment: ModuleType, content: Row) -> Iterator[str]:
    """Answer, source, command and origin of the rows; claims; table; figures."""
    name, measured = name_of(experiment), content["environment"]
    commit = measured["git_commit"] or "unknown"
    yield f"**{labelled(experiment)}** {labelled(experiment, 'Answer')}"
    yield f"Source: {labelled(experiment, 'Source')}"
    yield f"```bash\n{labelled(experiment, 'Command')}\n```"
    yield f"[Rows]({name}.json) of commit {commit[:10]}, jax {measured['packages']['jax']}."
    if claims := lab.claims_of(experiment, content):
        verdicts = [claim.verdict for claim in claims]
        counts = ", ".join(f"{verdicts.count(each)} {each}" for each in dict.fromkeys(verdicts))
        yield f"<details><summary>Claims: {counts}</summary>"
        yield markdown(CLAIM, [claim.cells() for claim in claims])
        yield "</details>"
    yield experiment.table(content["rows"])
    for stem, caption in experiment.CAPTIONS.items():
        yield f"![{caption}]({stem}.png)"


if __name__ == "__main__":
    write_pages()
