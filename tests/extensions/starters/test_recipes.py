"""The recipes of examples/recipes: what they name exists, their commands are understood, and they train in small."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from loop.runs import strop
from strop.cli import main
from support.needs import needs_bwrap
from support.sweep import sweep

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RECIPES = {readme.parent.name: readme.parent for readme in sorted((ROOT / "examples" / "recipes").glob("*/README.md"))}
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "benchmarks" / "recipe_curves.py"))


def copy(recipe: Path, folder: Path) -> Path:
    return Path(shutil.copytree(recipe, folder / recipe.name))


@pytest.mark.parametrize("name", RECIPES)
def test_every_command_of_a_recipe_passes_its_dry_run(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy(RECIPES[name], tmp_path))
    commands = SCRIPT["commands"](RECIPES[name])
    assert commands
    for words in commands:
        key = "generation.model_name" if words[0] == "eval" else "policy.model_name"
        models = [f"{key}={tiny}"] + ([f"value.model_name={tiny}"] if words[0] == "ppo" else [])
        assert main([*words, *models, "--dry-run"]) == 0, words
