"""Told to end (SIGTERM, or its time is up) a run finishes its step, saves it, says how to go on, and goes on as if nothing had been."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from loop.preempted import SendStopSignal
from loop.runs import Outcome, grpo, metrics_of, repeatable
from strop.monitoring.rollout_store.rollout_store import RolloutStore

pytestmark = pytest.mark.slow

# Nothing is due at the steps in which the runs are told to end; what is due after the last step is due after the last step alone.
CHANGES: dict[str, Any] = {
    "grpo.val_period": 4,
    "grpo.val_at_start": True,
    "grpo.val_at_end": True,
    "checkpointing.save_period": 4,
    "checkpointing.metric_name": None,
    "logger.console": "plain",
}


@pytest.fixture(scope="module")
def uninterrupted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    outcome = grpo(tiny, folder, **CHANGES)
    assert outcome.code == 0, outcome.err
    return folder


def steps_saved(folder: Path) -> set[str]:
    return {path.name for path in (folder / "results").glob("step_*")}


def says_how_to_go_on(outcome: Outcome) -> bool:
    how = "Start the same command again to continue from the newest checkpoint in results:\n    strop grpo"
    return how in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("point", "nth", "step"),
    [
        pytest.param("at a validation", 1, 0, marks=pytest.mark.exhaustive),  # before the first step
        pytest.param("while generating", 8, 2, marks=pytest.mark.exhaustive),
        pytest.param("at the optimizer step", 3, 3, marks=pytest.mark.exhaustive),
        pytest.param("at the stored rollouts", 2, 2, marks=pytest.mark.exhaustive),
        ("at a publish", 6, 5),  # the first publish is before the first step
        pytest.param("at a save", 1, 5, marks=pytest.mark.exhaustive),  # too late for this step: the next one is the last
    ],
)
def test_a_run_that_is_told_to_end_saves_its_step_and_continues_bit_for_bit(
    tiny: Path, tmp_path: Path, uninterrupted: Path, point: str, nth: int, step: int
) -> None:
    ended = grpo(tiny, tmp_path, before=SendStopSignal(point, nth), **CHANGES)
    assert ended.code == 143 and f"SIGTERM: the run ended after step {step}." in ended.err, ended.err
    if step:
        assert f"step_{step}" in steps_saved(tmp_path) and says_how_to_go_on(ended)
        assert list(metrics_of(tmp_path / "logs"))[-1] == step
    else:
        assert "from the beginning (no checkpoint in results yet)" in ended.err

    resumed = grpo(tiny, tmp_path, **CHANGES)
    assert resumed.code == 0 and (not step or f"continuing after step {step}" in resumed.out), resumed.err
    assert repeatable(metrics_of(tmp_path / "logs")) == repeatable(metrics_of(uninterrupted / "logs"))
    assert list(RolloutStore(tmp_path / "logs").read_all()) == list(RolloutStore(uninterrupted / "logs").read_all())
    weights = Path("results") / "step_6" / "policy" / "weights" / "model.safetensors"
    assert (tmp_path / weights).read_bytes() == (uninterrupted / weights).read_bytes()


def test_a_second_sigterm_ends_it_at_once(tiny: Path, tmp_path: Path) -> None:
    ended = grpo(tiny, tmp_path, before=SendStopSignal("at the optimizer step", 2, times=2, extra_seconds=60), **CHANGES)
    assert ended.code == 143 and "A second SIGTERM: the run ends here" in ended.err
    assert not steps_saved(tmp_path)


def test_a_step_that_takes_longer_than_there_is_time_is_not_waited_for(tiny: Path, tmp_path: Path) -> None:
    """Also where the event loop is blocked."""
    limit = {"checkpointing.save_on_sigterm_within": 0.5}
    started = time.monotonic()
    ended = grpo(tiny, tmp_path, before=SendStopSignal("at the optimizer step", 6, extra_seconds=60), **CHANGES, **limit)
    assert ended.code == 143 and "The step took longer than 0.5 s after SIGTERM: the run ends here" in ended.err
    assert steps_saved(tmp_path) == {"step_4"} and time.monotonic() - started < 50


@pytest.mark.exhaustive
def test_a_run_whose_time_is_up_saves_and_stops(tiny: Path, tmp_path: Path, uninterrupted: Path) -> None:
    """The time counts from the start of the process: there is none left for a first step here."""
    ended = grpo(tiny, tmp_path, **CHANGES, **{"checkpointing.checkpoint_must_save_by": "00:00:00:00"})
    assert ended.code == 143 and "the time is up (checkpointing.checkpoint_must_save_by): the run ended after step 0" in ended.err
    long = {**CHANGES, "grpo.max_num_steps": 100_000, "checkpointing.save_period": 100_000, "grpo.val_period": 0}
    ended = grpo(tiny, tmp_path, **long, **{"checkpointing.checkpoint_must_save_by": "00:00:00:04"})
    last = list(metrics_of(tmp_path / "logs"))[-1]
    assert ended.code == 143 and last > 0 and steps_saved(tmp_path) == {f"step_{last}"} and says_how_to_go_on(ended)


def test_where_nothing_is_saved_sigterm_ends_a_run_like_any_program(tiny: Path, tmp_path: Path) -> None:
    changes = {**CHANGES, "checkpointing.save_period": 0}
    assert grpo(tiny, tmp_path, before=SendStopSignal("at the optimizer step", 2), **changes).code == -signal.SIGTERM
