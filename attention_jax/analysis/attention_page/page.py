"""The page as HTML: its data as JSON, with one style sheet and one script, all in one file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources
from typing import Any

# The files of the script, in the order in which they are joined: a file uses the classes and
# constants of earlier files only, and the last one makes the page.
SCRIPT = (
    "data.js",
    "drawing.js",
    "state.js",
    "moving.js",
    "lines.js",
    "matrix.js",
    "bars.js",
    "panel.js",
    "controls.js",
    "start.js",
)


def page(data: dict[str, Any]) -> str:
    """The whole document.

    A security policy in it lets the browser run this one script and load nothing.

    Args:
        data: as the README of this folder describes it.
    """
    style = _text_of("page.css")
    script = "\n".join(_text_of("script", name) for name in SCRIPT)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_digest(script)}'"
    title = html.escape(data["title"])
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        '<div class="controls" id="controls"></div>\n'
        '<p class="hint">Point at a token or a pair; a click or a tap pins it, Escape lets it go.'
        " Tab reaches the views, arrow keys move in them, Enter pins.</p>\n"
        '<div class="panels" id="panels"></div>\n'
        f'<script type="application/json" id="data">{_json_in_script(data)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def frame(data: dict[str, Any], height: int) -> str:
    """The page inside another page, such as a notebook, without access to it.

    Args:
        data: as for `page`.
        height: of the frame, in pixels.
    """
    return (
        f'<iframe sandbox="allow-scripts" title="{html.escape(data["title"])}"'
        f' srcdoc="{html.escape(page(data))}"'
        f' style="width: 100%; height: {height}px; border: 1px solid #999; resize: vertical;">'
        "</iframe>"
    )


def _json_in_script(data: dict[str, Any]) -> str:
    """JSON without `<`, `>` and `&`, so that no text in it can end the script or open a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _text_of(*path: str) -> str:
    folder = resources.files("attention_jax.analysis.attention_page")
    return folder.joinpath(*path).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    """The script's hash, as a security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"
