"""The imports that an example needs outside of the module in which it is written."""

from __future__ import annotations

import ast
import builtins
import doctest
from types import ModuleType
from typing import Any

from reference.pages import Links


def imports_of(example: str, written_in: dict[str, Any], links: Links) -> list[str]:
    """Returns the import statements for the names that a doctest takes from its module.

    Args:
        example: the doctest.
        written_in: the names of the module in which it is written.
        links: the public names, which are imported from their pages.
    """
    source = "".join(part.source for part in doctest.DocTestParser().get_examples(example))
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names -= {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    names -= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names -= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names -= {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    modules: list[str] = []
    members: dict[str, list[str]] = {}
    for name in sorted(names & written_in.keys() - vars(builtins).keys()):
        value = written_in[name]
        if isinstance(value, ModuleType) and value.__name__ != f"flax.{name}":
            is_renamed = value.__name__ != name
            modules.append(f"import {value.__name__}" + f" as {name}" * is_renamed)
        else:
            public = links.get((name, id(value)), "").rpartition(".")[0]
            defined_in = getattr(value, "__module__", None) or written_in["__name__"]
            module = "flax" if isinstance(value, ModuleType) else public or defined_in
            members.setdefault(module, []).append(name)
    return modules + [f"from {module} import {', '.join(members[module])}" for module in members]
