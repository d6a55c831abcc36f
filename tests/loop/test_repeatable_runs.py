"""Asynchronous runs on the engine's clock: repeated, resumed and replayed to the last bit, whatever time the environments take."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from loop.killing import Kill
from loop.runs import Outcome, metrics_of, overrides, repeatable, strop, tiny_config
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from support.sweep import sweep

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WEIGHTS = Path("results") / "step_6" / "policy" / "weights" / "model.safetensors"
ON_CLOCK = {"repeatable": True}
IN_FLIGHT = {"in_flight_weight_updates": True}
MODES: dict[str, dict[str, Any]] = {
    "drained, k = 1": {"max_trajectory_age_steps": 1},
    "in flight, k = 1": {**IN_FLIGHT, "max_trajectory_age_steps": 1, "answer_delay": 5},
    "in flight, k = 2": {**IN_FLIGHT, "max_trajectory_age_steps": 2},
    "in flight, k = 2, a delay": {**IN_FLIGHT, "max_trajectory_age_steps": 2, "answer_delay": 3},
    "windowed": {**IN_FLIGHT, "max_trajectory_age_steps": 2, "order": "windowed", "window": 6, "slots": 9, "answer_delay": 2},
    "drop_too_old": {**IN_FLIGHT, "max_trajectory_age_steps": 1, "order": "drop_too_old", "slots": 15, "answer_delay": 4},
}
KILLS = (Kill("at the optimizer step", 4), Kill("at a publish", 2), Kill("at a save", 1, "after"), Kill("while generating", 1))


def run(model: Path, folder: Path, section: dict[str, Any], *, before: Any = None, **changes: Any) -> Outcome:
    """Six steps of four groups, with dialogues that take a random time."""
    settings = tiny_config(model)
    settings |= dict.fromkeys([key for key in settings if key.startswith(("data.", "env."))], ...)
    settings |= {
        "policy.max_total_sequence_length": 160,
        "policy.generation.torch_cfg.kv_cache_memory_gb": 0.02,
        "policy.generation.torch_cfg.max_num_seqs": 24,
        "grpo.max_rollout_turns": 3,
        "grpo.val_period": 2,
        "data.train.env_name": "disturbed",
        "data.validation.env_name": "disturbed",
        "data.validation.size": 6,
        "env.disturbed.type": f"{HERE / 'disturbed.py'}:DisturbedGroups",
        "grpo.async_grpo.enabled": True,
        **{f"grpo.async_grpo.{name}": value for name, value in section.items()},
        **changes,
    }
    return strop("grpo", *overrides(settings), folder=folder, before=before)


def assert_same_run(folder: Path, wanted: Path) -> None:
    own, other = (repeatable(metrics_of(path / "logs")) for path in (folder, wanted))
    assert own == other
    assert list(RolloutStore(folder / "logs").read_all()) == list(RolloutStore(wanted / "logs").read_all())
    for path in sorted((wanted / "logs" / "validation").iterdir()):
        samples = [json.loads((root / "logs" / "validation" / path.name).read_text())["tasks"] for root in (folder, wanted)]
        assert samples[0] == samples[1]
    assert (folder / WEIGHTS).read_bytes() == (wanted / WEIGHTS).read_bytes()


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "logs" / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("mode", sweep(MODES, "in flight, k = 2, a delay"))
def test_an_asynchronous_run_repeats_bit_for_bit_though_environments_take_a_random_time(tiny, tmp_path, mode):
    section = {**ON_CLOCK, "record_events": True, **MODES[mode]}
    for name in ("first", "again"):
        outcome = run(tiny, tmp_path / name, section)
        assert outcome.code == 0, outcome.err
    assert_same_run(tmp_path / "again", tmp_path / "first")
    assert read_events(tmp_path / "again") == read_events(tmp_path / "first")
    steps = metrics_of(tmp_path / "first" / "logs")
    assert len({line["train/loss"] for line in steps.values()}) == 6 and steps[6]["train/staleness_max"] >= 1
    assert all(line["timing/generation/waited_for_answers"] >= 0 for line in steps.values())


@pytest.mark.parametrize("mode", sweep(MODES))
def test_killed_and_resumed_a_run_goes_on_bit_for_bit(tiny, tmp_path, mode):
    section = {**ON_CLOCK, "record_events": True, **MODES[mode]}
    whole = run(tiny, tmp_path / "whole", section)
    assert whole.code == 0, whole.err
    for kill in KILLS:
        outcome = run(tiny, tmp_path / "parts", section, before=kill)
        assert outcome.code == -signal.SIGKILL, f"it did not come to {kill}: {outcome}"
    outcome = run(tiny, tmp_path / "parts", section)
    assert outcome.code == 0, outcome.err
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    assert read_events(tmp_path / "parts") == read_events(tmp_path / "whole")


@pytest.mark.parametrize("mode", sweep(MODES, "windowed"))
def test_a_recorded_run_is_replayed_bit_for_bit(tiny, tmp_path, mode):
    section = {**MODES[mode], "answer_delay": 0}
    recorded = run(tiny, tmp_path / "recorded", {**section, "record_events": True})
    assert recorded.code == 0, recorded.err
    events = tmp_path / "recorded" / "logs" / "events.jsonl"
    replayed = run(tiny, tmp_path / "replayed", {**section, "replay_events": str(events), "record_events": True})
    assert replayed.code == 0, replayed.err
    assert_same_run(tmp_path / "replayed", tmp_path / "recorded")
    assert read_events(tmp_path / "replayed") == read_events(tmp_path / "recorded")


@pytest.mark.exhaustive
def test_a_recorded_run_that_was_killed_is_replayed_and_a_killed_replay_too(tiny, tmp_path):
    section = {**IN_FLIGHT, "max_trajectory_age_steps": 2}
    for kill in (*KILLS, None):
        recorded = run(tiny, tmp_path / "recorded", {**section, "record_events": True}, before=kill)
        assert recorded.code == (0 if kill is None else -signal.SIGKILL), recorded.err
    events = str(tmp_path / "recorded" / "logs" / "events.jsonl")
    for kill in (*KILLS, None):
        replayed = run(tiny, tmp_path / "replayed", {**section, "replay_events": events}, before=kill)
        assert replayed.code == (0 if kill is None else -signal.SIGKILL), replayed.err
    assert_same_run(tmp_path / "replayed", tmp_path / "recorded")


@pytest.mark.exhaustive
def test_a_curriculum_and_dropped_groups_repeat_too(tiny, tmp_path):
    changes = {
        "data.curriculum.name": "success_rate",
        "grpo.use_dynamic_sampling": True,
        "data.train.size": 40,
        "grpo.max_num_epochs": None,
    }
    section = {**ON_CLOCK, **MODES["windowed"]}
    for name, kills in {"whole": [], "parts": KILLS}.items():
        for kill in (*kills, None):
            outcome = run(tiny, tmp_path / name, section, before=kill, **changes)
            assert outcome.code == (0 if kill is None else -signal.SIGKILL), outcome.err
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_replay_that_leaves_the_record_says_so(tiny, tmp_path):
    section = {**IN_FLIGHT, "max_trajectory_age_steps": 1}
    changes = {"grpo.max_num_steps": 2, "grpo.val_period": 0, "checkpointing.metric_name": None}
    recorded = run(tiny, tmp_path / "recorded", {**section, "record_events": True}, **changes)
    assert recorded.code == 0, recorded.err
    replay = {**section, "replay_events": str(tmp_path / "recorded" / "logs" / "events.jsonl")}
    other = run(tiny, tmp_path / "other", replay, **changes, **{"grpo.seed": 7})
    assert other.code == 1 and "the two runs differ in more than the order of their events" in other.err
    longer = run(tiny, tmp_path / "longer", replay, **{**changes, "grpo.max_num_steps": 4})
    assert longer.code == 1 and "replay it with no more steps than it had" in longer.err
