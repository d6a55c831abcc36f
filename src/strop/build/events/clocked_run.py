"""Put a run with the embedded engine on the engine's clock, if its configuration orders events (``strop.rollouts.repeat``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from strop.config import RolloutRunConfig
from strop.environments.base import Environment
from strop.generation.synced_generator import SyncedGenerator
from strop.generation.torch.torch_engine import TorchEngine
from strop.rollouts.repeat.answer_times import AnswerTimes, AsTheyCome, FixedDelay
from strop.rollouts.repeat.clock_state import ClockState
from strop.rollouts.repeat.clocked_weights import ClockedWeights
from strop.rollouts.repeat.engine_clock import ClockedGenerator, EngineClock
from strop.rollouts.repeat.event_log import EVENTS_FILE, EventFileError, EventLog, RecordedEvents, read_events


def make_clock_state(config: RolloutRunConfig, environments: Iterable[Environment[Any]]) -> ClockState | None:
    """Make what a run on a clock saves; None for a run without one. Raises ValueError for an environment that cannot be repeated."""
    if not config.rollout_training.orders_events:
        return None
    section = f"{config.section}.async_{config.section}"
    keys = f"{section}.repeatable, record_events and replay_events"
    for environment in environments:
        if environment.is_agent:
            raise ValueError(
                f"{environment.title} runs an agent, which asks the policy when it likes, so that the order of its requests cannot be "
                f"repeated; turn {keys} off, or use an environment with turns"
            )
        if environment.past_selves is not None:
            raise ValueError(
                f"{environment.title} plays against earlier selves of the policy, whose engine has no clock; turn {keys} off, or set its "
                "opponent to self"
            )
    return ClockState()


def start_clock(
    config: RolloutRunConfig, state: ClockState, synced: SyncedGenerator, note: Callable[[str], None]
) -> tuple[EngineClock, SyncedGenerator]:
    """Start the clock of a run on its engine. Return it with the generator and weight sync that keep to it.

    Raises ValueError if events cannot be read or written."""
    engine = synced.generator
    assert isinstance(engine, TorchEngine), "check_clock refuses other engines"
    section, key = config.rollout_training.async_config, f"{config.section}.async_{config.section}"
    path = Path(config.logger.log_dir).absolute() / EVENTS_FILE
    try:
        recorded = None if section.replay_events is None else read_events(Path(section.replay_events))
        times = choose_times(config, recorded)
        clock = EngineClock(engine, times, EventLog(path if section.record_events else None, recorded))
        state.start(clock)
    except (EventFileError, OSError) as error:
        named = "replay_events" if section.replay_events is not None else "record_events"
        raise ValueError(f"{key}.{named}: {error}") from error
    note(f"the order of events: {describe_times(config)}")
    return clock, SyncedGenerator(generator=ClockedGenerator(engine), weights=ClockedWeights(synced.weights, clock))


def choose_times(config: RolloutRunConfig, recorded: RecordedEvents | None) -> AnswerTimes:
    section = config.rollout_training.async_config
    if recorded is not None:
        return recorded.times
    return FixedDelay(section.answer_delay) if section.repeatable else AsTheyCome()


def describe_times(config: RolloutRunConfig) -> str:
    """Say how the events of a run are ordered."""
    section = config.rollout_training.async_config
    written = f"; written to {EVENTS_FILE}" if section.record_events else ""
    if section.replay_events is not None:
        return f"as in {section.replay_events}{written}"
    if section.repeatable:
        return f"by the engine's steps, an answer of an environment takes {section.answer_delay} (repeats from its seed){written}"
    return f"as answers of environments come{written}"
