"""Keys about ending early: what they mean in seconds, and what is refused."""

from __future__ import annotations

import pytest

from strop.config import ConfigError, load_config
from strop.config.schema.run_config import GrpoRunConfig

BASE = ("policy.model_name=m", "data.train.env_name=arithmetic", "env.arithmetic={}", "grpo.val_period=0")
BY = "checkpointing.checkpoint_must_save_by"


def loaded(*overrides: str) -> GrpoRunConfig:
    return load_config(None, [*BASE, "checkpointing.metric_name=null", *overrides], root=GrpoRunConfig).config


@pytest.mark.parametrize(
    ("text", "seconds"), [("null", None), ("'00:03:45:00'", 13500.0), ("'1:0:0:1'", 86401.0), ("'00:00:00:00'", 0.0)]
)
def test_run_time_is_days_hours_minutes_and_seconds(text: str, seconds: float | None) -> None:
    assert loaded(f"{BY}={text}").checkpointing.save_deadline_seconds == seconds


@pytest.mark.parametrize("text", ["'3:45:00'", "'4 hours'", "14400"])
def test_any_other_form_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(ConfigError, match=BY):
        loaded(f"{BY}={text}")


@pytest.mark.parametrize(("off", "key"), [("enabled=false", "enabled"), ("save_period=0", "save_period")])
def test_a_time_to_save_by_where_nothing_is_saved_is_a_warning_as_recipes_of_nemo_rl_run_so(off: str, key: str) -> None:
    warnings = load_config(None, [*BASE, f"{BY}='00:01:00:00'", f"checkpointing.{off}"], root=GrpoRunConfig).warnings
    assert any(f"no checkpoints are saved: checkpointing.{key} is" in str(warning) for warning in warnings)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match="save_on_sigterm_within"):
        loaded("checkpointing.save_on_sigterm_within=-1")
