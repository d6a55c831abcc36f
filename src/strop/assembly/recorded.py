"""Build a run on recorded data: SFT, preferences, reward models. Such a run has no engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.algorithms.base import Algorithm, Plan
from strop.assembly.algorithms import make_algorithm, refuse_nonsense, refuse_other_run
from strop.assembly.home import make_home
from strop.assembly.roles import Speech, tokenizer_saver
from strop.assembly.scorers import optimizer_steps
from strop.assembly.settings import settings_of
from strop.assembly.tasks import data_source
from strop.assembly.training import continued, early_stop, make_checkpoints, restore, saving_with
from strop.cluster.base import Cluster
from strop.config import RecordedRunConfig
from strop.config.data import DataEntryConfig
from strop.config.recorded import SftConfig
from strop.data.errors import DataError
from strop.data.examples import conversations, judged, preferences
from strop.data.placement import Placement
from strop.loop import LoopOptions, Run
from strop.rollouts.episode import group_without_task
from strop.rollouts.recorded import RecordedRules, demonstration, judgement, preference_pair
from strop.rollouts.stream import RolloutStream, StreamState
from strop.sampling import Sampling
from strop.tracking.base import Tracker
from strop.tracking.rollouts import RolloutStore
from strop.types import Group, Task
from strop.validation import LossValidation
from strop.weights.shared import SharedWeights

READERS: Mapping[str, Callable[[Any], Sequence[Any]]] = {
    "conversations": conversations,
    "preferences": preferences,
    "judgements": judged,
}


@dataclass(frozen=True)
class Examples:
    """Interleaved examples of one or more data entries, as groups of token ids."""

    kind: str  # of READERS
    names: tuple[str, ...]
    parts: tuple[Sequence[Task], ...]
    placement: Placement
    speech: Speech
    rules: RecordedRules

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    @property
    def size(self) -> int | None:
        """Number of examples over all epochs; None without a limit on epochs."""
        return None if self.placement.max_epochs is None else self.placement.max_epochs * len(self)

    def group(self, index: int) -> Group:
        """Return the group at a position of the stream. An unusable example gives a group that records the error."""
        try:
            part, place = self.placement.at(index)
            return self.of(index, part, place)
        except Exception as error:
            return group_without_task(index, 0, error)

    def of(self, index: int, part: int, place: int) -> Group:
        """Return the group of example ``place`` of entry ``part``."""
        examples, name, template = self.parts[part], self.names[part], self.speech.template
        example: Any = examples[place]
        match self.kind:
            case "conversations":
                return demonstration(index, name, example, template, self.rules)
            case "preferences":
                return preference_pair(index, name, example, template, self.rules)
            case _:
                # The example after this one may be the other completion of the same prompt, so take the second next.
                other: Any = examples[(place + 2) % len(examples)]
                return judgement(index, name, example, other, template, self.rules)

    def all(self) -> list[Group]:
        """Return the group of every usable example once, in order."""
        pairs = [(part, place) for part, examples in enumerate(self.parts) for place in range(len(examples))]
        groups = [self.of(index, part, place) for index, (part, place) in enumerate(pairs)]
        return [group for group in groups if not group.errors]


async def build_recorded_run(config: RecordedRunConfig, tracker: Tracker, cluster: Cluster | None = None) -> Run:
    """Build a run on recorded data, restored from its newest checkpoint if there is one."""
    algorithm = recorded_algorithm_of(config)
    home = await make_home(config, cluster, tracker)
    rules = recorded_rules(config, home.speech)
    train = training_examples(config, algorithm, home.speech, rules)
    held_out = validation_groups(config, algorithm, home.speech, rules, tracker)
    share_prefixes = config.policy.sequence_packing.prefix_sharing and home.packed
    options = recorded_loop_options(config, len(train), share_prefixes=share_prefixes)
    learners = await home.learners(algorithm, Sampling(), optimizer_steps(options, train.size))
    scorers = await home.recorded_scorers(lambda: [*train.all(), *held_out])

    checkpoints = make_checkpoints(config, tokenizer_saver(home.speech.tokenizer))
    store = RolloutStore(Path(config.logger.log_dir), "none")
    state = restore(config, checkpoints, learners, tracker, store)
    validation = None
    if held_out:
        validation = LossValidation(
            groups=held_out,
            algorithm=algorithm,
            learner=learners["policy"],
            scorers=scorers,
            share_prefixes=share_prefixes,
        )
    run = Run(
        options=options,
        algorithm=algorithm,
        stream=make_stream(train, options, state.stream if state else None),
        learners=learners,
        scorers=scorers,
        weights=SharedWeights([]),
        tracker=tracker,
        rollouts=store,
        evaluator=validation,
        early_stop=early_stop(config),
        checkpoints=saving_with(config, checkpoints),
    )
    return continued(run, state)


def recorded_algorithm_of(config: RecordedRunConfig) -> Algorithm:
    """Make the algorithm of a run. Raises ValueError if it does not belong to this kind of run."""
    algorithm = make_algorithm(config.algorithm.name, config.algorithm.kwargs, settings_of(config))
    refuse_other_run(config.algorithm.name, algorithm, config.section)
    refuse_nonsense(algorithm, Plan())
    return algorithm


def recorded_rules(config: RecordedRunConfig, speech: Speech) -> RecordedRules:
    training = config.training
    return RecordedRules(
        max_length=config.policy.max_total_sequence_length,
        final_turn_only=isinstance(training, SftConfig) and training.only_unmask_final,
        add_eos=config.data.add_eos,
        stop_ids=speech.stop_ids,
    )


def training_examples(config: RecordedRunConfig, algorithm: Algorithm, speech: Speech, rules: RecordedRules) -> Examples:
    entries = config.data.train
    parts = tuple(_read(config, entry, algorithm, "train") for entry in entries)
    placement = Placement(
        sizes=tuple(len(part) for part in parts),
        weights=tuple(entry.weight if len(entries) > 1 else None for entry in entries),
        seed=config.recorded.seed,
        shuffle=config.data.shuffle,
        max_epochs=config.recorded.max_num_epochs,
    )
    return Examples(algorithm.recorded, tuple(_name(entry) for entry in entries), parts, placement, speech, rules)


def validation_groups(
    config: RecordedRunConfig, algorithm: Algorithm, speech: Speech, rules: RecordedRules, tracker: Tracker
) -> list[Group]:
    """Return the validation groups: from the validation entries, else from the held-out part of the training entries, else none."""
    training = config.recorded
    if not (training.val_period or training.val_at_start or training.val_at_end):
        return []
    entries = config.data.validation
    if entries is None:
        entries = tuple(entry for entry in config.data.train if entry.split_validation_size)
    if not entries:
        return []
    parts = tuple(_read(config, entry, algorithm, "validation") for entry in entries)
    placement = Placement(sizes=tuple(map(len, parts)), weights=(None,) * len(parts), shuffle=False)
    found = Examples(algorithm.recorded, tuple(_name(entry) for entry in entries), parts, placement, speech, rules).all()
    wanted = len(found) if training.val_batches < 0 else training.val_batches * training.val_global_batch_size
    if dropped := sum(map(len, parts)) - len(found):
        tracker.note(f"{dropped} examples of the validation data are unusable (most likely too long) and are left out")
    return found[:wanted]


def _name(entry: DataEntryConfig) -> str:
    return str(entry.dataset_name)


def _read(config: RecordedRunConfig, entry: DataEntryConfig, algorithm: Algorithm, part: str) -> Sequence[Task]:
    examples: Sequence[Task] = READERS[algorithm.recorded](data_source(entry, config.recorded.seed, part))
    if not len(examples):
        raise DataError(f"data.{part}: {entry.dataset_name} has no example that {config.algorithm.name} can learn from")
    return examples


def make_stream(examples: Examples, options: LoopOptions, state: StreamState | None) -> RolloutStream:
    async def read(index: int) -> Group:
        return examples.group(index)

    return RolloutStream(read, slots=options.groups_per_step, size=examples.size, state=state)


def recorded_loop_options(config: RecordedRunConfig, examples: int, *, share_prefixes: bool) -> LoopOptions:
    training = config.recorded
    return LoopOptions(
        section=config.section,
        batch_key="policy.train_global_batch_size",
        max_steps=training.last_step,
        groups_per_step=config.policy.train_global_batch_size or min(32, examples),
        max_errors_in_a_row=training.max_errors_in_a_row,
        val_period=training.val_period,
        val_at_start=training.val_at_start,
        val_at_end=training.val_at_end,
        save_period=config.checkpointing.save_period,
        share_prefixes=share_prefixes,
    )
