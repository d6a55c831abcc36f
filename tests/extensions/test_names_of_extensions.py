"""Names that extensions declare, where core's own are tested too: registries, streams, rewards, recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop import plugins
from strop.algorithms.policy_gradient.grpo import GRPO, GroupRelative
from strop.config import EvalRunConfig, GrpoRunConfig, load_config
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.environments.base import EnvironmentConfigError
from strop.environments.registry import environment_class, make_environment
from strop.environments.verifier_registry import list_verifiers, make_verifier
from strop.extensions.judges.judge import _read_template
from strop.runs.run_algorithm import make_run_algorithm

CHATS = """
class Chats:
    def __init__(self, level=0, **kwargs):
        talks = [[("user", f"{n}+{level}?"), ("assistant", str(n + level))] for n in range(8)]
        self.dataset = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
"""
JUDGE = {"base_url": "http://x/v1", "model": "m"}


@pytest.mark.parametrize("name", sorted(plugins.declared("environments")))
def test_every_declared_environment_resolves(name: str) -> None:
    assert environment_class(name).__name__


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("agent", {"command": "node agent.js"}, r"it must be a list, such as \[node, agent.js\]"),
        ("agent", {"command": ["no_such_program"]}, "command starts 'no_such_program', but there is no such program here"),
        ("agent", {"command": ["./run.sh"], "directory": "/no_such"}, "directory is '/no_such', and there is no such folder"),
        (
            "arithmetic",
            {"tools": [{"mcp": {"command": ["no_such_program"]}}]},
            "mcp.command starts 'no_such_program', but there is no",
        ),
        ("arithmetic", {"tools": ["calculater"]}, "did you mean 'calculator'"),
        ("arithmetic", {"tools": [{"mcp": {"comand": ["x"]}}]}, "no option 'comand'; did you mean 'command'"),
        ("arithmetic", {"tools": [{"mcp": {}}]}, "mcp needs command"),
        ("arithmetic", {"tools": [{"mcp": {"command": "server"}}]}, "the option command of the tool mcp"),
        ("math", {"verifier": "sympy"}, "'math_verify', 'exact', 'dapo'"),
        ("math", {"timeout_s": object()}, "timeout_s"),
        ("reasoning_gym", {}, "needs the option task"),
        ("sliding_puzzle", {"cfg": {"max_move": 3}}, "it has no key 'max_move'; did you mean 'max_moves'"),
        ("sliding_puzzle", {"cfg": {"game_config": {"siz": 3}}}, "game_config has no key 'siz'; did you mean 'size'"),
        ("sliding_puzzle", {"cfg": {"game_config": {"size": "3"}}}, "game_config.size: Input should be a valid integer"),
        ("two_player", {"game": "tictactoe"}, "no game 'tictactoe'; did you mean 'tic_tac_toe'"),
    ],
)
def test_what_cannot_be_made_is_an_error_that_helps(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentConfigError, match=message):
        make_environment(name, options)


@pytest.mark.parametrize("name", ["code", "ifeval", "nemo_gym"])
def test_an_environment_that_needs_the_number_of_rows_refuses_a_stream(name: str, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "f"}], "problem": "f", "answer": "", "tests": ["assert f() == 1"]}
    row |= {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps({**row, 'responses_create_params': {'input': 'f'}})}\n" * 3)
    source = DataSource(dataset_name=str(tmp_path / "rows.jsonl"), streaming=True)
    options = {"servers": {"one": {"url": "http://127.0.0.1:1"}}} if name == "nemo_gym" else {}
    with pytest.raises(DataError, match=r"is streamed, .* its number of rows, which is needed here, is unknown"):
        make_environment(name, options).tasks(source)


def test_a_judge_that_compares_pairs_has_no_reward_per_turn() -> None:
    rewards = {"a": {"verifier": "pairwise_judge", "endpoint": JUDGE, "per_turn": True}}
    with pytest.raises(EnvironmentConfigError, match="compares"):
        make_environment("reward_function", {"rewards": rewards})


def test_a_judge_without_its_key_is_missed_when_the_run_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "1+1?"}))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    judge = {"verifier": "judge", "endpoint": {**JUDGE, "api_key_env": "NO_SUCH_KEY"}}
    with pytest.raises(EnvironmentConfigError, match="NO_SUCH_KEY, which is not set"):
        make_environment("reward_function", {"rewards": {"good": judge}}).tasks(
            DataSource(dataset_name=str(tmp_path / "rows.jsonl"))
        )


def test_every_verifier_says_whether_it_compares() -> None:
    assert {"code", "judge", "pairwise_judge"} <= set(list_verifiers())
    assert make_verifier("pairwise_judge", {"endpoint": JUDGE}).compares


def test_a_byte_order_mark_is_no_part_of_a_judges_template(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\ufeffhello: {{ reply }}", encoding="utf-8")
    assert _read_template(str(tmp_path / "text.txt")) == "hello: {{ reply }}"


def test_nemo_rls_name_of_an_advantage_is_read() -> None:
    words = ["policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.adv_estimator.name=grpo"]
    algorithm = make_run_algorithm(load_config(None, words, root=GrpoRunConfig).config)
    assert algorithm == GRPO(advantage=GroupRelative(leave_one_out=True, deviation="others"))


def test_a_recipe_hands_the_keys_that_only_the_class_knows_to_the_class(tmp_path: Path) -> None:
    (tmp_path / "chats.py").write_text(CHATS)
    entry = {"dataset_name": f"{tmp_path}/chats.py:Chats", "level": 2, "env_name": "math", "processor": "math_hf_data_processor"}
    values = {"policy": {"model_name": "m"}, "env": {"math": {}}, "data": {"train": entry}}
    config = load_config(None, root=GrpoRunConfig, values=values, check=False).config
    assert config.data.train[0].dataset_kwargs == {"level": 2}
    assert DataSource.from_entry(config.data.train[0], seed=0, part="train").load_rows()[1].answer == "3"


def test_an_evaluation_reads_nemo_rls_names_of_columns() -> None:
    words = ["generation.model_name=m", "data.dataset_name=rows.jsonl", "data.problem_key=Question", "data.solution_key=Answer"]
    data = load_config(None, words, root=EvalRunConfig, check=False).config.data
    assert (data.input_key, data.output_key) == ("Question", "Answer")
