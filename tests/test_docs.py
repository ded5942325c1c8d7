"""Every public name has a docstring; those of the library name shapes and have an example.

The public names are those of the pages of the API reference (`scripts/reference.py`). The rules,
for the functions and classes on the pages of the library:

- *docstring*: each has its own, and each public method has one, its own or an inherited one. This
  rule holds for the pages of training, tasks, runs and reports too.
- *shapes*: whatever takes, returns or holds arrays names a shape: a bracket such as [*B, T, S], or
  the word "scalar". In a function each array argument does so in its entry of `Args`, unless the
  entry refers to another ("as in", "as for", "like") or is a PRNG key. The comments beside fields
  count. Examples do not count.
- *example*: each has a doctest in its docstring, except for tuples: the function that returns one
  shows it.
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from reference import LIBRARY_PAGES, PROGRAM_PAGES, markdown, with_comments

import attention_jax

ROOT = Path(__file__).parent.parent
NO_EXAMPLE = {
    "Inputs": "attention makes it; only an implementation reads it",
    "Options": "attention makes it; only an implementation reads it",
    "is_dot_product": "implementations ask it",
    "known_score": "attention asks it",
    "WrappedScore": "a base class; `SoftCap` is its example",
    **dict.fromkeys(
        ("AdditiveAttention", "DotAttention", "GeneralAttention", "ScaledDotAttention"),
        "`Attention` is its example",
    ),
}


def public_names(module) -> list[str]:
    """`__all__`, or the functions and classes that a module defines; no modules."""
    defined = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    ]
    names = getattr(module, "__all__", defined)
    return [name for name in names if not inspect.ismodule(getattr(module, name))]


def public_objects(pages: tuple) -> dict:
    """The functions and classes on pages, by their full names."""
    modules = [importlib.import_module(page) for page in pages]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in public_names(module)
        if not is_constant(getattr(module, name))
    }


def is_tuple(value) -> bool:
    return inspect.isclass(value) and issubclass(value, tuple)


def is_constant(value) -> bool:
    of_library = getattr(value, "__module__", "").startswith("attention_jax")
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
    holders = map(inspect.get_annotations, (*value.__mro__, *functions))
    annotations = [annotation for holder in holders for annotation in holder.values()]
    texts = [own_docstring(value), *with_comments(value).var_docstrings.values()]
    texts += [inspect.getdoc(function) or "" for function in functions]
    return "names no shape" if has_array(annotations) and not any(map(has_shape, texts)) else ""


def function_shape_mistake(value) -> str:
    docstring, annotations = own_docstring(value), dict(value.__annotations__)
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


def example_mistake(value) -> str:
    shown = ">>>" in own_docstring(value) or is_tuple(value) or value.__name__ in NO_EXAMPLE
    return "" if shown else "has no example"


def mistakes(rule, named: dict) -> list[str]:
    return [f"{name} {mistake}" for name, value in named.items() if (mistake := rule(value))]


def test_public_names_have_docstrings_shapes_and_examples():
    library = public_objects(LIBRARY_PAGES)
    assert len(library) > 100
    for rule in (docstring_mistake, shape_mistake, example_mistake):
        assert not mistakes(rule, library)
    assert not mistakes(docstring_mistake, public_objects(PROGRAM_PAGES))


def test_start_page_names_everything():
    missing = [
        name for name in public_names(attention_jax) if f"`{name}`" not in attention_jax.__doc__
    ]
    assert not missing


# --- the pages ---


def test_shapes_are_code_on_the_pages():
    text = markdown(inspect.getdoc(attention_jax.attention))
    assert "float `[*B, T, Dq]`" in text
    assert "broadcast to `*B`" in text
    assert ">>> query, key, value = jnp.ones((1, 2))" in text  # examples stay as they are
    assert with_comments(attention_jax.AttentionStatistics).var_docstrings["entropy"]


@pytest.mark.slow
def test_pages_are_built(tmp_path):
    script = ROOT / "scripts" / "reference.py"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, script, "--out", tmp_path]
    subprocess.run(words, env=environment, check=True, stderr=subprocess.DEVNULL)
    pages = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.html")}
    files = [f"{name.replace('.', '/')}.html" for name in (*LIBRARY_PAGES, *PROGRAM_PAGES)]
    assert sorted([*files, "index.html"]) == sorted(map(str, pages))
    for name in public_names(attention_jax):
        assert f'id="{name}"' in pages[Path("attention_jax.html")]
    assert "capture_gradients" in (tmp_path / "search.js").read_text()
