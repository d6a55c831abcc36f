"""Which runs are put on the engine's clock, how their events are ordered, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.build.events.clocked_run import choose_times, describe_times, make_clock_state
from strop.config import GrpoRunConfig, load_config
from strop.environments.games.policy_client import PastSelvesRule
from strop.rollouts.repeat.answer_times import AsTheyCome, FixedDelay
from strop.rollouts.repeat.event_log import RecordedEvents

RUN = ["policy.model_name=none", "data.train.env_name=arithmetic", "grpo.async_grpo.enabled=true"]


def configure(*overrides: str) -> GrpoRunConfig:
    asked = [f"grpo.async_grpo.{each}" for each in overrides]
    config: GrpoRunConfig = load_config(None, [*RUN, *asked], root=GrpoRunConfig, check=False).config
    return config


@dataclass(frozen=True)
class Known:
    title: str = "env"
    is_agent: bool = False
    past_selves: Any = None


def test_only_an_asynchronous_run_that_orders_events_is_on_the_clock():
    assert make_clock_state(configure(), [Known()]) is None
    assert make_clock_state(configure("repeatable=true", "max_trajectory_age_steps=0"), [Known()]) is None
    for key in ("repeatable=true", "record_events=true", "replay_events=events.jsonl"):
        assert make_clock_state(configure(key), [Known()]) is not None


def test_agents_and_games_against_earlier_selves_are_refused():
    config = configure("repeatable=true")
    with pytest.raises(ValueError, match=r"agent, which asks the policy when it likes.*turn grpo.async_grpo.repeatable"):
        make_clock_state(config, [Known(), Known(is_agent=True)])
    with pytest.raises(ValueError, match=r"earlier selves of the policy, whose engine has no clock"):
        make_clock_state(config, [Known(past_selves=PastSelvesRule(snapshot_every=1, pool_size=1))])


def test_events_are_ordered_as_configured_and_the_start_says_how(tmp_path: Path):
    fixed, recorded, replayed = (
        configure("repeatable=true", "answer_delay=4"),
        configure("record_events=true"),
        configure("replay_events=old.jsonl", "record_events=true"),
    )
    assert choose_times(fixed, None) == FixedDelay(4) and choose_times(recorded, None) == AsTheyCome()
    events = RecordedEvents(answers={}, publishes={}, source="old.jsonl")
    assert choose_times(replayed, events) == events.times
    assert "an answer of an environment takes 4 (repeats from its seed)" in describe_times(fixed)
    assert describe_times(recorded) == "as answers of environments come; written to events.jsonl"
    assert describe_times(replayed) == "as in old.jsonl; written to events.jsonl"
