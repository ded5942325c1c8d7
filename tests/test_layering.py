"""The structure of the code: floors of the library, and short files."""

import ast
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
    """The room of an imported name such as "attention_jax.core.arrays.cast"."""
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


# --- files ---


def test_small_files_with_telling_names():
    paths = [path for folder in FOLDERS for path in FILES[folder]]
    assert [relative(path) for path in paths if path.name == "utils.py"] == []
    lines = {relative(path): len(path.read_text().splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count >= 400} == {}


def test_ruff_formats_every_line():
    skip = "# fmt" + ": skip"
    assert [relative(path) for path in LIBRARY if skip in path.read_text()] == []
