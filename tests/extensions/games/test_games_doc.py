"""The examples of docs/games.md, run as they stand there, and its table of options."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from strop.data.sources.source import DataSource
from strop.environments.base import Environment
from strop.environments.registry import environment_class, make_environment
from support.games import played
from support.llm_server import llm_server

PAGE = (Path(__file__).parents[3] / "docs" / "games.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_game_is_played(tmp_path: Path) -> None:
    code = next(block for block in blocks("python") if "Countdown" in block)
    (tmp_path / "countdown.py").write_text(code)
    game = make_environment(f"{tmp_path / 'countdown.py'}:Countdown", {"largest": 9})
    task = next(task for task in game.tasks(DataSource(size=50)) if task.answer == "5")
    rollout = played(game, task, "4", "3", "2")
    assert (rollout.reward, rollout.turn_states) == (1.0, ("5", "5", "2"))
    assert played(game, task, "3", "3").reward == 0.0


def test_the_example_of_roles_is_played(tmp_path: Path) -> None:
    (tmp_path / "guessing.py").write_text(next(block for block in blocks("python") if "Guessing" in block))
    guessing = make_environment(f"{tmp_path / 'guessing.py'}:Guessing")
    rollout = played(guessing, guessing.tasks(DataSource())[0], "It flows.", "river")
    assert (rollout.role, rollout.reward, rollout.others[0].role, rollout.others[0].reward) == ("proposer", 0.0, "solver", 1.0)
    assert "It flows." in rollout.others[0].messages[0].content


def test_the_example_user_is_simulated_by_script_and_by_the_example_of_an_endpoint() -> None:
    row = json.loads(blocks("json")[0])
    entry = next(entry for entry in map(yaml.safe_load, blocks("yaml")) if "users" in entry["env"])
    keys = entry["data"]["train"]
    data = DataSource(rows=[row], input_key=keys["input_key"], output_key=keys["output_key"])
    scripted = make_environment("user_simulator")
    rollout = played(scripted, scripted.tasks(data)[0], "Where?", "<answer>Lisbon</answer>")
    assert rollout.reward == 1.0 and rollout.messages[-2].content == "To Lisbon."
    with llm_server(lambda request, number: "To Lisbon!") as server:
        options = entry["env"]["users"]
        options["endpoint"]["base_url"] = server.base_url
        asked = make_environment(options.pop("type"), options)
        assert played(asked, asked.tasks(data)[0], "Where?", "<answer>Lisbon</answer>").reward == 1.0


@pytest.mark.parametrize(
    "name", ["sliding_puzzle", "number_guessing", "text_adventure", "two_player", "kuhn_poker", "user_simulator"]
)
def test_the_table_names_every_option_and_its_default(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}`.*\|$", PAGE, re.MULTILINE)
    kind = environment_class(name)
    every = {field.name for field in fields(Environment)}  # options of all environments, on their page
    for field in fields(kind):
        if field.name not in every and (
            field.name not in ("held_out_fraction", "ignore_case", "cfg", "endpoint") or f"`{field.name}`" in row
        ):
            assert f"`{field.name}`" in row, f"{name}.{field.name}"
            shown = re.search(rf"`{field.name}` \((\w+)\)", row)
            assert shown is None or str(field.default) == shown[1]
