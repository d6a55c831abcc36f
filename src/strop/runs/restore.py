"""Restore a run from its newest checkpoint, or begin a new one with token budgets measured from memory (``train_mb_tokens: auto``)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from strop.base_config import to_tree
from strop.checkpointing.base import Checkpointer, Restorable, RunState
from strop.checkpointing.folders import CheckpointError, FolderCheckpointer
from strop.config import RolloutRunConfig, TrainingRunConfig, dump_config
from strop.config.policy_checks import shares_device
from strop.config.schema.run_config import list_trained_models
from strop.learner.budget.memory_probe import FoundBudget, MemoryProbe, choose_budget, count_later, format_bytes, needs_more
from strop.learner.client import LearnerClient
from strop.metrics import Metrics
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.run_starts import (
    HISTORY_FILE,
    STARTS_FILE,
    End,
    RunStart,
    describe_hardware,
    find_versions,
    format_now,
    record_finish,
    record_run_start,
    record_start,
)
from strop.monitoring.trackers.base import Tracker
from strop.monitoring.trackers.jsonl import METRICS_FILE
from strop.rollouts.stream import StreamState
from strop.runs.lifecycle import make_checkpoints, make_saver
from strop.runs.local_device import resolve_device_name
from strop.runs.models import TokenizerBundle
from strop.runs.run_contents import CONTENTS_FILE, Content, find_contents, write_contents
from strop.runs.run_folders import CONFIG_FILE, ResumePlan, check_checkpoint_space, plan_resume
from strop.safety.printable import describe_command, redact_secrets
from strop.stopping import EarlyStop
from strop.storage.files import StorageError, find_refusal
from strop.storage.folder_lock import explain_folder
from strop.trainer.run import TrainingRun
from strop.weight_sync.base import WeightSync

TOKEN_BUDGETS = "token_budgets"  # folder of a checkpoint
_FILE = "token_budgets.json"


class TokenBudgets:
    """The token budgets of a run by learner, saved with it, so that a resumed run cuts its batches as before, regardless of free
    memory.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def stage(self, *, optimizer: bool = True) -> TokenBudgets:
        copy = TokenBudgets()
        copy.tokens = dict(self.tokens)
        return copy

    def save(self, folder: Path, *, optimizer: bool = True) -> None:
        folder.mkdir(parents=True)
        (folder / _FILE).write_text(json.dumps(self.tokens), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the budgets. A checkpoint of a run with fixed budgets has none, and they are measured."""
        if (folder / _FILE).exists():
            self.tokens = json.loads((folder / _FILE).read_text(encoding="utf-8"))


def make_token_budgets(config: TrainingRunConfig) -> dict[str, TokenBudgets]:
    """Return the component that saves a run's budgets, by its folder; empty if none is measured."""
    return {TOKEN_BUDGETS: TokenBudgets()} if list_measured(config) else {}


def list_measured(config: TrainingRunConfig) -> dict[str, str]:
    """Return the key of each learner's budget that is measured."""
    return {
        name: f"{name}.{model.batching_key}.train_mb_tokens"
        for name, model in list_trained_models(config)
        if model.train_tokens == "auto"
    }


async def settle_token_budgets(
    config: TrainingRunConfig, learners: Mapping[str, LearnerClient], parts: Mapping[str, object], tracker: Tracker
) -> None:
    """Set each learner's budget: the checkpoint's, or one measured now, with the engines that share its device asleep.

    Raises MemoryTooSmall, DeviceMemoryFull.
    """
    budgets, keys, longest = parts.get(TOKEN_BUDGETS), list_measured(config), config.policy.max_total_sequence_length
    if not isinstance(budgets, TokenBudgets):
        return
    known = {name: tokens for name, tokens in budgets.tokens.items() if name in keys and tokens >= longest}
    for name, tokens in known.items():
        tracker.note(f"{keys[name]}: auto is {tokens} tokens, as measured by the continued run")
    for name in budgets.tokens.keys() & keys.keys() - known.keys():
        tracker.note(
            f"{keys[name]}: the continued run had measured {budgets.tokens[name]} tokens, fewer than policy.max_total_sequence_length = "
            f"{longest} now: memory is measured again"
        )
    missing = {name: key for name, key in keys.items() if name not in known}
    found = await find_budgets({name: learners[name] for name in missing}, keys, longest, reserve_engine_memory(config))
    for name, budget in found.items():
        tracker.note(format_found(keys[name], budget))
    budgets.tokens = {**known, **{name: budget.tokens for name, budget in found.items()}}
    for name, tokens in budgets.tokens.items():
        await learners[name].set_train_tokens(tokens)


class MeasuringWeights:
    """A ``WeightSync`` of engines that share the learner's device: when they first sleep, it settles the token budgets."""

    def __init__(self, weights: WeightSync, settle: Callable[[], Awaitable[None]]) -> None:
        self.weights = weights
        self._settle: Callable[[], Awaitable[None]] | None = settle

    async def yield_device(self) -> None:
        await self.weights.yield_device()
        if self._settle is not None:
            await self._settle()
            self._settle = None

    async def publish(self, version: int) -> Metrics:
        return await self.weights.publish(version)


async def find_budgets(
    learners: Mapping[str, LearnerClient], keys: Mapping[str, str], longest: int, reserved_bytes: int
) -> dict[str, FoundBudget]:
    """Measure the passes of learners and return the budgets that fit. ``reserved_bytes``: memory that something else will use.
    Raises MemoryTooSmall.
    """
    small: dict[str, MemoryProbe] = {name: await learner.probe_memory(1, longest) for name, learner in learners.items()}
    found: dict[str, FoundBudget] = {}
    for name, learner in learners.items():
        later = count_later(name, small, reserved_bytes)
        probes = [small[name]]
        while needs_more(probes, later):
            probes.append(await learner.probe_memory(2 ** len(probes), longest))
        found[name] = choose_budget(probes, longest=longest, later_bytes=later, key=keys[name])
    return found


def reserve_engine_memory(config: TrainingRunConfig) -> int:
    """Return the bytes that the embedded engine's cache will use on the learner's device."""
    if (
        not isinstance(config, RolloutRunConfig)
        or config.policy.generation.uses_engines
        or not config.policy.generation.colocated.enabled
    ):
        return 0
    device, total = resolve_device_name(config.policy.device), None
    if device != "cpu":
        import torch

        total = torch.get_device_module(device).get_device_properties(device).total_memory / 2**30
    return int(config.policy.generation.torch_cfg.cache_memory_gb(total) * 2**30)


def format_found(key: str, budget: FoundBudget) -> str:
    return (
        f"{key}: auto is {budget.tokens} tokens: a pass was measured to take {format_bytes(budget.bytes_per_token)} a token, and it may "
        f"use {format_bytes(budget.usable_bytes)} of the {format_bytes(budget.free_bytes)} that are free"
    )


LIMITS_OF_ROLLOUTS = ("policy.generation.", "policy.max_total_sequence_length", "data.max_input_seq_length")
RECORDS = (
    METRICS_FILE,
    "rollouts",
    "validation",
    CONFIG_FILE,
    CONTENTS_FILE,
    HISTORY_FILE,
    STARTS_FILE,
    "profiles",  # of steps
    "curves.png",
)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The initial state of a run."""

    state: RunState | None  # None: it starts from the beginning
    parts: Mapping[str, Restorable]  # other components whose state is saved, by name
    checkpoints: Checkpointer | None  # None: it saves none


async def restore_run(
    config: TrainingRunConfig,
    bundle: TokenizerBundle,
    learners: Mapping[str, LearnerClient],
    parts: Mapping[str, Restorable],
    store: RolloutStore,
    tracker: Tracker,
) -> Restored:
    """Load the newest checkpoint into learners and parts, in place, and set the learners' token budgets; engines that share their device
    have to sleep first (``measure_asleep``).

    Raises ResumeError, CheckpointError, StorageError, MemoryTooSmall."""
    parts = {**make_token_budgets(config), **parts}
    checkpoints = make_checkpoints(config, bundle.save)
    state = restore_checkpoint(config, checkpoints, {**learners, **parts}, tracker, store)
    if not shares_device(config):
        await settle_token_budgets(config, learners, parts, tracker)
    check_checkpoint_space(config, learners, tracker)
    return Restored(state=state, parts=parts, checkpoints=make_saver(config, checkpoints))


def measure_asleep(
    config: TrainingRunConfig,
    weights: WeightSync,
    learners: Mapping[str, LearnerClient],
    parts: Mapping[str, Restorable],
    tracker: Tracker,
) -> WeightSync:
    """Return weights that settle the token budgets when the engines that share the learner's device first sleep, if any is measured."""
    if not shares_device(config) or TOKEN_BUDGETS not in parts:
        return weights
    return MeasuringWeights(weights, lambda: settle_token_budgets(config, learners, parts, tracker))


def restore_checkpoint(
    config: TrainingRunConfig,
    checkpoints: FolderCheckpointer,
    learners: Mapping[str, Restorable],
    tracker: Tracker,
    store: RolloutStore,
) -> RunState | None:
    """Load the newest checkpoint into the learners, in place, and drop later records. Without one, start with an empty log folder.

    Raises ResumeError, CheckpointError, StorageError."""
    folder = Path(config.logger.log_dir)
    if config.checkpointing.resume == "previous":
        set_damaged_aside(checkpoints, tracker)
    plan = plan_resume(config)
    if plan.checkpoint is None:
        if config.checkpointing.enabled and (archived := checkpoints.archive()):
            tracker.note(f"checkpointing.resume is never: moved the checkpoints of an earlier run to {archived}")
        _archive_previous_run(folder, tracker)
        state, last = None, -1
    else:
        state = checkpoints.load(plan.checkpoint, learners)
        last = state.step
    tracker.resume(last)
    store.resume(last)
    try:
        _record_start(config, plan, last)
    except OSError as error:
        raise StorageError(f"logger.log_dir: {explain_folder(folder, error)}") from error
    if state is None:
        return None
    _say_continued(plan, state, tracker)
    if not changes_rollouts(config, plan):
        return state
    return replace(state, stream=_restart_groups(state.stream))


def _record_start(config: TrainingRunConfig, plan: ResumePlan, last: int) -> None:
    """Record the start after step ``last``: settings, contents of the data, versions and machine."""
    folder, contents = Path(config.logger.log_dir), find_contents(config)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(dump_config(config))
    (folder / CONTENTS_FILE).write_text(write_contents(contents), encoding="utf-8")
    changed = {change.key: (change.old, change.new) for change in plan.changes}
    record_start(folder, step=last, config=redact_secrets(to_tree(config)), changed=changed)
    record_run_start(folder, _describe_start(contents, last))


def _describe_start(contents: Mapping[str, Content], last: int) -> RunStart:
    return RunStart(
        after_step=max(last, 0),
        time=format_now(),
        command=describe_command(),
        versions=find_versions(),
        hardware=describe_hardware(),
        data={key: str(content) for key, content in contents.items()},
    )


def _say_continued(plan: ResumePlan, state: RunState, tracker: Tracker) -> None:
    """Note which run is continued and with which settings, and log the checkpoint's step, which a kill may have kept from being
    logged.
    """
    tracker.note(f"continuing after step {state.step}, from {plan.checkpoint}")
    tracker.log(state.step, state.logged)
    if plan.not_compared is not None:
        tracker.note(f"{plan.not_compared} cannot be read, or was changed: its settings are not compared with this run's")
    if plan.changes:
        tracker.note(f"resumed with: {', '.join(map(str, plan.changes))} (applied from step {state.step + 1} on)")
    for content in plan.contents:
        tracker.note(f"changed since {plan.checkpoint} was saved: {content}")


def changes_rollouts(config: TrainingRunConfig, plan: ResumePlan) -> bool:
    """Return whether started but untrained groups were made with settings that differ from this run's."""
    made_with: tuple[str, ...] = ("",)  # recorded data is cheap to read again
    if isinstance(config, RolloutRunConfig):
        own = ("num_generations_per_prompt", "max_rollout_turns", "reward_scaling")
        made_with = (*LIMITS_OF_ROLLOUTS, *(f"{config.section}.{name}" for name in own))
    return any(change.key.startswith(made_with) for change in plan.changes)


def _restart_groups(stream: StreamState) -> StreamState:
    """Restart all groups that were started but not trained on."""
    restarted = sorted({*stream.unfinished, *(group.index for group in stream.finished)})
    return StreamState(next_index=stream.next_index, unfinished=tuple(restarted), finished=())


def resume_run(run: TrainingRun, state: RunState | None) -> TrainingRun:
    """Set the run to the position recorded in ``state``."""
    if state is not None:
        run.step, run.saved.step, run.last_metrics = state.step, state.step, state.logged
        run.early_stop = _restore_early_stop(run.early_stop, state.early_stop)
        run.listeners.load_state_dict(state.listeners)
    return run


def _restore_early_stop(configured: EarlyStop | None, saved: EarlyStop | None) -> EarlyStop | None:
    """Return the configured rule with the saved one's measurements, if both use the same metric."""
    if configured is None or saved is None:
        return configured
    if (configured.metric, configured.higher_is_better) != (saved.metric, saved.higher_is_better):
        return configured
    same = (configured.threshold, configured.patience) == (saved.threshold, saved.patience)
    return replace(
        configured,
        best=saved.best,
        without_improvement=saved.without_improvement,
        reason=saved.reason if same else None,
    )


def set_damaged_aside(checkpoints: FolderCheckpointer, tracker: Tracker) -> None:
    """Rename damaged checkpoints newer than the newest intact one to ``damaged_step_N``. Raises CheckpointError if none is
    intact.
    """
    damaged: list[tuple[Path, str]] = []
    for step in reversed(checkpoints.list_steps()):
        path = checkpoints.folder / f"step_{step}"
        try:
            checkpoints.verify(path)
            break
        except (CheckpointError, ValueError, OSError) as error:
            damaged.append((path, str(error)))
    else:
        if damaged:
            reasons = "; ".join(reason for _, reason in damaged)
            raise CheckpointError(
                f"{checkpoints.folder} holds no intact checkpoint to continue from ({reasons}); set checkpointing.resume=never to start "
                "over, which moves them to previous_N"
            )
    for path, reason in damaged:
        target = path.with_name(f"damaged_{path.name}")
        while target.exists():
            target = target.with_name(f"{target.name}_again")
        path.rename(target)
        tracker.note(f"warning: {reason}. This checkpoint was renamed to {target}; nothing was deleted")


def finish_run(log_dir: Path, run: TrainingRun) -> None:
    """Record that a run is finished, so that the same command does not start it again."""
    stopped = run.early_stop is not None and run.early_stop.reason is not None
    end: End = "early_stop" if stopped else "steps" if run.step >= run.options.max_steps else "tasks"
    try:
        record_finish(log_dir, step=run.step, end=end)
    except OSError as error:
        if (reason := find_refusal(error, log_dir)) is None:
            raise
        run.tracker.note(f"warning: {log_dir / HISTORY_FILE} cannot record that this run is finished: {reason}")


def _archive_previous_run(folder: Path, tracker: Tracker) -> None:
    """Move the records of an earlier run to ``previous_N``, so that a run from the beginning does not overwrite them."""
    if not (folder / METRICS_FILE).exists() or not (folder / METRICS_FILE).stat().st_size:
        return
    numbers = [int(path.name.removeprefix("previous_")) for path in folder.glob("previous_*") if path.name[9:].isdigit()]
    target = folder / f"previous_{max(numbers, default=0) + 1}"
    target.mkdir()
    for name in RECORDS:
        if (folder / name).exists():
            (folder / name).rename(target / name)
    tracker.note(f"there is no checkpoint to continue from: moved the records of an earlier run to {target}")
