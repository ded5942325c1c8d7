"""The structure of the code: floors of the library, and short files."""

import ast
import configparser
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each room may import from its own folder and from the floors above its own in this list.
FLOORS = (
    ("core",),
    ("positions", "scores", "runs"),
    ("normalizers",),
    ("parts",),
    ("tiles",),
    ("whole",),
    ("kernels",),
    ("functional", "experimental"),
    ("nn", "analysis", "training"),
    ("tasks", "reports", "interop"),
    ("commands",),
    ("__init__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FOLDERS = ("attention_jax", "benchmarks", "experiments", "scripts", "tests")  # from below
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS}
LIBRARY = FILES["attention_jax"]
MODULE_OF = {"orbax-checkpoint": "orbax", "pillow": "PIL", "pyyaml": "yaml"}


def relative(path):
    return str(path.relative_to(ROOT))


def room_of(path: Path) -> str:
    """The folder of the library in which a file lies; "__init__" for the library's top file."""
    parts = path.relative_to(ROOT / "attention_jax").parts
    return parts[0] if len(parts) > 1 else "__init__"


def imported_modules(path: Path) -> list[str]:
    """Full names; `from package import name` as "package.name", since the name may be a module."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} has a relative import"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def test_imports_point_upwards():
    assert {room_of(path) for path in LIBRARY} == FLOOR_OF.keys()
    wrong = []
    for path in LIBRARY:
        for package, *parts in (name.split(".") for name in imported_modules(path)):
            room = parts[0] if parts and parts[0] in FLOOR_OF else "__init__"
            is_below = FLOOR_OF[room] >= FLOOR_OF[room_of(path)] and room != room_of(path)
            if package == "attention_jax" and is_below:
                wrong.append(f"{relative(path)} imports {'.'.join((package, *parts))}")
    assert wrong == []


def test_folders_import_from_folders_below():
    of_scripts = {path.stem: "scripts" for path in (ROOT / "scripts").iterdir()}  # on sys.path
    folder_of = of_scripts | {folder: folder for folder in FOLDERS}
    wrong = []
    for floor, folder in enumerate(FOLDERS):
        for path in FILES[folder]:
            found = {folder_of.get(name.partition(".")[0]) for name in imported_modules(path)}
            wrong += [(relative(path), above) for above in FOLDERS[floor + 1 :] if above in found]
    assert wrong == []


def test_what_is_installed_is_what_the_library_imports():
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    packages = re.findall(r"^[\w-]+", settings["options"]["install_requires"], re.MULTILINE)
    imported = {name.partition(".")[0] for path in LIBRARY for name in imported_modules(path)}
    expected = {MODULE_OF.get(package, package) for package in packages}
    assert imported - {"attention_jax"} - sys.stdlib_module_names == expected


def test_one_room_reads_command_lines():
    parsers = ("argparse", "tyro")
    rooms = {room_of(path) for path in LIBRARY if {*parsers} & {*imported_modules(path)}}
    assert rooms == {"commands"}


# --- files ---


def test_small_files_with_telling_names():
    paths = [path for folder in FOLDERS for path in FILES[folder]]
    assert [relative(path) for path in paths if path.name == "utils.py"] == []
    lines = {relative(path): len(path.read_text().splitlines()) for path in paths}
    assert {path: count for path, count in lines.items() if count >= 400} == {}


def test_ruff_formats_every_line():
    skip = "# fmt" + ": skip"
    assert [relative(path) for path in LIBRARY if skip in path.read_text()] == []
