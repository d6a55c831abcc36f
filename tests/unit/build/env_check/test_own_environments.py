"""The environments of this package, and those of its pages and starters, pass."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from strop.build.env_check.environment_check import EnvironmentCheckOptions, check_environments
from strop.config import GrpoRunConfig, load_config

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
    "multi": {"type": "math_multi_reward"},
    "exact": {"type": "math", "verifier": "exact"},
    "game": {"type": "guess.py:GuessTheNumber"},
}
MORE: dict[str, dict[str, Any]] = {
    "few": {"type": "arithmetic", "max_operand": 6, "wording": "{expression}="},
    "reversal": {"type": "reversal.py:Reversal"},
    "math_verify": {"type": "math"},
    "dapo": {"type": "math", "verifier": "dapo"},
    "choice": {"type": "math", "verifier": "english_multichoice"},
    "languages": {"type": "math", "verifier": "multilingual_multichoice"},
    "products": {"type": "arithmetic", "operators": ["+", "-", "*"], "operands": 3, "max_operand": 99},
    "calculator": {"type": f"{ROOT}/examples/starters/calculator.py:Calculator"},
    "chain_sum": {"type": "reasoning_gym", "task": "chain_sum"},
    "leg_counting": {"type": "reasoning_gym", "task": "leg_counting"},
    "countdown": {"type": "reasoning_gym", "task": "countdown"},
    "logic": {"type": "reasoning_gym", "task": "propositional_logic"},
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


@pytest.mark.exhaustive
def test_environments_that_check_answers_in_other_processes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(MORE, tmp_path, 32) == {alias: [] for alias in MORE}
