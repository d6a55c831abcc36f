"""Whole runs against earlier selves of the policy: snapshots, kills, LoRA, asynchronous training."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from loop.killing import Kill
from loop.runs import metrics_of, overrides, repeatable, strop, tiny_config

pytestmark = pytest.mark.slow


def against_past(model: Path, **changes: Any) -> list[str]:
    dropped = [key for key in tiny_config(model) if key.startswith(("data.", "env."))]
    own = {
        "data.train.env_name": "game",
        "env.game.type": f"{Path(__file__).with_name('versus.py')}:Versus",
        "policy.generation.max_new_tokens": 8,
        "grpo.num_prompts_per_step": 4,
        "grpo.num_generations_per_prompt": 4,
        "grpo.max_num_steps": 6,
        "grpo.max_rollout_turns": 2,
        "grpo.val_period": 0,
        "checkpointing.metric_name": None,
        "checkpointing.save_period": 1,
    }
    return overrides({**tiny_config(model), **dict.fromkeys(dropped, ...), **own, **changes})


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.exhaustive
def test_a_run_against_earlier_selves_that_was_killed_ends_as_if_nothing_had_happened(tiny: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    assert strop("grpo", *against_past(tiny), folder=folders[0]).code == 0
    assert strop("grpo", *against_past(tiny), folder=folders[1], before=Kill("at the optimizer step", 6)).code == -signal.SIGKILL
    assert strop("grpo", *against_past(tiny), folder=folders[1]).code == 0
    wanted, found = (repeatable(metrics_of(folder / "logs")) for folder in folders)
    assert found == wanted
    ages = [wanted[step]["train/environments/game/age"] for step in range(1, 7)]
    assert ages[:2] == [0, 1] and max(ages) > 2, "the first self, then an older one than the newest"
    assert len({wanted[step]["train/environments/game/said"] for step in range(1, 7)}) > 1
    assert names_of(folders[1] / "results" / "step_6" / "past_selves") == ["4.safetensors", "6.safetensors"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_lora_run_keeps_adapters_alone(asynchronous: bool, tiny: Path, tmp_path: Path) -> None:
    lora = {"policy.dtensor_cfg.lora_cfg.enabled": True, "policy.dtensor_cfg.lora_cfg.dim": 4, "data.validation.size": 4}
    later = {"grpo.async_grpo.enabled": True, "grpo.async_grpo.max_trajectory_age_steps": 1} if asynchronous else {}
    outcome = strop("grpo", *against_past(tiny, **lora, **later, **{"grpo.val_period": 3}), folder=tmp_path)
    assert outcome.code == 0, outcome.err
    logged = metrics_of(tmp_path / "logs")
    assert logged[6]["train/environments/game/age"] > 0 and logged[6]["train/groups_dropped_for_errors"] == 0
    assert "validation/environments/game/age" in logged[6] or any(name.startswith("validation/") for name in logged[6])
    saved = load_file(tmp_path / "results" / "step_6" / "past_selves" / "6.safetensors")
    assert saved and all("lora" in name for name in saved)
