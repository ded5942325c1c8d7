"""The house that README shows: data flows top to bottom, and no file grows too long."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    "core", "over_batch", "float_array", "position_functions", "mask_algebra", "masks", "biases",
    "softmax", "bits", "dropout", "pairwise_tanh", "scores", "implementations", "checks", "heads",
    "capture_point", "attention", "ring_attention", "memory", "local", "coverage",
    "monotonic_walks", "monotonic", "decoding", "interop_layout", "interop", "nn", "analysis",
    "data", "training", "tasks", "plotting", "html_page", "gradient_report", "command_line",
    "__init__",
]  # fmt: skip
LIBRARY = sorted((ROOT / "attention_jax").rglob("*.py"))
OUTSIDE = [
    path for folder in ("experiments", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")
]


def layer_of(module: str) -> str:
    """The file or folder of the library that a module belongs to; its `__init__` is the last."""
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
    own = layer_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
    if own not in LAYERS:
        return [f"{own} is in no layer: give it its place in LAYERS"]
    found = []
    for module in imported_modules(source):
        if module.split(".")[0] in ("experiments", "scripts", "tests"):
            found.append(f"the library imports {module}")
        if module.split(".")[0] != "attention_jax":
            continue
        other = layer_of(module)
        if LAYERS.index(other) > LAYERS.index(own):
            found.append(f"{own} imports {other}, which stands below it")
    return found


@pytest.mark.parametrize("path", LIBRARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upwards(path):
    assert violations(path, path.read_text()) == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("masks", "from attention_jax.softmax import masked_softmax"),
        ("scores", "from attention_jax import attention"),
        ("nn/attention", "import attention_jax"),
        ("nn/attention", "from attention_jax.training.loop import train"),
        ("plotting", "from scripts import train"),
        ("attention", "def f():\n    import experiments.geometry"),
    ],
)
def test_a_violation_is_found(name, source):
    assert violations(ROOT / "attention_jax" / f"{name}.py", source)


@pytest.mark.parametrize("path", LIBRARY + OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_small_files_with_telling_names(path):
    assert path.name != "utils.py"
    assert len(path.read_text().splitlines()) <= 400
