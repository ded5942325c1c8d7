"""The structure of the code: floors of the library, no import circles, and short files."""

import ast
import functools
import graphlib
import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each room may import from its own folder and from the floors above its own in this list.
FLOORS = (
    ("core",),
    ("pairwise", "scores", "runs"),
    ("normalizers",),
    ("implementations",),
    ("kernels",),
    ("functional",),
    ("nn", "analysis", "training"),
    ("tasks", "reports"),
    ("__init__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FOLDERS = ("attention_jax", "experiments", "scripts", "tests")
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS}
LIBRARY = FILES["attention_jax"]
# The folders from which absolute imports start; pytest and the scripts put all but the first on
# sys.path.
IMPORT_ROOTS = (ROOT, *(ROOT / folder for folder in FOLDERS[1:]))


def relative(path):
    return str(path.relative_to(ROOT))


def imported_names(source: str) -> list[str]:
    """The names that a file imports; `from package import name` as "package.name".

    Names of relative imports begin with their dots: `from . import name` as ".name".
    """
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (f"{node.module}." if node.module else "")
            names += [f"{module}{alias.name}" for alias in node.names]
    return names


# --- the floors of the library ---


def room_of(path: Path) -> str:
    """The folder of the library in which a file lies; "__init__" for the library's top file."""
    parts = path.relative_to(ROOT / "attention_jax").parts
    return parts[0] if len(parts) > 1 else "__init__"


def imported_room(name: str) -> str:
    """The room of an imported name such as "attention_jax.core.bits.mix"."""
    _, *parts = name.split(".")
    is_room = parts and (ROOT / "attention_jax" / parts[0]).is_dir()
    return parts[0] if is_room else "__init__"


def violations(path: Path, source: str) -> list[str]:
    """The imports of a file of the library that do not point to a floor above."""
    room = room_of(path)
    if room not in FLOOR_OF:
        return [f"{room} is on no floor: add it to FLOORS"]
    errors = []
    for name in imported_names(source):
        package = name.split(".")[0]
        if package in ("", *FOLDERS[1:]):
            errors.append(f"the library imports {name}")
        if package != "attention_jax":
            continue
        other = imported_room(name)
        if other != room and FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF[room]:
            errors.append(f"{room} imports {other}, which is not on a floor above it")
    return errors


def test_imports_point_upwards():
    found = {relative(path): violations(path, path.read_text()) for path in LIBRARY}
    assert {path: errors for path, errors in found.items() if errors} == {}
    assert violations(ROOT / "attention_jax" / "scores" / "dot.py", "import attention_jax")


# --- import circles ---


is_file = functools.cache(os.path.isfile)


def imported_file(name: str, folder: Path) -> Path | None:
    """The file of this repository that a name comes from, as imported in `folder`; or None."""
    dots = len(name) - len(name.lstrip("."))
    roots = (folder, *folder.parents)[dots - 1 : dots] if dots else (folder, *IMPORT_ROOTS)
    parts = name[dots:].split(".")
    for root in roots:
        for count in range(len(parts), 0, -1):  # the last parts may be names inside a module
            module = root.joinpath(*parts[:count])
            for path in (f"{module}.py", f"{module}/__init__.py"):
                if is_file(path):
                    return Path(path)
    return None


def import_graph(paths: list[Path]) -> dict[Path, set[Path]]:
    """The files that each file imports, inside of functions too."""
    graph = {}
    for path in paths:
        files = {imported_file(name, path.parent) for name in imported_names(path.read_text())}
        graph[path] = {file for file in files if file is not None}
    return graph


def circle(graph: dict[Path, set[Path]]) -> list[Path]:
    """The files of a circle of imports, the first one again at the end; empty if there is none."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_import_circles():
    paths = [path for folder in FOLDERS for path in FILES[folder]]
    graph = import_graph(paths)
    library = ROOT / "attention_jax"
    assert library / "functional" / "attention.py" in graph[library / "__init__.py"]
    assert [relative(path) for path in circle(graph)] == []


# --- files ---


def test_small_files_with_telling_names():
    paths = [path for folder in FOLDERS for path in FILES[folder]]
    assert [relative(path) for path in paths if path.name == "utils.py"] == []
    lines = {relative(path): len(path.read_text().splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count >= 400} == {}


def test_ruff_formats_every_line():
    skip = "# fmt" + ": skip"
    assert [relative(path) for path in LIBRARY if skip in path.read_text()] == []
