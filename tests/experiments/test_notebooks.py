"""The notebooks: their committed outputs, and that they run from top to bottom."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
# What a run of the notebook has to print.
PRINTED = {
    "tour": "potpal",  # "laptop", reversed by the model that it has trained
    "chapter38": "even logits: the peak is at scale 5.9; at 10: 84% of it",
    "own_score": "w = -1/2 finds the nearest: True",
    "gradients": "gradients.html",
}
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_of(path: Path) -> list[dict]:
    cells = json.loads(path.read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(outputs: list[dict]) -> str:
    return "".join("".join(output.get("text", "")) for output in outputs)


@every_notebook
def test_it_is_committed_as_it_ran(path):
    code = code_of(path)
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert PRINTED[path.stem] in printed(outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    assert path.stat().st_size < 300_000
    assert not re.search(r"/(root|home|tmp|work|Users)/", path.read_text())


@pytest.mark.slow
@every_notebook
def test_it_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # this checkout, whatever is installed
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": tmp_path}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert PRINTED[path.stem] in printed(outputs)
