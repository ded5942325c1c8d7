"""The page as HTML: `page.html` with the data as JSON, one style sheet and one script."""

import base64
import hashlib
import html
import json
import string
from importlib import resources
from typing import Any

# The files of the script, in the order in which they are joined: a file uses the classes and
# constants of earlier files only, and the last one makes the page.
SCRIPT = (
    "data.js",
    "drawing.js",
    "state.js",
    "search.js",
    "moving.js",
    "lines.js",
    "matrix.js",
    "bars.js",
    "panel.js",
    "controls.js",
    "start.js",
)


def document(data: dict[str, Any]) -> str:
    """The whole document.

    A security policy in it lets the browser run this one script and load nothing.

    Args:
        data: as the README of this folder describes it.
    """
    script = "\n".join(_file_text("script", name) for name in SCRIPT)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return string.Template(_file_text("page.html")).substitute(
        title=html.escape(data["title"]),
        style=_file_text("page.css"),
        data=_json_in_script(data),
        script=script,
        digest=digest,
    )


def _json_in_script(data: dict[str, Any]) -> str:
    """JSON without `<`, `>` and `&`, so that no text in it can end the script or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _file_text(*path: str) -> str:
    folder = resources.files("attention_jax.analysis.attention_page")
    return folder.joinpath(*path).read_text(encoding="utf-8")
