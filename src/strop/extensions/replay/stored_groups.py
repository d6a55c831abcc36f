"""The groups of a step, made again from its stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Literal

import torch

from strop.columns import Columns, TokenColumn
from strop.endings import Ending
from strop.extensions.replay.replay_plan import ReplayError
from strop.monitoring.rollout_store.learner_inputs import PROMPT, read_column
from strop.monitoring.rollout_store.rollout_record import LEFT_OUT, DropReason, RolloutRecord, TurnRecord
from strop.monitoring.rollout_store.stored_images import StoredImages, image_name
from strop.types import Branch, Group, PromptImage, Rollout, StepReward, Task, Turn


@dataclass(frozen=True, eq=False)
class StoredStep:
    """What a step trained on, in its order, and what it dropped."""

    groups: tuple[Group, ...]
    dropped: tuple[tuple[Group, DropReason], ...] = ()


@dataclass(frozen=True, kw_only=True)
class LearnerReads:
    """What the learner of a run reads besides tokens."""

    columns: tuple[TokenColumn, ...] = ()  # of its rollouts
    baseline: bool = False  # the reward of a greedy rollout


@dataclass
class GroupBuilder:
    """Makes the groups of a step from its stored rollouts. An image that several of them show is read once."""

    reads: LearnerReads = field(default_factory=LearnerReads)
    images: StoredImages | None = None
    _contents: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # of image files by name, with their digests

    def build(self, records: Sequence[RolloutRecord]) -> StoredStep:
        """Make the groups of a step from its records, which are in the order in which the step packed them. Raises ReplayError."""
        kept: list[Group] = []
        dropped: list[tuple[Group, DropReason]] = []
        members: dict[tuple[int, str, bool], list[RolloutRecord]] = {}
        for record in records:
            members.setdefault(_group_key(record), []).append(record)
        for rollouts in members.values():
            group = self._build_group(rollouts).leave_out_failed()
            if rollouts[0].dropped_because is None:
                kept.append(group)
            else:
                dropped.append((group, rollouts[0].dropped_because))
        return StoredStep(tuple(kept), tuple(dropped))

    def _build_group(self, records: Sequence[RolloutRecord]) -> Group:
        first = records[0]
        if first.group_version is None or first.step_rewards is None:
            raise ReplayError(
                f"the stored rollouts of step {first.step} are of an earlier version, which did not store the rewards of steps and the "
                "advantages of turns; only steps that this version trained can be replayed"
            )
        for record in filter(lambda record: record.kept, records):
            _refuse_missing(record, self.reads)
        return Group(
            index=first.group,
            environment=first.environment,
            version=first.group_version,
            rollouts=tuple(self._build_rollout(record) for record in records),
            baseline=_build_baseline(first) if self.reads.baseline else None,
        )

    def _build_rollout(self, record: RolloutRecord) -> Rollout:
        images = self._read_images(record) if record.kept else {}
        paths = [_build_turns(record, path, images, self.reads) for path in range(1 + len(record.branches))]
        branches = [
            Branch(parent=parent, start=start, turns=turns)
            for (parent, start), turns in zip(record.branches, paths[1:], strict=True)
        ]
        return Rollout(
            task=Task(id=record.task_id, answer=record.answer),
            sample=record.sample,
            seed=0,
            messages=(),
            prompt=torch.tensor(record.prompt_tokens, dtype=torch.int64),
            turns=paths[0],
            branches=tuple(branches),
            ending=Ending(record.ending) if record.ending else None,
            version=record.group_version or 0,
            reward=record.reward,
            step_rewards=tuple(StepReward(token, reward) for token, reward in record.step_rewards or ()),
            turn_advantages=record.turn_advantages or (),
            turn_states=_turn_states(record),
            rewards=record.rewards,
            metrics=dict(record.metrics),
            output=record.output,
            error=record.error,
            images=tuple(images.get(PROMPT, ())),
            unscored=record.dropped_because == "unscored",
            columns=_read_columns(record, PROMPT, PROMPT, self.reads),
            role=record.role or "",
        )

    def _read_images(self, record: RolloutRecord) -> dict[int, list[PromptImage]]:
        """Return the images of a rollout by the turn that shows them. Raises ReplayError."""
        found: dict[int, list[PromptImage]] = {}
        for place in record.image_places or ():
            content, digest = self._read_image(record.step, place.image)
            image = PromptImage(start=place.start, length=place.length, content=content, digest=digest)
            found.setdefault(place.turn, []).append(image)
        return found

    def _read_image(self, step: int, name: str) -> tuple[bytes, str]:
        if name not in self._contents:
            path = None if self.images is None else self.images.find(name)
            if path is None:
                raise ReplayError(f"step {step} shows the image {name}, which is not in rollouts/images any more; put it back")
            content = path.read_bytes()
            digest = sha256(content).hexdigest()
            if image_name(digest) != name:
                raise ReplayError(
                    f"{path} is not the image that step {step} showed: its content was changed; put the file of the run back"
                )
            self._contents[name] = content, digest
        return self._contents[name]


def _group_key(record: RolloutRecord) -> tuple[int, str, bool]:
    """Return what the records of one group share. Rollouts that were left out are stored behind all that were trained on."""
    return record.group, record.role, record.kept or record.dropped_because in LEFT_OUT


def rebuild_groups(
    records: Sequence[RolloutRecord], reads: LearnerReads | None = None, images: StoredImages | None = None
) -> StoredStep:
    """Make the groups of a step from its records, which are in the order in which the step packed them. Raises ReplayError."""
    return GroupBuilder(reads or LearnerReads(), images).build(records)


def _refuse_missing(record: RolloutRecord, reads: LearnerReads) -> None:
    """Raise ReplayError if the step read something that its rollouts do not hold."""
    if record.image_places is None and (record.prompt_images or any(turn.images for turn in record.turns)):
        raise ReplayError(
            f"step {record.step} shows images, and its stored rollouts are of an earlier version, which did not "
            "store where they stand in the tokens; such a step cannot be replayed"
        )
    for column in reads.columns:
        if column.key and column.name not in record.columns and any(record.sampled):
            rest = "such a step cannot be replayed"
            if isinstance(column.stored, str):
                rest = f"set {column.stored}=true in a run whose steps are to be replayed"
            raise ReplayError(
                f"{column.key} is true, and step {record.step} did not store the column {column.name!r} with its rollouts; {rest}"
            )
    if reads.baseline and record.baseline is None:
        raise ReplayError(
            f"the algorithm compares with a greedy rollout of each group, and step {record.step} stored none: it was trained with another "
            "algorithm, or by an earlier version; choose another algorithm or advantage"
        )


def _build_baseline(record: RolloutRecord) -> Rollout | None:
    """Return the greedy rollout of a group as far as its credit reads it: its reward, its length and how it ended."""
    stored = record.baseline
    if stored is None:
        return None
    turn = Turn(
        author="policy",
        tokens=torch.zeros(stored.tokens, dtype=torch.int64),
        text="",
        logprobs=torch.zeros(stored.tokens),
        versions=torch.zeros(stored.tokens, dtype=torch.int32),
    )
    return Rollout(
        task=Task(id=record.task_id),
        sample=-1,
        seed=0,
        messages=(),
        prompt=torch.tensor(record.prompt_tokens, dtype=torch.int64),
        turns=(turn,),
        ending=Ending(stored.ending) if stored.ending else None,
        reward=stored.reward,
    )


def _turn_states(record: RolloutRecord) -> tuple[str | None, ...]:
    states = tuple(turn.state for turn in record.turns if turn.sampled)
    return states if any(state is not None for state in states) else ()


def _build_turns(
    record: RolloutRecord, path: int, images: Mapping[int, Sequence[PromptImage]], reads: LearnerReads
) -> tuple[Turn, ...]:
    """Make the turns of a path. Messages that an environment gave at once are one turn."""
    messages = [turn for turn in record.turns if turn.path == path]
    starts = messages[:1] + [after for before, after in pairwise(messages) if not _is_same_turn(before, after)]
    return tuple(_build_turn(record, turn, images, reads) for turn in starts)


def _read_columns(record: RolloutRecord, start: int, end: int, reads: LearnerReads) -> Columns:
    """Return what was recorded of the turn with the tokens from ``start`` to ``end``, or of the rollout: PROMPT."""
    stored = {column: record.columns[column.name] for column in reads.columns if column.name in record.columns}
    found = {column: read_column(each, column, start, end) for column, each in stored.items()}
    return {column: values for column, values in found.items() if values is not None}


def _is_same_turn(before: TurnRecord, after: TurnRecord) -> bool:
    return not before.sampled and not after.sampled and (before.start, before.end) == (after.start, after.end)


def _build_turn(
    record: RolloutRecord, turn: TurnRecord, images: Mapping[int, Sequence[PromptImage]], reads: LearnerReads
) -> Turn:
    tokens = slice(turn.start, turn.end)
    author: Literal["policy", "environment"] = "policy" if turn.sampled else "environment"
    return Turn(
        author=author,
        tokens=torch.tensor(record.tokens[tokens], dtype=torch.int64),
        text=turn.text,
        logprobs=torch.tensor(record.sampler_logprobs[tokens], dtype=torch.float32),
        versions=torch.tensor(record.versions[tokens], dtype=torch.int32),
        columns=_read_columns(record, turn.start, turn.end, reads) if turn.sampled else {},
        images=tuple(images.get(turn.start, ())) if turn.end > turn.start else (),
    )
