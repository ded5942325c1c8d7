"""The site: public names have docstrings and, in the library, examples; links lead somewhere.

The public names are those of the modules on the pages of the API (docs/api). Each function
and class has a docstring of its own, and each public method has one, its own or an inherited one.
On the pages of the library, each function and class has a doctest, except for tuples: the function
that returns one shows it.
"""

import html
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import urllib.parse
from pathlib import Path

import pytest

import attention_jax

ROOT = Path(__file__).parent.parent
MODULES = [
    name
    for page in sorted((ROOT / "docs/api").glob("*.rst"))
    for name in re.findall(r"automodule:: (.*)", page.read_text())
]
PROGRAM = re.compile(r"attention_jax\.(training|tasks|runs|reports)\.")
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


def public_objects(*, program: bool) -> dict:
    """The functions and classes of the library or of the program, by their full names."""
    names = [name for name in MODULES if bool(PROGRAM.match(name)) == program]
    modules = [importlib.import_module(name) for name in names]
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
    library, programs = public_objects(program=False), public_objects(program=True)
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


# --- the site ---


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; Sphinx follows the links of all Markdown pages and fails."""
    out = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-c", "docs", ".", out]
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    return out


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path: html.unescape(path.read_text()) for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="([^"]+)"', page)) for path, page in pages.items()}
    followed, broken = 0, []
    for path, page in pages.items():
        for link in re.findall(r'\b(?:href|src)="([^"]*)"', page):
            address = urllib.parse.urlsplit(link)
            if address.scheme:
                continue
            place, anchor = map(urllib.parse.unquote, (address.path, address.fragment))
            target = (path.parent / place).resolve() if place else path
            followed += 1
            if not target.is_file() or (anchor and anchor not in ids[target]):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []
    assert followed > 1_000


@pytest.mark.slow
def test_public_names_are_on_the_site_with_shapes_as_code(site):
    pages = [path.read_text() for path in (site / "docs/api").glob("*.html")]
    for name, value in (public_objects(program=False) | public_objects(program=True)).items():
        ids = {f'id="{name}"', f'id="attention_jax.{value.__name__}"'}
        assert any(each in page for page in pages for each in ids), name
    (page,) = (page for page in pages if 'id="attention_jax.attention"' in page)
    text = re.sub(r"<[^>]+>", "", page)
    assert '<span class="pre">[*B,</span>' in page
    assert "entropy \u2013 [*B, T]" in text or "entropy -- [*B, T]" in text  # beside the field
    assert "\nlogits_ij = score(query_i, key_j) + bias_ij\nweights_i" in text
