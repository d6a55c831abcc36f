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
from strop.runs.env_check.environment_check import EnvironmentCheckOptions, check_environments
from strop.runs.env_check.scripted_episode import play
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
MORE: dict[str, dict[str, Any]] = {
    "multi": {"type": "math_multi_reward"},
    "game": {"type": "guess.py:GuessTheNumber"},
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


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def list_new(folder: Path) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the options and the data of environments with tools, programs, games, verifiers and other libraries."""
    facts = [
        {"problem": f"The capital of country {n}?", "answer": f"City{n * 37 % 101}", "citations": [f"d-{n}"]} for n in range(40)
    ]
    sums = [{"problem": f"{n + 11} boxes hold {n + 3} pens each?", "answer": str((n + 11) * (n + 3))} for n in range(40)]
    programs = [{"text": f"Write add_{n}, which adds {n}.", "test_list": [f"assert add_{n}(1) == {n + 1}"]} for n in range(8)]
    users = [{"problem": f"I am guest {n}.", "answer": f"tea{n}", "replies": {"what": f"Tea{n}, please."}} for n in range(12)]
    qa, pens = (
        {"dataset_name": write_rows(folder, "facts.jsonl", facts)},
        {"dataset_name": write_rows(folder, "pens.jsonl", sums)},
    )
    games = {"size": 40}
    form = {"verifier": "tags", "tags": ["answer"], "weight": 0.1}
    composed = {
        "right": {"verifier": "exact_match", "tag": "answer"},
        "form": form,
        "short": {"verifier": "length", "limit": 200},
    }
    lake = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": ["left", "down", "right", "up"], "render": True}
    return {
        "sliding_puzzle": ({"type": "sliding_puzzle"}, games),
        "calculator": ({"type": "arithmetic", "max_operand": 30, "tools": ["calculator"]}, games),
        "number_guessing": ({"type": "number_guessing"}, games),
        "agent": ({"type": "agent", "command": ["true"]}, qa),
        "text_adventure": ({"type": "text_adventure"}, games),
        "two_player": ({"type": "two_player"}, games),
        "nim": ({"type": "two_player", "game": "nim", "opponent": "self", "opening_moves": 4}, games),
        "user_simulator": ({"type": "user_simulator"}, {"dataset_name": write_rows(folder, "users.jsonl", users)}),
        "composed": ({"type": "reward_function", "rewards": composed}, qa),
        "cites": ({"type": "reward_function", "rewards": {"f1": {"verifier": "f1"}, "cites": {"verifier": "citation"}}}, qa),
        "code_interpreter": ({"type": "code_interpreter"}, pens),
        "python": ({"type": "math", "tools": ["python"]}, pens),
        "code": ({"type": "code"}, {"dataset_name": write_rows(folder, "code.jsonl", programs), "input_key": "text"}),
        "humaneval": ({"type": "humaneval"}, {"size": 4}),
        "gymnasium": ({"type": "gymnasium", **lake}, games),
        "textarena": ({"type": "textarena", "id": "GuessTheNumber-v0"}, games),
        "tic_tac_toe": ({"type": "textarena", "id": "TicTacToe-v0", "num_players": 2}, games),
    }


def check_new(names: list[str], folder: Path) -> dict[str, list[str]]:
    known = list_new(folder)
    values = {
        "policy": {"model_name": "no_model"},
        "env": {name: known[name][0] for name in names},
        "data": {"train": [{"env_name": name, **known[name][1]} for name in names]},
        "grpo": {"max_rollout_turns": 8},
    }
    config = load_config(None, root=GrpoRunConfig, values=values, check=False).config
    reports = check_environments(config, EnvironmentCheckOptions(tasks=6))
    return {report.name: [f"{finding.check}: {finding.message}" for finding in report.faults] for report in reports}


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


@pytest.mark.exhaustive
def test_environments_with_tools_programs_games_verifiers_and_other_libraries_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = list(list_new(tmp_path))
    assert check_new(names, tmp_path) == {name: [] for name in names}


@pytest.mark.exhaustive
def test_environments_that_check_answers_in_other_processes_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(MORE, tmp_path, 32) == {alias: [] for alias in MORE}
