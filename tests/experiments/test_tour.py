"""The notebook: its committed outputs, and that it runs from top to bottom."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "experiments" / "tour.ipynb"
CONTENT = json.loads(NOTEBOOK.read_text())
CODE = [cell for cell in CONTENT["cells"] if cell["cell_type"] == "code"]


def test_it_is_committed_as_it_ran():
    assert [cell["execution_count"] for cell in CODE] == list(range(1, len(CODE) + 1))
    outputs = [output for cell in CODE for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 3
    pages = [output for output in outputs if "text/html" in output.get("data", {})]
    assert len(pages) == 1
    assert "".join(pages[0]["data"]["text/html"]).startswith("<iframe ")
    assert NOTEBOOK.stat().st_size < 300_000


def test_it_holds_no_absolute_path():
    assert not re.search(r"/(root|home|tmp|work|Users)/", NOTEBOOK.read_text())


def test_the_formula_by_hand_and_the_library_agree():
    cell = next(cell for cell in CODE if "by_hand" in "".join(cell["source"]))
    text = "".join("".join(output["text"]) for output in cell["outputs"])
    _, by_hand, by_library = re.findall(r"\[\[(.*?)\]\]", text)
    assert float(by_hand) == pytest.approx(float(by_library), rel=1e-4)


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    ).execute()
    text = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "potpal" in text  # "laptop", reversed by the model that it has trained
