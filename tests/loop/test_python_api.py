"""The README and the quickstart as written: ten lines of Python in a script and in a notebook, an environment and an algorithm."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import strop
from loop import runs
from loop.tiny import build_tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quickstart.md"))
BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", PAGES, re.DOTALL | re.MULTILINE)
TEN_LINES = next(text for kind, text in BLOCKS if kind == "python" and "strop.train" in text)
FILES = {text.splitlines()[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python" and text.startswith("# ")}
COMMAND = next(text for kind, text in BLOCKS if kind == "sh" and "larger.py" in text)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a tiny model has the name of the README's, beside 32 tasks: one step."""
    build_tiny(tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct")
    build_tiny(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    rows = [{"problem": f"{a}+{b}", "answer": str(a + b)} for a in range(4) for b in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_ten_lines_are_the_same_on_every_page() -> None:
    assert f"```python\n{TEN_LINES}```" in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert len([line for line in TEN_LINES.splitlines() if line]) <= 10


def test_the_ten_lines_train_in_a_script(home: Path) -> None:
    (home / "ten.py").write_text(TEN_LINES)
    done = runs.strop("ten.py", folder=Path())
    assert done.code == 0, done.err
    reward, checkpoint = done.out.splitlines()[-1].split()
    (folder,) = (home / "results").iterdir()
    run = strop.Run(folder)
    assert 0 <= float(reward) <= 1 and float(reward) == run.metrics["train/reward"][-1]
    assert Path(checkpoint) == run.checkpoint == Path("results") / folder.name / "checkpoints" / "step_1" or run.step == 1
    assert len(run.rollouts) == 512 and {"reward", "step"} <= set(run.rollouts.columns)


@pytest.mark.exhaustive
def test_the_ten_lines_train_in_a_notebook(home: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    head, _, last = TEN_LINES.rstrip().rpartition("\n")
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(head), nbformat.v4.new_code_cell(last)])
    NotebookClient(notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": str(home)}}).execute()
    printed = "".join(output["text"] for output in notebook.cells[1].outputs)  # which may come in several pieces
    assert re.fullmatch(r"[\d.]+ results/grpo-[\d-]+/checkpoints/step_1\n", printed)


def test_the_environment_and_the_algorithm_of_the_quickstart_train_by_its_command(home: Path) -> None:
    assert set(FILES) == {"larger.py", "sign.py"}
    for name, text in FILES.items():
        (home / name).write_text(text)
    short = "grpo.max_num_steps=2 grpo.val_at_start=false grpo.val_at_end=false policy.max_total_sequence_length=256"
    command, *arguments = shlex.split(f"{COMMAND} {short}".replace("\\\n", " "))
    assert command == "strop"
    done = runs.strop(*arguments, folder=home)
    assert done.code == 0, done.err
    run = strop.Run("logs/larger")
    assert run.step == 2 and run.checkpoint is not None and set(run.rollouts["advantage"].dropna()) <= {-1.0, 0.0, 1.0}
