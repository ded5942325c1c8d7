"""Every public name has a docstring, and those of the library have an example.

The public names are those of the pages of the API reference (`scripts/reference.py`). Each function
and class has a docstring of its own, and each public method has one, its own or an inherited one.
On the pages of the library, each function and class has a doctest, except for tuples: the function
that returns one shows it.
"""

import importlib
import inspect
import os
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


def test_public_names_have_docstrings_and_examples():
    library, programs = public_objects(LIBRARY_PAGES), public_objects(PROGRAM_PAGES)
    assert len(library) > 100
    for name, value in (library | programs).items():
        assert own_docstring(value), name
        without = [key for key, x in public_methods(value).items() if not inspect.getdoc(x)]
        assert not without, name
        if name in library and not is_tuple(value) and value.__name__ not in NO_EXAMPLE:
            assert ">>>" in own_docstring(value), name


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
