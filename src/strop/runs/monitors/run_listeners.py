"""The configured listeners of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from strop import plugins
from strop.algorithms.base import Algorithm
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.base import Cluster
from strop.learner.policy_extension import fixes_order
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.runs.monitors.instruments import RolloutRecorder
from strop.runs.recorded_run import RecordedSource
from strop.runs.rollout_run import SampledSource
from strop.trainer.listeners import Listeners, RunListener
from strop.trainer.mismatch import MismatchGuard
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The parts of a run that are made before its models: what a listener of an extension, or of a user, is made from."""

    config: TrainingRunConfig
    algorithm: Algorithm
    source: SampledSource | RecordedSource  # its ``options`` are known once the run starts
    store: RolloutStore
    cluster: Cluster | None = None  # None: all is in this process


ListenerFactory = Callable[[RunSetup], RunListener | None]
"""An entry point of ``strop.listeners``, or what ``logger.listeners`` names; None: it has nothing to do in this run."""


def attach_listeners(setup: RunSetup) -> list[RunListener]:
    """Make the listeners of extensions and those that the configuration names. Raises UserCodeError, EnvironmentConfigError."""
    makers: dict[str, ListenerFactory] = {name: plugins.load("listeners", name) for name in sorted(plugins.declared("listeners"))}
    makers |= {path: import_attribute(path) for path in setup.config.logger.listeners}
    return [listener for name, make in makers.items() if (listener := _make(name, make, setup)) is not None]


def _make(name: str, make: ListenerFactory, setup: RunSetup) -> RunListener | None:
    try:
        listener = make(setup)
    except TypeError as error:
        raise UserCodeError(f"the listener {name} cannot be made from a RunSetup: {describe_error(error)}") from error
    if listener is not None and not (isinstance(listener, RunListener) and hasattr(listener, "name")):
        raise UserCodeError(
            f"the listener {name} gives {describe_value(listener)}; return a strop.trainer.listeners.RunListener with a name, or None"
        )
    return listener


def make_listeners(setup: RunSetup, attached: Iterable[RunListener]) -> Listeners:
    """Make the listeners of a run, in the order in which they see a step: those that are attached read the mismatch."""
    config = setup.config
    return Listeners(
        [
            *([make_mismatch_guard(config)] if isinstance(config, RolloutRunConfig) else []),
            make_recorder(config, setup.algorithm, setup.store),
            *attached,
        ]
    )


def make_store(config: TrainingRunConfig) -> RolloutStore:
    """Create the store of rollouts. Recorded rollouts are already in the data, so they are stored only for per-token columns."""
    stored = isinstance(config, RolloutRunConfig) or config.logger.token_columns == "all"
    return RolloutStore(Path(config.logger.log_dir), config.logger.rollouts if stored else "none")


def make_mismatch_guard(config: RolloutRunConfig) -> MismatchGuard:
    policy = config.policy
    return MismatchGuard(policy.generation.mismatch, exact=fixes_order(policy) and not policy.generation.uses_engines)


def make_recorder(config: TrainingRunConfig, algorithm: Algorithm, store: RolloutStore) -> RolloutRecorder:
    logger = config.logger
    if not isinstance(config, RolloutRunConfig):
        columns = logger.rollouts != "none" and logger.token_columns == "all"
        return RolloutRecorder(store=store, algorithm=algorithm, token_columns=columns)
    return RolloutRecorder(
        store=store,
        algorithm=algorithm,
        decode=store.decode,
        stores=lambda column: column.is_stored(config),
        token_columns=logger.rollouts != "none" and logger.token_columns != "none",
        tracked_samples=logger.shown_samples,
        tracked_samples_period=logger.tracked_samples_period,
    )
