"""Build a run on recorded data: SFT, preferences, reward models. Such a run has no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from strop.algorithms.base import Algorithm
from strop.checkpointing.base import Restorable
from strop.config import RecordedRunConfig
from strop.config.schema.recorded_config import MOST_EXAMPLES, RmConfig, SftConfig
from strop.data.data_config import DataEntryConfig
from strop.data.data_state import DataState
from strop.data.interleaving import Interleaving
from strop.data.recorded.examples import EXAMPLE_READERS
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, Part
from strop.data.sources.streaming.streamed import count_items, has_item, is_streamed
from strop.distributed.base import Cluster
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.trackers.base import Tracker
from strop.rollouts.episode import make_failed_group
from strop.rollouts.groups_ahead import GroupsAhead
from strop.rollouts.recorded import (
    PlannedGroup,
    make_group,
    plan_demonstration,
    plan_preference,
    plan_unpaired_preference,
)
from strop.rollouts.recorded_tokens import ExampleTooLong, RecordedRules
from strop.rollouts.stream import RolloutStream, StreamState
from strop.rollouts.tokenizing_pool import TokenizingPool, choose_num_workers
from strop.runs.backend import make_backend
from strop.runs.contents.model_check import check_model
from strop.runs.lifecycle import make_checkpoints, make_early_stop, make_saver
from strop.runs.models import TokenizerBundle
from strop.runs.monitors.instruments import RolloutRecorder
from strop.runs.monitors.run_listeners import make_health
from strop.runs.resume.restore import restore_checkpoint, resume_run
from strop.runs.resume.token_budgets import make_token_budgets, settle_token_budgets
from strop.runs.scorers import count_optimizer_steps, make_scorers
from strop.safety.exits import contain_exits
from strop.sampling import Sampling
from strop.trainer.column_sources import ColumnSources
from strop.trainer.health.health_rules import HealthFinding
from strop.trainer.health.start_checks import check_epochs, check_validation
from strop.trainer.listeners import Listeners
from strop.trainer.loss_validation import LossValidator
from strop.trainer.run import DATA, TrainingRun, TrainOptions
from strop.types import Group, Task
from strop.weight_sync.in_process import InProcessWeights


@dataclass(frozen=True)
class RecordedExamples:
    """Interleaved examples of one or more data entries, as groups of token ids."""

    kind: str  # key of EXAMPLE_READERS
    names: tuple[str, ...]
    parts: tuple[Sequence[Task], ...]
    interleaving: Interleaving
    bundle: TokenizerBundle
    rules: RecordedRules

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def epoch_size(self) -> int | None:
        """Number of examples of an epoch; None if some are streamed."""
        return self.interleaving.epoch_size

    @property
    def size(self) -> int | None:
        """Number of examples over all epochs; None without a limit on epochs, or if some are streamed."""
        return self.interleaving.size

    def has(self, index: int) -> bool:
        """Return whether there is an example at a position of the stream."""
        if self.interleaving.max_epochs is None or self.size is not None:
            return self.size is None or index < self.size
        part, position = self.interleaving.locate(index)
        return has_item(self.parts[part], position, self.interleaving.max_epochs)

    @property
    def resumable(self) -> bool:
        """Whether some are streamed, so that a checkpoint holds where they are read."""
        return any(is_streamed(part) for part in self.parts)

    def reach(self, index: int) -> None:
        """Note that the run has come to a position, which a checkpoint then leads to."""
        part, position = self.interleaving.locate(index)
        examples = self.parts[part]
        if is_streamed(examples):
            examples.reach(position)

    def state(self) -> Mapping[str, Any]:
        return {str(number): part.state() for number, part in enumerate(self.parts) if is_streamed(part)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            if is_streamed(part) and str(number) in state:
                part.load_state(state[str(number)])

    def read_group(self, index: int) -> Group:
        """Return the group at a position of the stream. An unusable example gives a group that records the error."""
        try:
            part, position = self.interleaving.locate(index)
            return self.make_group(index, part, position)
        except Exception as error:
            return make_failed_group(index, 0, error)

    def make_group(self, index: int, part: int, position: int) -> Group:
        """Return the group of example ``position`` of entry ``part``."""
        return make_group(self.plan_group(index, part, position), self.bundle.template, self.rules)

    def plan_group(self, index: int, part: int, position: int) -> PlannedGroup:
        """Return what the group of example ``position`` of entry ``part`` is made of."""
        examples, name = self.parts[part], self.names[part]
        example: Any = examples.peek(position) if is_streamed(examples) else examples[position]
        match self.kind:
            case "conversations":
                return plan_demonstration(index, name, example, self.rules)
            case "preferences":
                return plan_preference(index, name, example, self.rules)
            case _:
                # The example after this one may be the other completion of the same prompt, so take the second next.
                other: Any = examples.beside(position) if is_streamed(examples) else examples[(position + 2) % len(examples)]
                return plan_unpaired_preference(index, name, example, other, self.rules)

    def read_all(self) -> list[Group]:
        """Return the group of every usable example once, in order."""
        return [group for group in self.read_every() if not group.errors]

    def read_every(self) -> list[Group]:
        """Return the group of every example once, in order; that of an unusable one records the error."""
        pairs = [(part, position) for part, examples in enumerate(self.parts) for position in range(len(examples))]
        return [self.make_group(index, part, position) for index, (part, position) in enumerate(pairs)]


async def build_recorded_run(
    config: RecordedRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None = None
) -> TrainingRun:
    """Build a run on recorded data, restored from its newest checkpoint if there is one."""
    tracker.progress("reading examples")  # before the model loads, which takes longer than to find what is wrong with them
    parts = read_examples(config, config.data.train, "train", algorithm)
    held_out_parts = read_validation_examples(config, algorithm)
    backend = await make_backend(config, cluster, tracker)
    check_model(config, backend.bundle, tracker.note)
    examples = join_examples(config, config.data.train, parts, algorithm, backend.bundle)
    validation_groups = make_validation_groups(config, held_out_parts, algorithm, backend.bundle, tracker)
    held_out = f", {len(validation_groups)} to validate on" if validation_groups else ""
    counted = "examples of a stream" if examples.epoch_size is None else f"{examples.epoch_size} examples"
    tracker.note(f"{counted} to train on{held_out}")
    share_prefixes = config.policy.sequence_packing.prefix_sharing and backend.packed
    options = make_recorded_options(config, examples.epoch_size, share_prefixes=share_prefixes)
    learners = await backend.build_learners(algorithm, Sampling(), count_optimizer_steps(options, examples.size))
    scorers = await make_scorers(
        config, backend, algorithm, learners, tracker, lambda: [*examples.read_all(), *validation_groups]
    )
    columns = ColumnSources(algorithm.requires, scorers)

    checkpoints = make_checkpoints(config, backend.bundle.save)
    store = make_recorded_store(config, backend.bundle)
    parts_with_state: dict[str, Restorable] = {DATA: DataState(examples)} if examples.resumable else {}
    parts_with_state |= make_token_budgets(config)
    state = restore_checkpoint(config, checkpoints, {**learners, **parts_with_state}, tracker, store)
    await settle_token_budgets(config, learners, parts_with_state, tracker)
    ahead = make_examples_ahead(config, examples, options)
    evaluator = None
    if validation_groups:
        evaluator = LossValidator(
            groups=validation_groups,
            algorithm=algorithm,
            learner=learners["policy"],
            columns=columns,
            share_prefixes=share_prefixes,
        )
    run = TrainingRun(
        options=options,
        algorithm=algorithm,
        stream=make_recorded_stream(examples, options, state.stream if state else None, ahead),
        learners=learners,
        parts=parts_with_state,
        columns=columns,
        weights=InProcessWeights([]),
        tracker=tracker,
        evaluator=evaluator,
        early_stop=make_early_stop(config),
        checkpoints=make_saver(config, checkpoints),
        listeners=Listeners(
            [
                RolloutRecorder(
                    store=store,
                    algorithm=algorithm,
                    token_columns=config.logger.rollouts != "none" and config.logger.token_columns == "all",
                ),
                make_health(config, find_at_start(config, options, examples.size)),
            ]
        ),
    )
    if ahead is not None:
        run.on_close.append(ahead.close)
    return resume_run(run, state)


def find_at_start(config: RecordedRunConfig, options: TrainOptions, examples: int | None) -> Iterator[HealthFinding]:
    """Find what most likely is not as intended, before the first step. ``examples``: those of all epochs."""
    yield from check_validation(options, examples, held_out=bool(config.data.validation_entries))
    yield from check_epochs(options, examples, config.training.max_num_epochs)


def make_recorded_store(config: RecordedRunConfig, bundle: TokenizerBundle) -> RolloutStore:
    """Make the store of examples, which the data holds already: it is used where the columns of their tokens are stored."""
    stored = config.logger.rollouts if config.logger.token_columns == "all" else "none"
    return RolloutStore(Path(config.logger.log_dir), stored, decode=bundle.tokenizer.decode)


def make_recorded_rules(config: RecordedRunConfig, bundle: TokenizerBundle) -> RecordedRules:
    training = config.training
    return RecordedRules(
        max_length=config.policy.max_total_sequence_length,
        final_turn_only=isinstance(training, SftConfig) and training.only_unmask_final,
        add_bos=config.data.add_bos,
        # A reward model scores the whole conversation: where an answer opens changes nothing, and templates may open it in two ways.
        add_generation_prompt=config.data.add_generation_prompt and not isinstance(training, RmConfig),
        add_eos=config.data.add_eos,
        stop_ids=bundle.stop_ids,
    )


def read_examples(
    config: RecordedRunConfig, entries: Sequence[DataEntryConfig], part: Part, algorithm: Algorithm
) -> tuple[Sequence[Task], ...]:
    """Read the examples of data entries. Raises DataError for an entry without any that the algorithm can learn from."""
    seed, shuffle = config.recorded_training.seed, part == "train" and config.data.shuffle
    sources = (DataSource.from_entry(entry, seed=seed, part=part, shuffle=shuffle) for entry in entries)
    parts = tuple(EXAMPLE_READERS[algorithm.recorded_data](source) for source in sources)
    for entry, examples in zip(entries, parts, strict=True):
        if not examples:
            raise DataError(f"data.{part}: {entry.data_name} has no example that {config.algorithm.name} can learn from")
    return parts


def join_examples(
    config: RecordedRunConfig,
    entries: Sequence[DataEntryConfig],
    parts: tuple[Sequence[Task], ...],
    algorithm: Algorithm,
    bundle: TokenizerBundle,
) -> RecordedExamples:
    """Interleave the examples of data entries by their weights."""
    training = config.recorded_training
    interleaving = Interleaving(
        sizes=tuple(map(count_items, parts)),
        weights=tuple(entry.share if len(entries) > 1 else None for entry in entries),
        seed=training.seed,
        shuffle=config.data.shuffle,
        max_epochs=training.max_num_epochs,
    )
    names = tuple(str(entry.data_name) for entry in entries)
    return RecordedExamples(algorithm.recorded_data, names, parts, interleaving, bundle, make_recorded_rules(config, bundle))


def read_validation_examples(config: RecordedRunConfig, algorithm: Algorithm) -> tuple[Sequence[Task], ...]:
    """Read what to validate on: the validation entries, else the held-out part of the training entries, else nothing."""
    training, entries = config.recorded_training, config.data.validation_entries
    validates = training.val_period or training.val_at_start or training.val_at_end
    return read_examples(config, entries, "validation", algorithm) if validates and entries else ()


def make_validation_groups(
    config: RecordedRunConfig, parts: tuple[Sequence[Task], ...], algorithm: Algorithm, bundle: TokenizerBundle, tracker: Tracker
) -> list[Group]:
    if not parts:
        return []
    training = config.recorded_training
    every = join_examples(config, config.data.validation_entries, parts, algorithm, bundle).read_every()
    groups = [group for group in every if not group.errors]
    limit = len(groups) if training.val_batches < 0 else training.val_batches * training.val_global_batch_size
    if reasons := [group.errors[0] for group in every if group.errors]:
        left_out = f"{len(reasons)} examples of the validation data are unusable"
        if other := next((reason for reason in reasons if ExampleTooLong.__name__ not in reason), None):
            tracker.note(f"{left_out} and are left out; {other}")
        else:
            tracker.note(f"{left_out} (most likely too long) and are left out")
    return groups[:limit]


def make_recorded_stream(
    examples: RecordedExamples, options: TrainOptions, state: StreamState | None, ahead: ExamplesAhead | None = None
) -> RolloutStream:
    """Make the stream of groups. ``ahead`` None: each is made when the loop asks for it."""

    async def read(index: int) -> Group:
        examples.reach(index)
        return examples.read_group(index) if ahead is None else await ahead.groups.read(index)

    return RolloutStream(read, slots=options.groups_per_step, size=examples.size, has=examples.has, state=state)


class ExamplesAhead:
    """Reads and tokenizes examples beside the loop, ahead of it."""

    def __init__(self, examples: RecordedExamples, *, num_workers: int, prefetch: int) -> None:
        self._examples, self._lock = examples, Lock()
        self.pool = TokenizingPool(examples.bundle.template, examples.rules, num_workers)
        self.groups = GroupsAhead(self._make_group, examples.has, ahead=prefetch, threads=max(1, num_workers))

    def _make_group(self, index: int) -> Group:
        try:
            with self._lock, contain_exits():  # data sets of users need not know of threads
                plan = self._examples.plan_group(index, *self._examples.interleaving.locate(index))
            return plan.make(self.pool.tokenize(plan.conversations))
        except Exception as error:
            return make_failed_group(index, 0, error)

    async def close(self) -> None:
        await self.groups.close()
        await asyncio.to_thread(self.pool.close)


def make_examples_ahead(config: RecordedRunConfig, examples: RecordedExamples, options: TrainOptions) -> ExamplesAhead | None:
    prefetch = options.groups_per_step if config.data.prefetch is None else config.data.prefetch
    if not prefetch:
        return None
    return ExamplesAhead(examples, num_workers=choose_num_workers(config.data.num_workers), prefetch=prefetch)


def make_recorded_options(config: RecordedRunConfig, examples: int | None, *, share_prefixes: bool) -> TrainOptions:
    training = config.recorded_training
    return TrainOptions(
        section=config.section,
        batch_key="policy.train_global_batch_size",
        max_steps=training.last_step,
        groups_per_step=config.policy.train_global_batch_size
        or min(MOST_EXAMPLES, MOST_EXAMPLES if examples is None else examples),
        max_errors_in_a_row=training.max_errors_in_a_row,
        val_period=training.val_period,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
        tasks_per_epoch=examples,
    )
