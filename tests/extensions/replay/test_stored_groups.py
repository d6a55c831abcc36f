"""Groups that are made again from stored rollouts are packed as the ones that were trained on."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strop.algorithms.policy_gradient.turns import make_step_columns, make_turn_advantages
from strop.data.packing import pack
from strop.extensions.replay.replay_plan import ReplayError
from strop.extensions.replay.stored_groups import rebuild_groups
from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.types import Batch, Ending, Group, StepReward, observation_turn
from support.rollouts import make_agent_groups, make_group, make_rollout, pack_grpo, sampled_turn, simple_groups


def rewarded_group(index: int) -> Group:
    """A rollout of two turns with rewards of steps and an advantage of a turn, and one that was cut off."""
    turns = (sampled_turn([5, 6], [-0.1, -0.7], version=2), observation_turn([7], "so"), sampled_turn([8], [-0.3], version=3))
    first = replace(
        make_rollout([1, 2], *turns, reward=0.1 + 0.2),
        step_rewards=(StepReward(1, 0.1), StepReward(2, 0.2)),
        turn_advantages=(0.0, -1.5),
        turn_states=("start", None),
        rewards={"right": 1 / 3},
    )
    return replace(
        make_group(first, make_rollout([1, 2], sampled_turn([3]), ending=Ending.LENGTH), index=index),
        version=2,
        environment="maze",
    )


def store_and_rebuild(folder: Path, groups: list[Group]) -> list[Group]:
    RolloutStore(folder, "parquet").write(1, make_records(1, groups))
    return list(rebuild_groups(RolloutStore(folder, "none").read(1)).groups)


def assert_same(first: Batch, second: Batch) -> None:
    for item in fields(Batch):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), item.name
    assert first.totals == second.totals


def test_a_batch_of_rebuilt_groups_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    agents = [replace(group, index=10 + place) for place, group in enumerate(make_agent_groups())]
    groups = [*simple_groups((4, (3, 5, 1)), (2, (6, 2, 2))), rewarded_group(7), *agents]
    rebuilt = store_and_rebuild(tmp_path, groups)
    for share in (True, False):
        assert_same(pack(groups, share_prefixes=share), pack(rebuilt, share_prefixes=share))
    assert_same(pack_grpo(groups), pack_grpo(rebuilt))
    assert [(group.index, group.version, group.environment) for group in rebuilt] == [
        (group.index, group.version, group.environment) for group in groups
    ]


def test_rewards_of_steps_and_advantages_of_turns_are_kept(tmp_path: Path) -> None:
    groups = [rewarded_group(0)]
    rebuilt = store_and_rebuild(tmp_path, groups)
    batch = pack(groups)
    for make in (make_step_columns, make_turn_advantages):
        wanted, found = make(batch, groups), make(batch, rebuilt)
        assert list(wanted) == list(found) and all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert rebuilt[0].rollouts[0].rewards == {"right": 1 / 3} and rebuilt[0].rollouts[0].turn_states == ("start", None)
    assert rebuilt[0].rollouts[1].truncated


def test_dropped_groups_stand_apart(tmp_path: Path) -> None:
    groups = simple_groups((4, (3, 5)), (2, (6, 2)))
    RolloutStore(tmp_path, "parquet").write(1, make_records(1, groups, dropped={groups[1].index: "filtered"}))
    step = rebuild_groups(RolloutStore(tmp_path, "none").read(1))
    assert [group.index for group in step.groups] == [groups[0].index]
    assert [(group.index, reason) for group, reason in step.dropped] == [(groups[1].index, "filtered")]


@pytest.mark.parametrize("change", [{"unscored": True}, {"error": "it is gone", "ending": Ending.SANDBOX}])
@pytest.mark.parametrize("unscored", [{0: {0}}, {0: {1, 2}, 2: {0}}, {0: {2}, 1: {0}, 2: {1}}])
def test_rollouts_that_cannot_be_scored_are_left_out_of_rebuilt_groups_too(
    tmp_path: Path, unscored: dict[int, set[int]], change: dict[str, Any]
) -> None:
    made = simple_groups((4, (3, 5, 1)), (2, (6, 2)), (3, (2, 2, 2)))
    groups = [
        replace(
            group,
            rollouts=tuple(
                replace(each, **change) if each.sample in unscored.get(group.index, ()) else each for each in group.rollouts
            ),
        ).leave_out_failed()
        for group in made
    ]
    RolloutStore(tmp_path, "parquet").write(1, make_records(1, groups))
    step = rebuild_groups(RolloutStore(tmp_path, "none").read(1))
    assert not step.dropped
    assert_same(pack_grpo(groups), pack_grpo(step.groups))
    for found, wanted in zip(step.groups, groups, strict=True):
        assert [each.sample for each in found.rollouts] == [each.sample for each in wanted.rollouts]
        assert [each.sample for each in found.left_out] == [each.sample for each in wanted.left_out]


def test_a_dropped_group_with_rollouts_that_cannot_be_scored_is_one_group(tmp_path: Path) -> None:
    made = simple_groups((4, (3, 5, 1)), (2, (6, 2)), (3, (2, 2)))
    partly = replace(made[0], rollouts=(replace(made[0].rollouts[0], unscored=True), *made[0].rollouts[1:])).leave_out_failed()
    wholly = replace(made[2], rollouts=tuple(replace(each, unscored=True) for each in made[2].rollouts))
    dropped = {0: "filtered", 2: "unscored"}
    RolloutStore(tmp_path, "parquet").write(1, make_records(1, [partly, made[1], wholly], dropped=dropped))  # type: ignore[arg-type]
    step = rebuild_groups(RolloutStore(tmp_path, "none").read(1))
    assert [group.index for group in step.groups] == [1]
    assert [(group.index, reason, len(group.every_rollout)) for group, reason in step.dropped] == [
        (0, "filtered", 3),
        (2, "unscored", 2),
    ]


def test_rollouts_of_earlier_versions_are_refused() -> None:
    records = [replace(record, group_version=None) for record in make_records(1, simple_groups((4, (3, 5))))]
    with pytest.raises(ReplayError, match="of an earlier version"):
        rebuild_groups(records)
