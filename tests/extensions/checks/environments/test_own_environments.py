"""The environments of this package, and those of its pages and starters, pass."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.config import GrpoRunConfig, load_config
from strop.data.sources.source import DataSource
from strop.environments.registry import make_environment
from strop.extensions.checks.environment_check import EnvironmentCheckOptions, check_environments
from strop.extensions.checks.reward_checks import play
from strop.types import Ending

ROOT = Path(__file__).parents[4]
ROWS = [
    {
        "problem": f"{n + 11} boxes hold {n + 3} pens each. How many pens? End with 'Answer: NUMBER'.",
        "answer": str((n + 11) * (n + 3)),
    }
    for n in range(60)
]
CHOICES = [
    {"problem": f"{n} squared is? A) {n * n} B) {n} C) {2 * n} D) 7. Say 'Answer: LETTER'.", "answer": "ABCD"[n * 7 % 4]}
    for n in range(60)
]
BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)

QUICK: dict[str, dict[str, Any]] = {
    "sums": {"type": "arithmetic", "max_operand": 30},
    "exact": {"type": "math", "verifier": "exact"},
}


def check(environments: Mapping[str, dict[str, Any]], folder: Path, tasks: int) -> dict[str, list[str]]:
    for name, rows in (("rows.jsonl", ROWS), ("choices.jsonl", CHOICES)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, code in BLOCKS:
        (folder / name).write_text(code)

    def entry(alias: str, part: str) -> dict[str, Any]:
        if environments[alias]["type"].startswith("math"):
            name = "choices.jsonl" if alias in ("choice", "languages") else "rows.jsonl"
            return {"env_name": alias, "dataset_name": str(folder / name)}
        if alias == "calculator":
            return {"env_name": alias, "dataset_name": str(ROOT / "examples/starters/sums.jsonl"), "input_key": "question"}
        return {"env_name": alias, "size": 100}

    values = {
        "policy": {"model_name": "no_model"},
        "env": environments,
        "data": {"train": [entry(alias, "train") for alias in environments]},
        "grpo": {"max_rollout_turns": 3},
    }
    config = load_config(None, root=GrpoRunConfig, values=values, check=False).config
    reports = check_environments(config, EnvironmentCheckOptions(tasks=tasks))
    return {report.name: [f"{finding.check}: {finding.message}" for finding in report.faults] for report in reports}


def test_simple_environments_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(QUICK, tmp_path, 12) == {alias: [] for alias in QUICK}


@pytest.mark.parametrize(("name", "size"), [("sliding_puzzle", 8), ("text_adventure", 8)])
def test_the_turns_that_a_game_knows_solve_its_tasks(name: str, size: int) -> None:
    environment = make_environment(name)
    for task in environment.tasks(DataSource(size=size)):
        played = asyncio.run(play(environment, task, environment.reference_turns(task), max_turns=30))
        assert played.error is None and played.rollout.ending is Ending.STOP and played.reward == 1.0


def test_a_policy_against_itself_meets_its_own_text_and_tools_are_open() -> None:
    for options in ({"type": "two_player", "game": "nim", "opponent": "self"}, {"type": "arithmetic", "tools": ["calculator"]}):
        environment = make_environment(str(options.pop("type")), options)
        played = asyncio.run(play(environment, environment.tasks(DataSource(size=2))[0], "<move>1</move>", max_turns=9))
        assert played.error is None and played.rollout.ending is Ending.STOP
