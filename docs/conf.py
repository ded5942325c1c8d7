"""Settings of the site, which `scripts/docs` builds; its source is the whole repository."""

from __future__ import annotations

import inspect
import posixpath
import re
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import attention_jax

project = "attention_jax"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "**/*.md", "docs/api/*.rst", "experiments/notebooks/*.ipynb"]
exclude_patterns = [".*", "build", "runs", "data"]

myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "html_image"]
nb_execution_mode = "off"

smartquotes = False
default_role = "py:obj"
autodoc_default_options = {"members": True, "special-members": "__call__"}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 88
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature has them
napoleon_custom_sections = [("Class variables", "params_style")]

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False
html_math_renderer = "mathml"

# The pages below the front page. Below another README are the pages of its folder that it links.
FRONT = {
    "experiments/bench/FINDINGS": "What comes out",
    "docs/guide/README": "Guide",
    "attention_jax/runs/README": "Runs",
    "scripts/README": "Command lines",
    "benchmarks/README": "Benchmarks",
    "experiments/notebooks/README": "Notebooks",
    "experiments/README": "Experiments",
    "experiments/bench/README": "Leaderboard",
    "experiments/SOURCES": "Sources",
    "experiments/MISSES": "Misses",
    "findings/README": "Findings",
    "docs/api/README": "API",
    "attention_jax/README": "Rooms",
    "CONTRIBUTING": "Contributing",
    "tests/README": "Tests",
    "CHANGELOG": "Changes",
}

# The parts of a docstring that are more than prose.
_PART = re.compile(
    r"(?P<kept>^>>> (?:.+\n?)+|`[\w.]+`|\*[a-z][^*\n]*\*)"
    r"|(?<=\n\n)(?P<formula> {4}.+(?:\n+ {4}.+)*)"
    r"|`(?P<code>[^`]+)`"
    r"|(?P<shape>\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|(?<![\w*])\*[A-Z]\w*)"
    r"|(?P<mark>[*|]|_\b)",
    flags=re.MULTILINE,
)


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-skip-member", is_skipped)
    app.connect("autodoc-process-docstring", process_docstring, priority=400)  # before napoleon
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))


def add_contents(_app: Any, page: str, source: list[str]) -> None:
    """Adds the pages below a README to it, for the side bar."""
    folder, name = posixpath.split(page)
    if name != "README":
        return
    below = [f"{title} </{other}>" for other, title in FRONT.items()]
    if page != root_doc:
        links = re.findall(r"\]\(([^.:)#][^:)#]*)\.(?:md|ipynb|rst)[)#]", source[0])
        below = [link for link in dict.fromkeys(links) if posixpath.join(folder, link) not in FRONT]
    source[0] += "\n\n```{toctree}\n:hidden:\n\n" + "\n".join(below) + "\n```\n"


def write_formula(translator: Any, node: Any) -> None:
    """Formulas of notebooks as MathML, which browsers draw without a network."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def is_skipped(app: Any, kind: str, name: str, value: Any, *_: Any) -> bool | None:
    """Skips foreign classes, names that another page has, and fields that their class shows."""
    is_foreign = inspect.isclass(value) and not value.__module__.startswith(project)
    is_first = app.env.docname == f"docs/api/{project}"
    is_known = kind == "module" and not is_first and getattr(attention_jax, name, None) is value
    is_field = "Alias for field" in (getattr(value, "__doc__", "") or "")
    return is_foreign or is_known or is_field or None


def process_docstring(_app: Any, kind: str, _name: str, value: Any, _: Any, lines: Any) -> None:
    """Adds the comments beside the fields of a class, and makes all of it reStructuredText."""
    if kind == "class":
        comments = re.findall(r"^ *(\w+): [^#\n]*  # (.+)", inspect.getsource(value), re.MULTILINE)
        fields = [f"    {name}: {text}" for name, text in comments if name in value.__annotations__]
        lines += ["", "Attributes:", *fields] if fields else []
    lines[:] = as_rst("\n".join(lines)).splitlines()


def as_rst(docstring: str) -> str:
    """A docstring as reStructuredText: indented blocks stay as they are, and shapes are code."""
    text = re.sub(r"^Source: .*(?:\n {4}.+)+", _dedented, docstring, flags=re.MULTILINE)
    return _PART.sub(_as_rst, text)


def _dedented(found: re.Match[str]) -> str:
    return re.sub(r"\n +", "\n", found[0])


def _as_rst(found: re.Match[str]) -> str:
    kind = found.lastgroup
    if kind in ("code", "shape"):
        return f"``{' '.join(found[kind].split())}``"
    return {"kept": "", "formula": ".. code-block:: text\n\n", "mark": "\\"}[kind] + found[0]
