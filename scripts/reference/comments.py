"""The comments that describe the variables of modules and the fields of classes."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import sys
import tokenize
from typing import Any

from reference.pages import assigned_names


def defining_module(module: Any, name: str) -> Any:
    """The module that assigns a variable, which `module` may have imported from it."""
    value = vars(module)[name]
    library = module.__name__.partition(".")[0]
    for module_name, other in sorted(sys.modules.items()):
        if (
            module_name.startswith(library)
            and vars(other).get(name, library) is value
            and name in assignments(inspect.getsource(other))
        ):
            return other
    return module


def variable_comments(owner: Any) -> dict[str, str]:
    """The comments beside the variables of a module or class, its base classes included.

    A comment stands at the end of the variable's line, or on the lines above it.
    """
    comments: dict[str, str] = {}
    for namespace in reversed(getattr(owner, "__mro__", [owner])):
        if getattr(namespace, "__module__", namespace.__name__).startswith("attention_jax"):
            comments |= comments_of(inspect.getsource(namespace))
    return comments


@functools.cache
def comments_of(source: str) -> dict[str, str]:
    source_lines = source.splitlines()
    comment_at = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# ---")
    }
    comments = {}
    for name, node in assignments(source).items():
        above: list[str] = []
        line = node.lineno - 1
        while line in comment_at and source_lines[line - 1].lstrip().startswith("#"):
            above.insert(0, comment_at[line])
            line -= 1
        comment = comment_at.get(node.end_lineno or 0) or " ".join(above)
        if comment and "noqa" not in comment:
            comments[name] = comment[0].upper() + comment[1:]
    return comments


@functools.cache
def assignments(source: str) -> dict[str, Any]:
    """The statements of a module or class that assign or annotate a variable, by its name."""
    body = ast.parse(source).body
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        body = body[0].body
    return {name: node for node in body for name in assigned_names(node)}
