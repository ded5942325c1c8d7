"""The house that README shows: data flows top to bottom, and no file grows too long."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Each room may import from its own folder and from the floors above its own in this list.
FLOORS = (
    ("core",),
    ("pairwise", "scores", "runs"),
    ("implementations",),
    ("functional",),
    ("nn", "analysis", "training"),
    ("tasks", "reports"),
    ("__init__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
LIBRARY = sorted((ROOT / "attention_jax").rglob("*.py"))
OUTSIDE = [
    path for folder in ("experiments", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")
]


def room_of(module: str) -> str:
    """The folder of the library that a module belongs to; its `__init__` is the last."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imported_modules(source: str) -> list[str]:
    """Absolute names; `from package import name` as package.name where that is a file or folder."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            for alias in node.names:
                path = ROOT.joinpath(*node.module.split("."), alias.name)
                is_module = path.is_dir() or path.with_suffix(".py").is_file()
                modules.append(f"{node.module}.{alias.name}" if is_module else node.module)
    return modules


def violations(path: Path, source: str) -> list[str]:
    own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own not in FLOOR_OF:
        return [f"{own} is on no floor: give it its place in FLOORS"]
    found = []
    for module in imported_modules(source):
        if module.split(".")[0] in ("experiments", "scripts", "tests"):
            found.append(f"the library imports {module}")
        if module.split(".")[0] != "attention_jax":
            continue
        other = room_of(module)
        if other != own and FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF[own]:
            found.append(f"{own} imports {other}, which is not on a floor below it")
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upwards(path):
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("pairwise/masks", "from attention_jax.implementations.softmax import masked_softmax"),
        ("scores/dot", "from attention_jax import attention"),
        ("nn/attention", "import attention_jax"),
        ("nn/attention", "from attention_jax.training.loop import train"),
        ("reports/plotting", "from scripts import train"),
        ("functional/attention", "def f():\n    import experiments.geometry"),
    ],
)
def test_a_violation_is_found(name, source):
    assert violations(ROOT / "attention_jax" / f"{name}.py", source)


@pytest.mark.parametrize("path", LIBRARY + OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_small_files_with_telling_names(path):
    assert path.name != "utils.py"
    assert len(path.read_text().splitlines()) <= 400
