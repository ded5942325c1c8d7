"""Tables of text in Markdown, LaTeX and CSV."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from attention_jax.runs.progress import printable

_LATEX = {letter: f"\\{letter}" for letter in "_%&#${}"} | {
    # Square brackets and a star have a meaning at the beginning of a row.
    **{letter: f"{{{letter}}}" for letter in "[]*"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
# A number that is no part of a word.
_NUMBER = r"(?<![\w.-])(?P<digits>-?\d[\d.]*)(?:e(?P<exponent>[+-]\d+))?(?![\w.-])"


def markdown(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    r"""A table in Markdown, of cells in Markdown; a bar in a cell becomes "\|"."""
    lines = [head, ["---"] * len(head), *rows]
    cells = [[str(cell).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def markdown_text(text: str) -> str:
    r"""Literal text in a cell of `markdown`.

    >>> print(markdown_text("my_scores:Mine, a*b"))
    my\_scores:Mine, a\*b
    """
    return re.sub(r"[\\`*_\[\]<>#~&$]", r"\\\g<0>", printable(text, keep="")).strip()


def latex(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """A table in LaTeX, of cells in LaTeX; it needs no package.

    The first column is aligned to the left, all others to the right.
    """
    first, *lines = (" & ".join(cells) + r" \\" for cells in (head, *rows))
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            f"\\caption{{{caption}}}",
            f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            *(r"\hline", first, r"\hline", *lines, r"\hline"),
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def csv_table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """A table in CSV; the cell of None is empty."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def latex_text(text: str) -> str:
    r"""Literal text in LaTeX, with its powers of ten and minus signs as formulas.

    >>> print(latex_text("my_score: 2.5e-05 at -3 %"))
    my\_score: $2.5 \times 10^{-5}$ at $-3$ \%
    """

    def written(match: re.Match[str]) -> str:
        digits, exponent = match["digits"], match["exponent"]
        if digits is None:
            return _LATEX.get(match[0], match[0])
        power = "" if exponent is None else rf" \times 10^{{{int(exponent)}}}"
        return f"${digits}{power}$" if power or digits.startswith("-") else digits

    return re.sub(rf"{_NUMBER}|.", written, printable(text, keep=""))
