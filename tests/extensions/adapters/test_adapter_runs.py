"""Whole runs in environments of other libraries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loop.runs import Outcome, grpo, metrics_of
from support.adapter_servers import nemo_gym_counter, served

pytestmark = pytest.mark.slow
SHORT = {
    "env__arithmetic__max_operand": ...,
    "env__arithmetic__wording": ...,
    "policy__max_total_sequence_length": 256,
    "grpo__max_rollout_turns": 3,
    "grpo__num_prompts_per_step": 2,
    "grpo__num_generations_per_prompt": 4,
    "grpo__max_num_steps": 2,
    "grpo__val_period": 2,
    "data__validation__size": 2,
    "checkpointing__enabled": False,
    "checkpointing__metric_name": None,
}


def run(tiny: Path, folder: Path, **changes: object) -> tuple[Outcome, dict[int, dict[str, float]]]:
    outcome = grpo(tiny, folder, **{**SHORT, **changes})
    assert outcome.code == 0, outcome.err
    return outcome, metrics_of(folder / "logs")


@pytest.mark.exhaustive
def test_a_run_plays_games_of_two_libraries_and_logs_their_rewards(tiny, tmp_path):
    lake = {"id": "FrozenLake-v1", "instruction": "", "invalid_reward": -0.1}
    _, metrics = run(
        tiny,
        tmp_path,
        data__train__env_name=...,
        data__train=[{"env_name": "lake"}, {"env_name": "guess"}],
        data__validation__env_name="lake",
        env__lake={"type": "gymnasium", **lake},
        env__guess={"type": "textarena", "id": "GuessTheNumber-v0"},
        data__max_input_seq_length=900,
        policy__max_total_sequence_length=1024,
    )
    assert set(metrics) == {1, 2}
    for name in ("lake", "guess"):
        assert "train/rewards/solved" in metrics[1] and f"train/environments/{name}/over" in metrics[1]
    assert "validation/accuracy" in metrics[2]


def test_a_run_trains_on_tasks_of_a_server_of_nemo_gym_through_the_gateway(tiny, tmp_path):
    row = {"responses_create_params": {"input": [{"role": "user", "content": "1+2="}]}, "expected_count": 3, "initial_count": 3}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "expected_count": 3 + n % 2}) + "\n" for n in range(8)))
    with served(nemo_gym_counter()) as url:
        _, metrics = run(
            tiny,
            tmp_path,
            data__train={"dataset_name": str(tmp_path / "rows.jsonl"), "env_name": "nemo_gym"},
            data__train__env_name=...,
            data__validation__env_name=...,
            data__validation__size=...,
            grpo__val_period=0,
            env__nemo_gym={"servers": {"counter": {"url": url}}},
        )
    assert metrics[1]["train/groups_dropped_for_errors"] == 0 and metrics[1]["train/environments/nemo_gym/gateway/requests"] == 1
    assert 0 <= metrics[2]["train/rewards/score"] <= 1
