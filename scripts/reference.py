"""Builds the API reference with pdoc; see --help. `scripts/docs` installs what it needs first."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

from attention_jax.commands.command_line import run_command
from attention_jax.core.checks import optional_package
from attention_jax.runs.progress import say

try:
    import pdoc
    import pdoc.doc_ast
    import pdoc.docstrings

    _walk_tree = pdoc.doc_ast.walk_tree
except ImportError:  # `main` says how to install it
    pass

LIBRARY = ("nn", "analysis", "functional.interop", "scores", "scores.literature", "implementations")
PROGRAM = {
    "training": ("run", "export", "task", "loop", "losses", "metrics", "sharding"),
    "tasks": ("sequences", "evaluation", "reversal", "vocabulary"),
    "tasks.translation": ("task", "translate"),
    "runs": ("run_folder", "metrics_file", "loggers", "checkpoints"),
    "reports": ("plotting",),
}
LIBRARY_PAGES = ("attention_jax", *(f"attention_jax.{name}" for name in LIBRARY))
PROGRAM_PAGES = tuple(
    f"attention_jax.{folder}.{name}" for folder, names in PROGRAM.items() for name in names
)

# What stays as it is (examples, code, formulas), or else a shape: [*B, T, D] or *B.
_SHAPE = re.compile(
    r"(^>>> (?:.+\n?)+|^ {4,}.+|`[^`]+`)"
    r"|(\[[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\]|(?<![\w*])\*[A-Z]\w*)",
    flags=re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Build the API reference: an HTML page per module, with a search, which need no network.

    Attributes:
        out: the folder of the pages; made if missing.
    """

    out: Path = Path("build/docs")


def main(arguments: Arguments) -> None:
    pdoc_modules = optional_package("pdoc", "the API reference", extra="docs")
    pdoc_modules.docstrings.convert = markdown
    pdoc_modules.doc_ast.walk_tree = with_comments
    # Annotations stay as they are written; pages are named that pdoc finds below others too.
    warnings.filterwarnings("ignore", category=UserWarning, module="pdoc")
    pages = (*LIBRARY_PAGES, *PROGRAM_PAGES)
    pdoc.pdoc(*pages, f"!(?!({'|'.join(pages)})$)", output_directory=arguments.out)
    say(f"The API reference: {arguments.out / 'index.html'}")


def markdown(docstring: str, docformat: str = "", source_file: Path | None = None) -> str:
    """A docstring as Markdown, with shapes as code: their stars are no emphasis.

    >>> markdown("float [*B, T] for axes *B")
    'float `[*B, T]` for axes `*B`'
    """
    text = pdoc.docstrings.google(docstring)
    return _SHAPE.sub(lambda found: found[1] or f"`{' '.join(found[2].split())}`", text)


def with_comments(module_or_class: Any) -> pdoc.doc_ast.AstInfo:
    """What pdoc reads of a class or module, with the comments beside fields as their docstrings."""
    info = _walk_tree(module_or_class)
    source = pdoc.doc_ast.get_source(module_or_class)
    comments = re.findall(r"^ *(\w+): [^#\n]*  # (.+)", source, flags=re.MULTILINE)
    return dataclasses.replace(info, var_docstrings={**dict(comments), **info.var_docstrings})


if __name__ == "__main__":
    run_command(Arguments, main)
