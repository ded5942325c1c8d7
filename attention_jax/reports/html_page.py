"""A self-contained HTML page of headings, paragraphs, tables and figures: one file.

It has no script. A page that needs one is embedded in a frame.
"""

import base64
import html
import string
from collections.abc import Sequence
from importlib import resources

from matplotlib.figure import Figure

from attention_jax.reports import plotting


def page(title: str, parts: Sequence[str]) -> str:
    """The whole document; the functions below make its `parts`."""
    template = resources.files("attention_jax.reports").joinpath("page.html")
    text = string.Template(template.read_text(encoding="utf-8"))
    return text.substitute(title=html.escape(title), body="\n".join(parts))


def heading(text: str) -> str:
    """A heading below the title."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Plain text."""
    return f"<p>{html.escape(text)}</p>"


def code(text: str) -> str:
    """A command line."""
    return f"<p><code>{html.escape(text)}</code></p>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text; cells that contain numbers are right-aligned."""
    head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in columns)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def figure(drawn: Figure, caption: str) -> str:
    """A figure embedded in the page; its caption is also its alternative text."""
    data, text = base64.b64encode(plotting.png(drawn)).decode(), html.escape(caption)
    return (
        f'<figure><img alt="{text}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def frame(element: str, caption: str) -> str:
    """Another page in the page.

    Args:
        element: its `iframe`, which is HTML already.
        caption: plain text.
    """
    return f"<figure>{element}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _cell(text: str) -> str:
    number = text.replace("−", "-").split(" ± ")[0].rstrip("%").strip()
    try:
        float(number)
    except ValueError:
        return f"<td>{html.escape(text)}</td>"
    return f'<td class="number">{html.escape(text)}</td>'
