"""A run on recorded data: SFT, preferences, reward models. It has no engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Self

from strop.algorithms.base import Algorithm
from strop.algorithms.kl import REFERENCE_LOGPROBS
from strop.base_config import to_json
from strop.checkpointing.base import Restorable, RunState
from strop.data.data_config import DataEntryConfig
from strop.data.data_state import DataState
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource, Part
from strop.data.sources.streamed import count_items, has_item, is_streamed
from strop.data.task_order import Interleaving
from strop.distributed.base import Cluster
from strop.extensions.recorded.examples import EXAMPLE_READERS
from strop.extensions.recorded.planned_groups import (
    PlannedGroup,
    make_group,
    plan_demonstration,
    plan_preference,
    plan_unpaired_preference,
)
from strop.extensions.recorded.recorded_config import RecordedRunConfig, RmConfig, SftConfig
from strop.extensions.recorded.recorded_scores import LossValidator, load_or_compute_reference
from strop.extensions.recorded.recorded_tokens import ExampleTooLong, RecordedRules
from strop.extensions.recorded.tokenizing_pool import TokenizingPool, choose_num_workers
from strop.learner.client import AsyncColumnSource, ColumnClient, ColumnSources, InlineCaller, LearnerClient
from strop.monitoring.trackers.base import Tracker
from strop.rollouts.episode import make_failed_group
from strop.rollouts.prepared_ahead import GroupsAhead
from strop.rollouts.stream import RolloutStream, StreamState
from strop.runs.backend import Backend
from strop.runs.models import TokenizerBundle
from strop.runs.run_source import RunSource
from strop.safety.exits import contain_exits
from strop.sampling import Sampling
from strop.trainer.run import DATA, GroupSupply, TrainOptions
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
        """Whether some are streamed, so that checkpoints save their positions."""
        return any(is_streamed(part) for part in self.parts)

    def reach(self, index: int) -> None:
        """Record that the run has reached a position, which checkpoints then save."""
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
        """Return the plan for the group of example ``position`` of entry ``part``."""
        examples, name = self.parts[part], self.names[part]
        example: Any = examples.peek(position) if is_streamed(examples) else examples[position]
        match self.kind:
            case "conversations":
                return plan_demonstration(index, name, example, self.rules)
            case "preferences":
                return plan_preference(index, name, example, self.rules)
            case _:
                # The next example may be the other completion of the same prompt, so take the one after it.
                other: Any = examples.beside(position) if is_streamed(examples) else examples[(position + 2) % len(examples)]
                return plan_unpaired_preference(index, name, example, other, self.rules)

    def read_all(self) -> list[Group]:
        """Return the group of every usable example once, in order."""
        return [group for group in self.read_every() if not group.errors]

    def read_every(self) -> list[Group]:
        """Return the group of every example once, in order; unusable examples give a group that records the error."""
        pairs = [(part, position) for part, examples in enumerate(self.parts) for position in range(len(examples))]
        return [self.make_group(index, part, position) for index, (part, position) in enumerate(pairs)]


@dataclass(kw_only=True)
class RecordedSource(RunSource):
    """Groups of recorded examples."""

    config: RecordedRunConfig
    algorithm: Algorithm
    tracker: Tracker
    train: tuple[Sequence[Task], ...]  # of each data entry
    validation: tuple[Sequence[Task], ...] = ()
    examples: RecordedExamples = field(init=False)
    validation_groups: list[Group] = field(init=False)
    options: TrainOptions = field(init=False)  # of the loop, once it is prepared
    sampling = Sampling()  # of nothing
    environments = ()

    @classmethod
    def read(cls, config: RecordedRunConfig, algorithm: Algorithm, tracker: Tracker, cluster: Cluster | None) -> Self:
        """Read the examples of a run. Raises DataError for an entry without any that the algorithm can learn from."""
        tracker.progress("reading examples")
        train = read_examples(config, config.data.train, "train", algorithm)
        held_out = read_validation_examples(config, algorithm)
        return cls(config=config, algorithm=algorithm, tracker=tracker, train=train, validation=held_out)

    @property
    def size(self) -> int | None:
        return self.examples.size

    def prepare(self, backend: Backend) -> TrainOptions:
        """Tokenize the examples with the policy's tokenizer. Return the options of the loop."""
        config, bundle = self.config, backend.bundle
        self.examples = join_examples(config, config.data.train, self.train, self.algorithm, bundle)
        self.validation_groups = make_validation_groups(config, self.validation, self.algorithm, bundle, self.tracker)
        held_out = f", {len(self.validation_groups)} to validate on" if self.validation_groups else ""
        count = self.examples.epoch_size
        self.tracker.note(f"{'examples of a stream' if count is None else f'{count} examples'} to train on{held_out}")
        share_prefixes = config.policy.sequence_packing.prefix_sharing and backend.packed
        self.options = make_recorded_options(config, count, share_prefixes=share_prefixes)
        return self.options

    async def make_columns(self, backend: Backend) -> Mapping[str, AsyncColumnSource]:
        if REFERENCE_LOGPROBS not in self.algorithm.requires & self.config.filled_columns:
            return {}
        self.tracker.progress("making the reference")
        return {REFERENCE_LOGPROBS: await self._store_reference(backend)}

    async def _store_reference(self, backend: Backend) -> AsyncColumnSource:
        """Compute the reference's log-probabilities of all groups with the policy's weights, or load what was computed earlier."""
        config = self.config
        path = Path(config.logger.log_dir) / "reference_logprobs.safetensors"
        self.tracker.note(
            f"reference log-probabilities: {'loaded from' if path.exists() else 'computed once and stored in'} {path}"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        policy, fingerprint = backend.make_untrained_policy()
        store = await load_or_compute_reference(
            path,
            lambda: [*self.examples.read_all(), *self.validation_groups],
            policy,
            self.algorithm,
            weights=fingerprint,
            data=f"{to_json(config.data)}{to_json(config.policy.tokenizer)}"
            f"{config.policy.max_total_sequence_length}",  # decides which examples fit
            share_prefixes=self.options.share_prefixes,
        )
        return ColumnClient(InlineCaller(store))

    def make_parts(self, backend: Backend) -> Mapping[str, Restorable]:
        return {DATA: DataState(self.examples)} if self.examples.resumable else {}

    @asynccontextmanager
    async def open(
        self,
        backend: Backend,
        policy: LearnerClient,
        columns: ColumnSources,
        state: RunState | None,
    ) -> AsyncIterator[GroupSupply]:
        """Start reading ahead."""
        options = self.options
        ahead = make_examples_ahead(self.config, self.examples, options)
        stream = make_recorded_stream(self.examples, options, None if state is None else state.stream, ahead)
        evaluator = None
        if self.validation_groups:
            evaluator = LossValidator(
                groups=self.validation_groups,
                algorithm=self.algorithm,
                learner=policy,
                columns=columns,
                share_prefixes=options.share_prefixes,
            )
        try:
            yield GroupSupply(stream=stream, weights=InProcessWeights([]), evaluator=evaluator)
        finally:
            await stream.close()
            if ahead is not None:
                await ahead.close()


def make_recorded_rules(config: RecordedRunConfig, bundle: TokenizerBundle) -> RecordedRules:
    training = config.training
    return RecordedRules(
        max_length=config.policy.max_total_sequence_length,
        final_turn_only=isinstance(training, SftConfig) and training.only_unmask_final,
        add_bos=config.data.add_bos,
        # A reward model scores the whole conversation, so the start of an answer does not matter, and templates may open it in
        # two ways.
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
    """Read the validation examples: the validation entries, otherwise the held-out part of the training entries, otherwise
    nothing.
    """
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
    """Create the stream of groups. ``ahead`` None: each group is prepared when the loop requests it."""

    async def read(index: int) -> Group:
        examples.reach(index)
        return examples.read_group(index) if ahead is None else await ahead.groups.read(index)

    return RolloutStream(read, slots=options.groups_per_step, size=examples.size, has=examples.has, state=state)


class ExamplesAhead:
    """Reads and tokenizes examples in the background, ahead of the loop."""

    def __init__(self, examples: RecordedExamples, *, num_workers: int, prefetch: int) -> None:
        self._examples, self._lock = examples, Lock()
        self.pool = TokenizingPool(examples.bundle.template, examples.rules, num_workers)
        self.groups = GroupsAhead(self._make_group, examples.has, ahead=prefetch, threads=max(1, num_workers))

    def _make_group(self, index: int) -> Group:
        try:
            with self._lock, contain_exits():  # data sets of users need not be thread-safe
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
        batch_key=config.groups_key,
        max_steps=training.last_step,
        groups_per_step=config.groups_per_step or min(config.most_groups, examples or config.most_groups),
        max_errors_in_a_row=training.max_errors_in_a_row,
        val_period=training.val_period,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
        tasks_per_epoch=examples,
    )
