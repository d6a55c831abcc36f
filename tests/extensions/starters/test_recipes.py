"""The recipes of examples/recipes: their commands are understood, they train in small, and their pages have the numbers of their runs."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from loop.runs import metrics_of, strop
from strop.cli import main
from support.sweep import sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RECIPES = {readme.parent.name: readme.parent for readme in sorted((ROOT / "examples" / "recipes").glob("*/README.md"))}
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "recipe_curves.py"))
TINY = ["policy.device=cpu", "policy.precision=float32", "policy.max_total_sequence_length=1100"]


def copy(name: str, folder: Path, model: Path) -> Path:
    """Copy a recipe, with the tiny model in place of SmolLM2, and the checkpoint of step 1 for the later ones of its stages."""
    copied = Path(shutil.copytree(RECIPES[name], folder / name))
    for file in copied.glob("*.yaml"):
        text = file.read_text().replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(model))
        file.write_text(re.sub(r"/step_\d+/", "/step_1/", text))
    return copied


@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_passes_its_dry_run(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copy(name, tmp_path, tiny))
    commands = SCRIPT["commands"](RECIPES[name])
    assert commands
    for words in commands:
        models = [f"policy.model_name={tiny}"]
        if words[0] == "ppo":
            models += [f"value.model_name={tiny}", f"env.judged.model_name={tiny}"]
        assert main([*words, *models, "--dry-run"]) == 0, words


@pytest.mark.parametrize("name", sweep(RECIPES, "math", "code"))
def test_a_recipe_trains_two_steps_from_top_to_bottom(name: str, tiny: Path, tmp_path: Path) -> None:
    folder = copy(name, tmp_path, tiny)
    for words in SCRIPT["commands"](RECIPES[name]):
        kind, recorded = words[0], words[0] in ("sft", "dpo", "rm")
        short = {"max_num_steps": 1 if recorded else 2, "val_period": 1}
        if not recorded:
            short |= {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_val_samples": 2}
        changes = [*TINY, *(f"{kind}.{key}={value}" for key, value in short.items()), "checkpointing.save_period=1"]
        if not recorded:
            changes += ["policy.generation.max_new_tokens=8", "policy.generation.torch_cfg.kv_cache_memory_gb=0.01"]
        outcome = strop(*(re.sub(r"/step_\d+/", "/step_1/", word) for word in words), *changes, folder=folder)
        assert outcome.code == 0, outcome.err
    assert "validation/accuracy" in metrics_of(sorted((folder / "logs").iterdir(), key=lambda path: path.stat().st_ctime)[-1])[2]


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_of_a_recipe_has_the_numbers_of_its_runs_or_says_how_to_get_them(name: str) -> None:
    file, text = RECIPES[name] / "expected.json", (RECIPES[name] / "README.md").read_text()
    if file.is_file():
        assert SCRIPT["table"](json.loads(file.read_text())) in text and "![" in text and file.with_name("curve.png").is_file()
    assert file.is_file() != (f"python benchmarks/recipe_curves.py FOLDER --only {name}`" in text)
