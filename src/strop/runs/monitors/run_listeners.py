"""The configured listeners of a run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from strop import plugins
from strop.algorithms.base import Algorithm, TokenOutputs
from strop.columns import TokenColumn
from strop.config import RolloutRunConfig, TrainingRunConfig
from strop.distributed.base import Cluster
from strop.learner.base import require_token_outputs
from strop.learner.learner_config import fixes_order
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, list_images, make_records, split_by_rollout
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import StepMedia
from strop.monitoring.trackers.rollout_media import make_step_media
from strop.openmp import call_in_thread
from strop.runs.monitors.token_trace import trace_tokens
from strop.runs.run_source import RunSource
from strop.trainer.listeners import Listeners, RunListener, StepView
from strop.trainer.mismatch import MismatchGuard
from strop.user_code import UserCodeError, describe_error, describe_value, import_attribute

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The parts of a run that are made before its models: what a listener of an extension, or of a user, is made from."""

    config: TrainingRunConfig
    algorithm: Algorithm
    source: RunSource  # its ``options`` are known once the run starts
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


@dataclass(kw_only=True)
class RolloutRecorder(RunListener):
    """Stores the rollouts of each step, and passes samples to the services.

    A step is stored in a thread, so that requests in flight go on, while the other listeners see it and the run validates. It is on disk
    before the step is saved or logged.
    """

    name = "rollouts"
    store: RolloutStore
    algorithm: Algorithm
    decode: Callable[[list[int]], str] | None = None  # the tokenizer's, for stored prompts
    stores: Callable[[TokenColumn], bool] = lambda column: column.stored is True  # columns of tokens
    token_columns: bool = False  # store per-token results of the update, also for recorded data
    tracked_samples: int | None = None  # rollouts of a step shown in services; None: there is no service
    tracked_samples_period: int = 10  # steps
    _storing: asyncio.Future[StepMedia | None] | None = field(default=None, init=False)

    async def on_step(self, step: StepView) -> dict[str, float]:
        self._storing = asyncio.ensure_future(call_in_thread(self._store, step))
        return {}

    async def on_log(self, step: StepView) -> dict[str, float]:
        media = await self._finish()
        if media is not None:
            step.tracker.log_media(step.step, media)
        return {}

    async def state_dict(self) -> None:
        if self._storing is not None:
            await asyncio.wait([self._storing])

    async def on_end(self) -> None:
        await self._finish()

    async def _finish(self) -> StepMedia | None:
        """Wait until the step is stored. Return its media; raise what its writer raised."""
        storing, self._storing = self._storing, None
        return None if storing is None else await storing

    def _store(self, step: StepView) -> StepMedia | None:
        algorithm, recorded = self.algorithm, bool(self.algorithm.recorded_data)
        tokens = trace_tokens(algorithm, step.batch, step.result.passes, step.tracker.note) if self.token_columns else None
        groups = [*step.groups, *(group for group, _ in step.dropped)]
        self.store.write_images(() if recorded else list_images(groups))
        records = [] if recorded and tokens is None else self.make_records(step)  # recorded data is already stored
        self.store.write(step.step, records, tokens)
        if not records or recorded or self.tracked_samples is None:
            return None
        shown = step.step % self.tracked_samples_period == 0 or step.step == 1
        return make_step_media(records, self.store.images, samples=self.tracked_samples if shown else 0)

    def make_records(self, step: StepView) -> list[RolloutRecord]:
        """Create the records of a step's rollouts, including dropped ones."""
        batch, outputs = step.batch, step.result.old_outputs
        of_tokens = isinstance(outputs, TokenOutputs) and self.algorithm.predict == "tokens"
        credit = split_by_rollout(batch.advantages, batch, step.groups)
        return make_records(
            step.step,
            [*step.groups, *(group for group, _ in step.dropped)],
            advantages={key: float(column.mean()) for key, column in credit.items() if len(column)},
            learner_logprobs=split_by_rollout(require_token_outputs(outputs).logprobs, batch, step.groups) if of_tokens else {},
            dropped={group.index: reason for group, reason in step.dropped},
            decode=self.decode,
            stores=self.stores,
        )
