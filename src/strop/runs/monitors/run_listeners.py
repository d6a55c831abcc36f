"""What attaches to a run, as configured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from strop.algorithms.base import Algorithm
from strop.algorithms.policy_gradient.advantages.gdpo import DecoupledRewards
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.environments.verifiers.held_out_grader import VerifierGrader, make_grader
from strop.monitoring.hacking.hacking_monitor import DETECTORS, HackingMonitor
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.jsonl import METRICS_FILE, read_metrics
from strop.runs.monitors.instruments import HackingWatch, RolloutRecorder
from strop.runs.run_tasks import RunTasks
from strop.runs.tasks import list_reward_marks
from strop.trainer.health.health_monitor import HealthMonitor
from strop.trainer.health.health_rules import HealthFinding
from strop.trainer.health.start_checks import check_epochs, check_reward_weights, check_turns, check_validation
from strop.trainer.listeners import Listeners
from strop.trainer.mismatch import MismatchGuard
from strop.trainer.run import TrainOptions


def make_rollout_listeners(
    config: RolloutRunConfig,
    options: TrainOptions,
    tasks: RunTasks,
    algorithm: Algorithm,
    store: RolloutStore,
    decode: Callable[[list[int]], str],
    monitor: HackingMonitor | None,
) -> Listeners:
    """Make the listeners of a run on rollouts, in the order in which they see a step: the health rules read the mismatch."""
    return Listeners(
        [
            make_mismatch_guard(config),
            make_recorder(config, algorithm, store, decode),
            make_health(config, find_at_start(config, options, tasks, algorithm)),
            *([] if monitor is None else [HackingWatch(monitor=monitor, store=store)]),
        ]
    )


def make_mismatch_guard(config: RolloutRunConfig) -> MismatchGuard:
    policy = config.policy
    return MismatchGuard(policy.generation.mismatch, exact=policy.exact_on_policy and not policy.generation.uses_engines)


def make_recorder(
    config: RolloutRunConfig, algorithm: Algorithm, store: RolloutStore, decode: Callable[[list[int]], str]
) -> RolloutRecorder:
    logger = config.logger
    return RolloutRecorder(
        store=store,
        algorithm=algorithm,
        decode=decode,
        stored_routes=logger.routes,
        token_columns=logger.rollouts != "none" and logger.token_columns != "none",
        tracked_samples=logger.shown_samples,
        tracked_samples_period=logger.tracked_samples_period,
    )


def make_health(config: TrainingRunConfig, at_start: Iterable[HealthFinding]) -> HealthMonitor:
    """Make the monitor of a run that is restored: it knows the steps in the log folder."""
    limit = config.training.max_skipped_steps_in_a_row
    monitor = HealthMonitor(section=config.section, max_skipped_steps=limit, at_start=tuple(at_start))
    monitor.replay(logged for step, logged in read_metrics(Path(config.logger.log_dir) / METRICS_FILE) if step > 0)
    return monitor


def find_at_start(
    config: RolloutRunConfig, options: TrainOptions, tasks: RunTasks, algorithm: Algorithm
) -> Iterator[HealthFinding]:
    """Find what most likely is not as intended, before the first step."""
    environments = {component.name: component.environment for component in tasks.train.components}
    yield from check_turns(environments, config.rollout_training.max_rollout_turns, config.section)
    advantage = getattr(algorithm, "advantage", None)
    if isinstance(advantage, DecoupledRewards):
        weights = advantage.weights if isinstance(advantage.weights, Mapping) else {}
        yield from check_reward_weights(list_reward_marks(config), weights, "algorithm.kwargs.advantage.weights")
    yield from check_validation(options, tasks.train.size, held_out=bool(config.data.validation_entries))
    yield from check_epochs(options, tasks.train.size, config.training.max_num_epochs)


def make_hacking_monitor(config: RolloutRunConfig) -> HackingMonitor | None:
    """Make the monitor of reward hacking; None if it is off. Raises EnvironmentConfigError for a grader that cannot be made."""
    section = config.monitor
    if not section.enabled or not section.active:
        return None
    judges = [make_grader(each, "monitor.judges") for each in section.judges]
    second = None if section.second_grader is None else make_grader(section.second_grader, "monitor.second_grader")
    for grader in (second, *judges):
        if isinstance(grader, VerifierGrader):
            grader.verifier.prepare()
    return HackingMonitor(
        detectors=[DETECTORS[name]() for name in section.active],
        false_alarm_rate=section.false_alarm_rate,
        stop_on=section.stop_on,
        second_grader=second,
        judges=(judges[0], judges[-1]) if judges else None,
        graded_samples=section.graded_samples,
        log_dir=config.logger.log_dir,
    )
