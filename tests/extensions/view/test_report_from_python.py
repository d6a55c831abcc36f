"""``Run.report``, from a program and from a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import strop
from support.reported_runs import write_run


def test_a_report_is_written_from_python(tmp_path: Path) -> None:
    run = strop.Run(write_run(tmp_path / "mine"))
    assert run.report(tmp_path / "for_you.html").read_text().startswith("<!DOCTYPE html>")
    assert run.report() == run.folder / "report.html"


@pytest.mark.exhaustive
def test_a_real_notebook_shows_a_run_its_tables_and_its_figures(tmp_path: Path) -> None:
    """Executed by Jupyter's own client, in a kernel of its own."""
    import nbformat
    from nbclient import NotebookClient

    write_run(tmp_path / "mine")
    cells = [
        "import strop\nrun = strop.Run('mine')\nrun", "run.metrics.tail(3)", "run.plot()", "run.timing.mean()", "run.validations",
        "run.samples.head(2)", "run.rollouts[['step', 'reward']]", "print(run.report('out.html'))",
    ]  # fmt: skip
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [cell.outputs[-1] for cell in notebook.cells]
    data = [output.get("data", {}) for output in outputs]
    assert "tiny" in data[0]["text/html"]
    assert "<table" in data[1]["text/html"] and "train/reward" in data[1]["text/html"]
    assert data[2]["image/png"] and outputs[2]["output_type"] == "execute_result"
    assert "generation" in data[3]["text/plain"] and all("<table" in each["text/html"] for each in data[4:7])
    assert outputs[7]["text"] == "out.html\n" and (tmp_path / "out.html").is_file()
