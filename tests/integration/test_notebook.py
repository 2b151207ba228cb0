from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "notebooks" / "grpo_in_a_notebook.ipynb"


def test_all_cells_of_the_example_notebook_run_without_errors(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (training,) = (cell for cell in notebook.cells if "num_steps=60" in cell.source)
    training.source = training.source.replace("num_steps=60", "num_steps=12")  # how well it learns is not looked at
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {cell["id"]: cell["outputs"] for cell in notebook.cells if cell.cell_type == "code"}
    texts = "".join(output.get("text", "") for outputs in shown.values() for output in outputs)
    assert "largest difference between generation and training: 0.0" in texts
    last = list(shown.values())[-1]
    assert any("<iframe" in output.get("data", {}).get("text/html", "") for output in last)


def test_example_notebook_is_saved_without_cell_outputs():
    import json

    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
