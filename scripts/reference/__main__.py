"""Builds the API reference with pdoc; `scripts/docs` runs it and installs what it needs.

pdoc imports the modules of `pages.py` and renders one HTML page for each, with every public name,
its signature, its docstring and its source. This file adapts three things before the rendering:

- Docstrings are written for the terminal; `docstrings.py` turns them into Markdown.
- Signatures show annotations as they are written, `Mask | Array | None`, and public names in them
  are links. A function with overloads shows one signature that covers them.
- Fields of a class are described by the comments beside them.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import sys
import textwrap
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pdoc
import pdoc.doc
import pdoc.render

from reference.comments import assignments, defining_module, variable_comments
from reference.docstrings import docstring_markdown
from reference.examples import imports_of
from reference.links import mended
from reference.pages import LIBRARY_PAGES, PAGES, PROGRAM_PAGES, Links, public_links, public_names

ROOT = Path(__file__).parent.parent.parent
LIBRARY = "attention_jax"

TEMPLATES = {
    "module.html.jinja2": """
        {% extends "default/module.html.jinja2" %}
        {% block module_list_link %}{% endblock %}
        {% block nav_index %}{% endblock %}
        {% block nav_submodules %}{{ page_list(library_pages) }}{% endblock %}
        {% block nav_members %}
            <h2>On this page</h2>
            <ul class="memberlist">
                {% for member in module.members.values() if is_public(member) | trim %}
                    <li><a class="{{ member.kind }}" href="#{{ member.qualname }}">
                        {{- member.name -}}
                    </a></li>
                {% endfor %}
            </ul>
            {{ page_list(program_pages, "attention_jax.") }}
        {% endblock %}
        {% macro page_list(pages, prefix="") %}
            {% for heading, names in pages.items() %}
                <h2>{{ heading }}</h2>
                <ul>
                    {% for name in names %}
                        <li>{{ (name, "") | link(text=name.removeprefix(prefix)) }}</li>
                    {% endfor %}
                </ul>
            {% endfor %}
        {% endmacro %}
        {% macro inherited(cls) %}
            {% for base, members in cls.inherited_members.items() if base[0] in library_modules %}
                {% set links %}
                    {% for member in members if is_public(member) | trim %}
                        <dd>{{ member.taken_from | link(text=member.name) }}</dd>
                    {% endfor %}
                {% endset %}
                {% set name = base | link if base in public_classes else "a private class" %}
                {% if links | trim %}<div><dt>{{ name }}</dt>{{ links }}</div>{% endif %}
            {% endfor %}
        {% endmacro %}
        {% macro is_public(doc) %}
            {% if doc.name == "__call__" and doc.docstring %}true
            {% else %}{{ default_is_public(doc) }}{% endif %}
        {% endmacro %}
    """,
    # Wide enough for code of 100 columns.
    "custom.css": """
        @media (min-width: 770px) { main { width: calc(66rem + var(--sidebar-width)); } }
        nav.pdoc h2 { font-size: 1.2rem; font-weight: 600; margin-top: 1.2rem; }
        .pdoc code { white-space: pre-wrap; }
    """,
}


def main(output: Path = ROOT / "build" / "docs") -> None:
    shutil.rmtree(output, ignore_errors=True)
    pdoc.render.configure(docformat="markdown")
    environment: Any = pdoc.render.env
    environment.loader = jinja2.ChoiceLoader([jinja2.DictLoader(TEMPLATES), environment.loader])
    environment.globals |= {"library_pages": LIBRARY_PAGES, "program_pages": PROGRAM_PAGES}
    modules = {page: pdoc.doc.Module.from_name(page) for pages in PAGES.values() for page in pages}
    environment.globals["library_modules"] = [name for name in sys.modules if LIBRARY in name]
    for module in modules.values():
        module.members = {name: member(module, name) for name in public_names(module.obj)}
    links = public_links()
    environment.globals["public_classes"] = [
        (each.obj.__module__, each.qualname)
        for module in modules.values()
        for each in module.members.values()
        if isinstance(each, pdoc.doc.Class)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The pages show annotations as they are written: pdoc need not evaluate them.
        warnings.filterwarnings("ignore", "Error parsing type annotation")
        for module in modules.values():
            adapt(module, links)
        rendered = {page: pdoc.render.html_module(each, modules) for page, each in modules.items()}
        objects = {page: module.obj for page, module in modules.items()}
        for page, html in mended(rendered, objects, links).items():
            path = output / f"{page.replace('.', '/')}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(html)
        (output / "index.html").write_text(pdoc.render.html_index(modules))
        (output / "search.js").write_text(pdoc.render.search_index(modules))
    print(f"The API reference: {output / 'index.html'}")


def member(module: pdoc.doc.Module, name: str) -> pdoc.doc.Doc:
    """A member of a module; pdoc leaves out constants that have no annotation."""
    value = getattr(module.obj, name)
    place = (module.modulename, name)
    return module.members.get(name) or pdoc.doc.Variable(
        *place, taken_from=place, docstring="", default_value=value
    )


def adapt(namespace: pdoc.doc.Namespace, links: Links) -> None:
    """Replaces what pdoc read of a module or class and its members by what readers want to see."""
    set_docstring(namespace, namespace.obj, links)
    is_tuple = inspect.isclass(namespace.obj) and issubclass(namespace.obj, tuple)
    if is_tuple:
        namespace.members.pop("__init__", None)  # users read these tuples, and do not make them
    if isinstance(namespace, pdoc.doc.Class):
        namespace.bases = [
            public
            for module, name, text in namespace.bases
            for public in public_bases(module, name, text, links)
        ]
    for name, doc in list(namespace.members.items()):
        written_in = vars(sys.modules.get(doc.taken_from[0], sys))
        if isinstance(doc, pdoc.doc.Namespace):
            adapt(doc, links)
            continue
        if isinstance(doc, pdoc.doc.Function):
            signature = signature_as_written(doc, written_in, links)
            if signature is not None:
                doc.signature = signature
        elif isinstance(doc, pdoc.doc.Variable):
            variable: Any = doc  # pdoc prints any object here, and types it as a type
            owner = (
                namespace.obj
                if inspect.isclass(namespace.obj)
                else defining_module(namespace.obj, name)
            )
            if doc.docstring.startswith("Alias for field number"):
                doc.docstring = ""
            doc.docstring = doc.docstring or variable_comments(owner).get(name, "")
            annotation = variable_annotation(owner, name)
            if annotation is not None:
                variable.annotation = AsWritten(annotation, written_in, links)
            if isinstance(doc.default_value, types.UnionType):
                value = assignments(inspect.getsource(owner))[name].value
                variable.default_value = AsWritten(ast.unparse(value), {**vars(owner)}, links)
            if isinstance(namespace, pdoc.doc.Class) and not is_tuple and not doc.docstring:
                del namespace.members[name]  # the constructor shows it with its default
        set_docstring(doc, doc.obj if isinstance(doc, pdoc.doc.Function) else None, links)


def set_docstring(doc: pdoc.doc.Doc, value: Any, links: Links) -> None:
    """Turns a docstring into Markdown, with the imports of its example."""
    written_in = vars(sys.modules.get(getattr(value, "__module__", None) or doc.modulename, sys))
    doc.docstring = docstring_markdown(
        doc.docstring, lambda example: imports_of(example, written_in, links)
    )


def public_bases(module: str, name: str, text: str, links: Links) -> list[tuple[str, str, str]]:
    """A base class by its public name; a private class of the library by its own bases."""
    base = getattr(sys.modules.get(module), name, None)
    public = links.get((name, id(base)))
    if public:
        page, _, name = public.rpartition(".")
        return [(page, name, public)]
    if not module.startswith(LIBRARY):
        return [(module, name, text)]
    return [
        public
        for above in getattr(base, "__bases__", ())
        if above is not object
        for public in public_bases(
            above.__module__, above.__name__, f"{above.__module__}.{above.__name__}", links
        )
    ]


# --- annotations ---


class AsWritten:
    """An annotation that prints as its author wrote it, with the full names of public objects."""

    def __init__(self, annotation: Any, written_in: dict[str, Any], links: Links):
        if isinstance(annotation, typing.ForwardRef):
            annotation = annotation.__forward_arg__
        text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

        def full_name(match: re.Match) -> str:
            return links.get((match[0], id(written_in.get(match[0]))), match[0])

        self.text = re.sub(r"(?<![\w.\"'])[A-Za-z]\w*", full_name, text)

    def __repr__(self) -> str:
        return self.text


def signature_as_written(
    doc: pdoc.doc.Function, written_in: dict[str, Any], links: Links
) -> inspect.Signature | None:
    """The signature of a function, or None for a function of another library."""
    if not inspect.isfunction(doc.obj) or not doc.taken_from[0].startswith(LIBRARY):
        return None
    signature = inspect.signature(doc.obj)
    overloads = [inspect.signature(overload) for overload in typing.get_overloads(doc.obj)]

    def written(annotations: list[Any]) -> Any:
        texts = dict.fromkeys(
            repr(AsWritten(annotation, written_in, links))
            for annotation in annotations
            if annotation is not inspect.Signature.empty
        )
        if not texts:
            return inspect.Signature.empty
        union = " | ".join(texts).replace("Literal[False] | Literal[True]", "bool")
        return AsWritten(union, {}, {})

    defaults = written_defaults(doc.obj)
    parameters = [
        parameter.replace(
            default=defaults.get(name, parameter.default),
            annotation=written(
                [overload.parameters[name].annotation for overload in overloads]
                or [parameter.annotation]
            ),
        )
        for name, parameter in signature.parameters.items()
    ]
    returns = [overload.return_annotation for overload in overloads]
    is_constructor = doc.name == "__init__"
    return signature.replace(
        parameters=parameters,
        return_annotation=inspect.Signature.empty
        if is_constructor
        else written(returns or [signature.return_annotation]),
    )


def written_defaults(function: Callable) -> dict[str, AsWritten]:
    """The defaults that are functions and classes, as the source names them."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, SyntaxError):
        return {}
    if not isinstance(node, ast.FunctionDef):  # generated, as the constructor of a dataclass
        return {}
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    positional = positional[len(positional) - len(arguments.defaults) :]
    pairs = [
        *zip(positional, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    signature = inspect.signature(function)
    return {
        argument.arg: AsWritten(ast.unparse(default), {}, {})
        for argument, default in pairs
        if default is not None and callable(signature.parameters[argument.arg].default)
    }


# --- variables of modules and fields of classes ---


def variable_annotation(owner: Any, name: str) -> Any:
    for namespace in getattr(owner, "__mro__", [owner]):
        member = vars(namespace).get(name)
        if isinstance(member, property):
            return member.fget.__annotations__.get("return")
        annotations = vars(namespace).get("__annotations__", {})
        if name in annotations:
            return annotations[name]
    return None


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
