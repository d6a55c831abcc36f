"""The notebooks of examples/notebooks are what their script writes, and run."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

from loop.runs import start
from strop.extensions.starters.init_command import STARTERS
from support.sweep import sweep

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[3] / "examples" / "notebooks"
SMALL = {
    "policy.device": "cpu",
    "policy.precision": "float32",
    "policy.max_total_sequence_length": 900,
    "checkpointing.metric_name": None,
}
SAMPLED = {
    "num_prompts_per_step": 2,
    "num_generations_per_prompt": 2,
    "max_num_steps": 1,
    "max_val_samples": 2,
}
ENGINE = {"policy.generation.max_new_tokens": 8, "policy.generation.torch_cfg.kv_cache_memory_gb": 0.01}


def test_the_notebooks_are_those_of_the_starters() -> None:
    notebook = runpy.run_path(str(FOLDER / "make_notebooks.py"))["notebook"]
    written = {path.name: path.read_text() for path in FOLDER.glob("*.ipynb")}
    assert written == {f"{kind.replace('-', '_')}.ipynb": notebook(kind) for kind in STARTERS}


@pytest.mark.parametrize("kind", sweep(STARTERS, "grpo"))
def test_a_notebook_runs_from_top_to_bottom(kind: str, tiny: Path, tmp_path: Path) -> None:
    cells = json.loads((FOLDER / f"{kind.replace('-', '_')}.ipynb").read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    code = re.sub(r'(main\(\["init", .*?)\]\)', rf'\1, "--model", "{tiny}"])', code)
    code = re.sub(r'(\w+)=\{"max_num_(\w+)": \d+\}', lambda found: f"**{small(found[1], found[2])!r}", code)
    code = code.replace('config="eval.yaml"', 'config="eval.yaml", **{"generation.vllm_cfg.max_model_len": 900}')
    (tmp_path / "notebook.py").write_text(code)
    done = start(["notebook.py"], tmp_path).finish()
    assert done.code == 0, done.err


def small(section: str, length: str) -> dict[str, object]:
    """Settings in place of the length of a run, so that it takes a second."""
    if length == "epochs":
        return {**SMALL, f"{section}.max_num_steps": 1}
    return {**SMALL, **ENGINE, **{f"{section}.{key}": value for key, value in SAMPLED.items()}}
