"""Docstrings of this project as Markdown, for the pages of the reference.

Docstrings are written for the terminal: formulas are indented, shapes are written [*B, T, S], and
examples are doctests. A reader of Markdown would take the stars for emphasis and the brackets for
links.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

# Sections in which each entry is a name, a colon and a description; `Returns` is plain text.
LISTS = ("Args", "Attributes", "Raises")
_HEADING = re.compile(rf"({'|'.join(LISTS)}|Returns):")
# The formula with which a score begins, up to its explanation.
_FORMULA = re.compile(r"e\(.*?\) = .*?(?=: |, (?:by|or|with) |\.?$)", re.MULTILINE)


def docstring_markdown(
    docstring: str, imports: Callable[[str], list[str]] = lambda example: []
) -> str:
    r"""A docstring, without its margin, as Markdown.

    Args:
        docstring: the text.
        imports: returns the import statements that an example lacks.

    >>> print(docstring_markdown("Weights [*B, T].\n\n    w = 2 * x"))
    Weights `[*B, T]`.
    <BLANKLINE>
    ```text
    w = 2 * x
    ```
    """
    blocks: list[str] = []
    for kind, lines in _parts(docstring):
        text = textwrap.dedent("\n".join(lines)).strip()
        if kind == "example":
            text = "\n".join([f">>> {line}" for line in imports(text)] + [text])
            blocks += ["**Example**", f"```pycon\n{text}\n```"]
        elif kind == "code":
            blocks.append(f"```{'python' if 'def ' in text else 'text'}\n{text}\n```")
        elif kind == "text":
            if not blocks:
                text = _FORMULA.sub(lambda match: f"`{match[0]}`", text, count=1)
            label = re.match(r"(Source|Params|Raises): ", text)
            heading = f"**{label[1]}:** " if label else ""
            blocks.append(heading + _prose(text[label.end() :] if label else text))
        elif kind in LISTS:
            blocks += [f"**{kind}**", "\n".join(_entry(entry) for entry in _entries(lines))]
        else:
            blocks += [f"**{kind}**", _prose(text)]
    return "\n\n".join(blocks)


def _parts(docstring: str) -> list[tuple[str, list[str]]]:
    """The parts of a docstring: ("text", "code", "example" or the heading of a section, lines)."""
    parts: list[tuple[str, list[str]]] = []
    kind = ""  # of the part that the next line may continue
    for line in docstring.splitlines():
        if not line.strip():
            if kind not in ("", "text"):
                parts[-1][1].append("")
            else:
                kind = ""
            continue
        heading = _HEADING.fullmatch(line)
        indented = line.startswith(" ")
        if heading:
            new = heading[1]
        elif line.startswith(">>>"):
            new = "example"
        elif kind == "example" and parts[-1][1][-1]:
            new = "example"  # what the example prints, up to a blank line
        elif indented and kind:
            new = kind  # a formula goes on, or an entry of a section, or an entry of a list
        else:
            new = "code" if indented else "text"
        if new != kind or heading:
            parts.append((new, []))
        kind = new
        if not heading:
            parts[-1][1].append(line)
    return parts


def _entries(lines: list[str]) -> list[str]:
    """The entries of a section, each on one line."""
    entries: list[str] = []
    for line in textwrap.dedent("\n".join(lines)).strip().splitlines():
        if line.startswith(" ") or not line:
            entries[-1] += f" {line.strip()}"
        else:
            entries.append(line)
    return entries


def _entry(entry: str) -> str:
    name, colon, description = entry.partition(": ")
    return f"- **{name}:** {_prose(description)}" if colon else f"- {_prose(entry)}"


def _prose(text: str) -> str:
    """Text in which shapes are code and Markdown finds nothing else to interpret.

    >>> _prose("float [*B, T], axes *B, 0 <= x < 1, `f(*x)`")
    'float `[*B, T]`, axes `*B`, 0 &lt;= x &lt; 1, `f(*x)`'
    """
    pieces = re.split(r"(`[^`]+`|\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|(?<!\w)\*[A-Z]\w*)", text)
    for index, piece in enumerate(pieces):
        if index % 2:
            pieces[index] = piece if piece.startswith("`") else f"`{' '.join(piece.split())}`"
        else:
            escaped = piece.replace("\\", r"\\").replace("*", r"\*").replace("<", "&lt;")
            pieces[index] = re.sub(r"^([#+>|])", r"\\\1", escaped, flags=re.MULTILINE)
    return "".join(pieces)
