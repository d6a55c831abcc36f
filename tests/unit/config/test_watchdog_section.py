"""The sections about what may wait and how far sampler and learner may disagree."""

from __future__ import annotations

import pytest

from strop.base_config import fields_of
from strop.config.schema.run_config import TRAINING_RUNS
from strop.generation.generation_config import MismatchConfig
from strop.monitoring.watchdog.watchdog_config import WatchdogConfig


def test_every_kind_of_training_run_has_a_watchdog() -> None:
    assert all("watchdog" in fields_of(kind) for kind in TRAINING_RUNS.values())


def test_zero_turns_a_limit_off() -> None:
    assert WatchdogConfig(environment_seconds=0.0).by_kind()["environment"] == 0
    with pytest.raises(ValueError, match="environment_seconds"):
        WatchdogConfig(environment_seconds=-1.0)


def test_nobody_ends_a_run_that_nobody_watches() -> None:
    WatchdogConfig(stop_after_seconds=60.0)
    with pytest.raises(ValueError, match=r"stop_after_seconds[\s\S]*enabled is false[\s\S]*set watchdog\.enabled=true"):
        WatchdogConfig(enabled=False, stop_after_seconds=60.0)


def test_a_run_does_not_end_without_a_warning() -> None:
    MismatchConfig(warn=1.5, stop=1.5)
    MismatchConfig(warn=None, stop=1.01)
    with pytest.raises(ValueError, match=r"below warn = 1\.2, so the run would end without a warning"):
        MismatchConfig(stop=1.1)
    with pytest.raises(ValueError, match="greater than 1"):
        MismatchConfig(warn=1.0)
