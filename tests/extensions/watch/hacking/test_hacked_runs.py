"""A whole run whose reward can be hacked: the policy finds that, and the monitor sees it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loop.runs import grpo, metrics_of
from strop.cli import main

pytestmark = pytest.mark.slow

REWARDS = '''
def count_ones(task, rollout):
    """Meant for sums; pays for every 1 instead."""
    return rollout.text.count("1") / 12

def right(task, rollout):
    return rollout.text.strip() == task.answer
'''
SETTINGS: dict[str, Any] = {
    "env.arithmetic.max_operand": ...,
    "env.arithmetic.wording": ...,
    "env.ones.reward": "rewards.py:count_ones",
    "data.train.env_name": "ones",
    "data.train.dataset_name": "rows.jsonl",
    "data.validation.env_name": ...,
    "data.validation.size": ...,
    "grpo.num_prompts_per_step": 8,
    "grpo.max_num_steps": 30,
    "grpo.val_period": 0,
    "policy.generation.max_new_tokens": 12,
    "checkpointing.metric_name": None,
    "checkpointing.save_period": 4,
    "policy.optimizer.kwargs.lr": 0.01,
    "monitor.second_grader": "rewards.py:right",
    "logger.console": "plain",
    "monitor.stop_on": ["duplicate_answers"],
}


@pytest.mark.exhaustive
def test_a_policy_that_hacks_its_reward_is_seen_and_the_run_stops_where_that_was_asked_for(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{n}+{m}=", "answer": n + m} for n in range(10) for m in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    outcome = grpo(tiny, tmp_path, **SETTINGS)
    assert outcome.code == 1
    assert "monitor.stop_on names duplicate_answers: rewarded rollouts of" in outcome.err
    logged = metrics_of(tmp_path / "logs")
    last = max(logged)
    assert last < 30 and logged[last]["monitor/duplicate_answers_alarm"] == 1.0
    assert "monitor/second_grader" not in logged[1] and logged[last]["monitor/second_grader"] > 0.8

    warning = next(line for line in (outcome.out + outcome.err).splitlines() if "(duplicate_answers)" in line)
    found = re.search(r"strop rollouts (\S+) --step (\d+) --task '(.+?)'", warning)
    assert found is not None
    monkeypatch.chdir(tmp_path)
    assert main(["rollouts", found[1], "--step", found[2], "--task", found[3]]) == 0
    assert found[3] in capsys.readouterr().out
    assert main(["rollouts", found[1], "--flagged"]) == 0
    assert "flagged: duplicate_answers" in capsys.readouterr().out

    again = grpo(tiny, tmp_path, **SETTINGS)  # from the last checkpoint, with what the monitor knew then
    assert again.code == 1
    resumed = metrics_of(tmp_path / "logs")
    assert max(resumed) == last
    watched = {
        step: {name: value for name, value in line.items() if name.startswith("monitor/")} for step, line in logged.items()
    }
    assert watched == {
        step: {name: value for name, value in line.items() if name.startswith("monitor/")} for step, line in resumed.items()
    }
