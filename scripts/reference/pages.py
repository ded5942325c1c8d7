"""The pages of the API reference and the public names on each page."""

from __future__ import annotations

import ast
import importlib
import inspect
from types import GenericAlias, ModuleType

# The pages by the heading in the navigation under which they stand. Each is one module.
LIBRARY_PAGES = {
    "The library": (
        "attention_jax",
        "attention_jax.nn",
        "attention_jax.analysis",
        "attention_jax.functional.interop",
        "attention_jax.scores",
        "attention_jax.implementations",
    ),
}
PROGRAM_PAGES = {
    "Training and tasks": (
        "attention_jax.training.run",
        "attention_jax.training.task",
        "attention_jax.training.loop",
        "attention_jax.training.losses",
        "attention_jax.training.metrics",
        "attention_jax.training.sharding",
        "attention_jax.tasks.sequences",
        "attention_jax.tasks.evaluation",
        "attention_jax.tasks.reversal",
        "attention_jax.tasks.translation.task",
        "attention_jax.tasks.translation.translate",
        "attention_jax.tasks.vocabulary",
    ),
    "Runs and reports": (
        "attention_jax.runs.run_folder",
        "attention_jax.runs.metrics_file",
        "attention_jax.runs.checkpoints",
        "attention_jax.reports.plotting",
    ),
}
PAGES = LIBRARY_PAGES | PROGRAM_PAGES
Links = dict[tuple[str, int], str]  # the full public name of each object, by its name and identity

# Modules whose `__all__` also serves the files above them in the library.
_NAMES = {
    "attention_jax.scores": (
        "DEFAULT_SCORE",
        "FunctionScore",
        "KeyLike",
        "Params",
        "ProjectedKeys",
        "ScoreLike",
        "TileCost",
        "WrappedScore",
    ),
}


def public_names(module: ModuleType) -> list[str]:
    """The public names on the page of a module.

    They are the names above or in `__all__`; for a module without either, the functions and classes
    that it defines and its constants in capitals, without short names such as JSON. Modules in
    `__all__` have their own pages.
    """
    if module.__name__ in _NAMES:
        return list(_NAMES[module.__name__])
    names = getattr(module, "__all__", None)
    if names is None:
        body = ast.parse(inspect.getsource(module)).body
        constants = [name for node in body for name in assigned_names(node) if name.isupper()]
        defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        names = [name for name in constants + defined if not name.startswith("_")]
        names = [name for name in names if not isinstance(getattr(module, name), GenericAlias)]
    return [name for name in names if not isinstance(getattr(module, name), ModuleType)]


def assigned_names(node: ast.stmt) -> list[str]:
    """The names that a statement assigns or annotates."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    leaves = [leaf for target in targets for leaf in getattr(target, "elts", [target])]
    return [leaf.id for leaf in leaves if isinstance(leaf, ast.Name)]


def public_links() -> Links:
    """The full public name of each object; the first page that has it counts."""
    links: Links = {}
    for page in (page for pages in PAGES.values() for page in pages):
        module = importlib.import_module(page)
        for name in public_names(module):
            links.setdefault((name, id(getattr(module, name))), f"{page}.{name}")
    return links
