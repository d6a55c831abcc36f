"""Every built-in training set by name, from the command line to a step that was trained on it, on rows with the schema of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from loop.kinds import recorded_config
from loop.runs import Environ, metrics_of, overrides, strop, tiny_config
from strop.data.builtin.math_training_sets import MATH_TRAINING_SETS
from strop.data.builtin.recorded_sets import CONVERSATION_SETS, PREFERENCE_SETS
from support.sweep import sweep

pytestmark = pytest.mark.slow

RUNS: Mapping[str, tuple[str, str]] = {
    **{f"{kind} on {name}": (kind, name) for kind in ("grpo", "sft") for name in (*MATH_TRAINING_SETS, "gsm8k")},
    **{f"sft on {name}": ("sft", name) for name in (*CONVERSATION_SETS, "HelpSteer3")},
    **{f"{kind} on {name}": (kind, name) for kind in ("dpo", "rm") for name in PREFERENCE_SETS},
}


def settings(kind: str, name: str, model: Path) -> dict[str, Any]:
    """Return the settings of one step on as few rows as a set has here, each several times."""
    rows = {"dataset_name": name, "repeat": 8}
    if kind == "grpo":
        shared = tiny_config(model, data__train__env_name=..., data__validation__env_name=..., data__validation__size=...)
        changes = {"env.arithmetic.max_operand": ..., "env.arithmetic.wording": ..., "env.math": {}, "data.train": rows}
        return {**shared, **changes, **LENGTHS, "grpo.max_num_steps": 1, "grpo.val_period": 0, "checkpointing.metric_name": None}
    shared = recorded_config(kind, model)
    return {**shared, **LENGTHS, "data.train": rows, "data.validation": rows, f"{kind}.max_num_steps": 1}


LENGTHS = {"policy.max_total_sequence_length": 1024, "data.max_input_seq_length": 1000}


@pytest.mark.parametrize("name", sweep(RUNS, "grpo on NuminaMath-1.5", "sft on open_assistant", "dpo on hh-rlhf"))
def test_a_set_trains_by_its_name(name: str, tiny: Path, tmp_path: Path, local_hub: Path) -> None:
    kind, dataset = RUNS[name]
    environment = {"STROP_DATASETS": str(local_hub), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    done = strop(kind, *overrides(settings(kind, dataset, tiny)), folder=tmp_path, before=Environ(environment))
    assert done.code == 0, done.err
    (logged,) = [line for step, line in metrics_of(tmp_path / "logs").items() if step == 1]
    assert logged["train/loss"] == logged["train/loss"] and logged["train/groups_dropped_for_errors"] == 0
