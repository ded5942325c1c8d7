"""Every public name has a docstring; those of the library name shapes and have an example.

The public names are those of the pages of the API reference (`scripts/reference/pages.py`). The
rules, for the functions and classes on the pages of the library:

- *docstring*: each has its own, and each public method has one, its own or an inherited one. A
  constant or type alias has a comment beside it, which the reference shows. This rule holds for the
  pages of training, tasks, runs and reports too.
- *shapes*: whatever takes, returns or holds arrays names a shape: a bracket such as [*B, T, S], or
  the word "scalar". In a function each array argument does so in its entry of `Args`, unless the
  entry refers to another ("as in", "as for", "like") or is a PRNG key. The comments beside fields
  count. Examples do not count.
- *example*: each has a doctest in its docstring. The fields of a result are shown by the function
  that returns it, alone or in another result; a `NamedTuple` needs none if that one has one.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from flax import nnx
from reference.comments import defining_module, variable_comments
from reference.docstrings import docstring_markdown
from reference.examples import imports_of
from reference.pages import LIBRARY_PAGES, PAGES, PROGRAM_PAGES, public_links, public_names

import attention_jax

ROOT = Path(__file__).parent.parent
NO_EXAMPLE = {
    "Inputs": "attention makes it; only an implementation reads it",
    "Options": "attention makes it; only an implementation reads it",
    "WrappedScore": "a base class; `SoftCap` is its example",
}


def public_objects(pages: dict) -> dict:
    """The functions, classes and constants of pages, by their full names."""
    modules = [importlib.import_module(page) for names in pages.values() for page in names]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in public_names(module)
    }


def is_tuple(value) -> bool:
    return inspect.isclass(value) and issubclass(value, tuple)


def is_constant(value) -> bool:
    of_library = getattr(value, "__module__", "").startswith(("attention_jax", __name__))
    return not (inspect.isfunction(value) or (inspect.isclass(value) and of_library))


def own_docstring(value) -> str:
    docstring = inspect.cleandoc(vars(value).get("__doc__") or "") if inspect.isclass(value) else ""
    docstring = docstring or (inspect.getdoc(value) or "") * inspect.isfunction(value)
    # `dataclass` and `NamedTuple` write the signature.
    return "" if docstring.startswith(f"{value.__name__}(") else docstring


def public_methods(value) -> dict:
    members = vars(value).items() if inspect.isclass(value) else ()
    return {
        name: getattr(value, name)
        for name, member in members
        if (name == "__call__" or not name.startswith("_"))
        and isinstance(member, property | classmethod | staticmethod | types.FunctionType)
        and name not in getattr(value, "__dataclass_fields__", ())
    }


def methods_and_functions(value) -> list:
    """The function itself, or the methods of a class."""
    functions = [value, *public_methods(value).values()]
    return [function for function in functions if inspect.isroutine(function)]


def annotations_of(function) -> dict[str, str]:
    """The annotations of the arguments and, as "return", of the result, as they are written."""
    return (typing.get_overloads(function) or [function])[-1].__annotations__


# --- the rules; each returns what is wrong with a function or class, or "" ---


def docstring_mistake(value) -> str:
    if not own_docstring(value):
        return "has no docstring"
    without = [name for name, method in public_methods(value).items() if not inspect.getdoc(method)]
    return f"has methods without a docstring: {', '.join(without)}" if without else ""


def has_shape(text: str) -> bool:
    prose = re.sub(r"^ *>>>.*(\n.+)*", "", text, flags=re.MULTILINE)
    return bool(re.search(r"\[[^\[\]]*\]|\bscalar", prose))


def has_array(annotation) -> bool:
    return bool(re.search(r"\bArray(Like)?\b", str(annotation)))


def section_of(docstring: str, heading: str) -> str:
    section = re.search(rf"^{heading}:\n((?: +.*\n?|\n)+)", docstring, flags=re.MULTILINE)
    return section[1] if section else ""


def entries_of(docstring: str) -> dict[str, str]:
    """The entries of `Args` by the names of the arguments."""
    entries: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\S)", "\n" + section_of(docstring, "Args")):
        names, _, text = entry.partition(": ")
        entries |= dict.fromkeys(re.findall(r"\w+", names), text)
    return entries


def shape_mistake(value) -> str:
    return class_shape_mistake(value) if inspect.isclass(value) else function_shape_mistake(value)


def class_shape_mistake(value) -> str:
    """Anywhere in the docstrings of the class and its methods, or beside its fields."""
    functions = methods_and_functions(value)
    holders = [*map(inspect.get_annotations, value.__mro__), *map(annotations_of, functions)]
    annotations = [annotation for holder in holders for annotation in holder.values()]
    texts = [own_docstring(value), *variable_comments(value).values()]
    texts += [inspect.getdoc(function) or "" for function in functions]
    return "names no shape" if has_array(annotations) and not any(map(has_shape, texts)) else ""


def function_shape_mistake(value) -> str:
    docstring, annotations = own_docstring(value), dict(annotations_of(value))
    returned, entries = annotations.pop("return", None), entries_of(docstring)
    refers = re.compile(r"\b(as in|as for|like|PRNG key|broadcastable)\b")
    without = [
        name
        for name, annotation in annotations.items()
        for entry in [entries.get(name, "")]
        if has_array(annotation) and not has_shape(entry) and not refers.search(entry)
    ]
    if has_array(returned) and not has_shape(section_of(docstring, "Returns") or docstring):
        without.append("the result")
    return f"names no shape of {', '.join(without)}" if without else ""


def example_mistake(value, others: list) -> str:
    if ">>>" in own_docstring(value) or value.__name__ in NO_EXAMPLE:
        return ""
    return "" if is_tuple(value) and is_returned(value, others) else "has no example"


def is_returned(value, others: list) -> bool:
    """Whether a function with an example returns this tuple, alone or in another tuple."""
    name = re.compile(rf"\b{value.__name__}\b")
    return any(
        ">>>" in (inspect.getdoc(function) or "")
        and name.search(f"{annotations_of(function).get('return')}")
        for other in others
        for function in methods_and_functions(other)
        if inspect.isfunction(function)
    ) or any(
        is_returned(other, others)
        for other in others
        if is_tuple(other) and other is not value
        if name.search(str(inspect.get_annotations(other)))
    )


def mistakes(named: dict, library: bool = True) -> list[str]:
    others = [value for value in named.values() if not is_constant(value)]
    all_mistakes = []
    for full_name, value in named.items():
        if is_constant(value):
            page, _, name = full_name.rpartition(".")
            module = defining_module(importlib.import_module(page), name)
            of_value = ["" if variable_comments(module).get(name) else "has no comment beside it"]
        else:
            of_value = [docstring_mistake(value)]
            if library:
                of_value += [shape_mistake(value), example_mistake(value, others)]
        all_mistakes += [f"{full_name} {mistake}" for mistake in of_value if mistake]
    return all_mistakes


def test_public_names_have_docstrings_shapes_and_examples():
    library = public_objects(LIBRARY_PAGES)
    assert len(library) > 100
    assert not mistakes(library)
    assert not mistakes(public_objects(PROGRAM_PAGES), library=False)


class Result(NamedTuple):
    """A result."""

    weights: jax.Array


def good(query: jax.Array, rng: jax.Array) -> jax.Array:
    """An example.

    Args:
        query: float [*B, T, D].
        rng: one PRNG key.

    Returns:
        float [*B, T].

    >>> 1 + 1
    2
    """


def without_shapes(query: jax.Array, key: jax.Array) -> jax.Array:
    """The shapes of an example do not count.

    Args:
        query: the queries.
        key: like `query`.

    >>> [1]
    [1]
    """


def undocumented(query): ...


def test_mistakes_are_found():
    named = {"good": good, "Result": Result, "shapes": without_shapes, "undocumented": undocumented}
    assert mistakes(named) == [
        "Result names no shape",
        "Result has no example",
        "shapes names no shape of query, the result",
        "undocumented has no docstring",
        "undocumented has no example",
    ]


def test_exceptions_are_public_names_without_example():
    named = {
        name.rpartition(".")[2]: value for name, value in public_objects(LIBRARY_PAGES).items()
    }
    assert all(">>>" not in own_docstring(named[name]) for name in NO_EXAMPLE)


def test_start_page_names_everything():
    missing = [
        name for name in public_names(attention_jax) if f"`{name}`" not in attention_jax.__doc__
    ]
    assert not missing


# --- the pages ---


def test_markdown_of_a_docstring():
    markdown = docstring_markdown(inspect.getdoc(attention_jax.attention))
    assert "- **query:** float `[*B, T, Dq]`. Heads, if any, are one more batch axis." in markdown
    assert "```text\nlogits_ij = score(query_i, key_j) + bias_ij\nweights_i" in markdown
    assert "0 &lt;= rate &lt; 1" in markdown
    assert "**Example**\n\n```pycon\n>>> import jax.numpy as jnp\n" in markdown
    assert "- **ValueError:** an argument has the wrong shape, dtype or structure." in markdown
    assert markdown.endswith(
        "**Source:** Bahdanau et al. 2014, Luong et al. 2015, Vaswani et al. 2017 (their Q, K, V)."
    )


def test_examples_open_with_the_imports_that_they_lack():
    example = (
        ">>> import jax\n>>> tokens = jnp.ones(3)\n>>> [len(n) for n in rotary(nnx, tokens)]\n"
    )
    written_in = vars(sys.modules["attention_jax.nn.positions"]) | {"nnx": nnx}
    assert imports_of(example, written_in, public_links()) == [
        "import jax.numpy as jnp",
        "from flax import nnx",
        "from attention_jax.nn import rotary",
    ]


def test_imports_of_examples_are_those_of_their_modules():
    links = public_links()
    for name, value in public_objects(PAGES).items():
        functions = [] if is_constant(value) else [value, *public_methods(value).values()]
        for text in (inspect.getdoc(function) or "" for function in functions):
            written_in = vars(sys.modules[value.__module__])
            imported: dict = {}
            exec("\n".join(imports_of(text, written_in, links)), imported)
            imported.pop("__builtins__", None)
            assert all(imported[each] is written_in[each] for each in imported), name


def test_the_formula_of_a_score_is_code():
    for docstring, formula in {
        inspect.getdoc(attention_jax.Additive): "`e(q, k) = v . tanh(Wq q + Wk k)`: a network",
        inspect.getdoc(attention_jax.ScaledDot): "`e(q, k) = scale (q . k)`, by default with",
        inspect.getdoc(attention_jax.Dot): "`e(q, k) = q . k`\n",
    }.items():
        assert docstring_markdown(docstring).startswith(formula)


def docs(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [ROOT / "scripts" / "docs", *arguments], capture_output=True, text=True, check=False
    )


def test_options_of_the_script():
    help_, refusal = docs("--help"), docs("--fast")
    assert (help_.returncode, help_.stderr, help_.stdout.count("\n")) == (0, "", 1)
    assert (refusal.returncode, refusal.stdout) == (2, "")
    assert refusal.stderr == "error: scripts/docs takes no options; got --fast\n"


@pytest.mark.slow
def test_pages_are_built(tmp_path):
    pytest.importorskip("pdoc")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    subprocess.run(
        [sys.executable, "-m", "reference", tmp_path], cwd=ROOT, env=environment, check=True
    )
    start = (tmp_path / "attention_jax.html").read_text()
    for name in public_names(attention_jax):
        assert f'<section id="{name}">' in start
    for names in PAGES.values():
        for page in names:
            text = (tmp_path / f"{page.replace('.', '/')}.html").read_text()
            assert not re.findall(r'(?:src|href)="https?://(?!pdoc\.dev)', text)
            for path, name in re.findall(r'<a[^>]* href="([\w./]*)#([\w.]+)"', text):
                target = tmp_path / f"{page.replace('.', '/')}.html"
                target = target.parent / path if path else target
                assert f'id="{name}"' in target.read_text(), (page, path, name)
    assert "capture_gradients" in (tmp_path / "search.js").read_text()
