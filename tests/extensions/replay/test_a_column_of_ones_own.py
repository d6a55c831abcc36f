"""A column that only this test declares goes from an engine's completion through a step, its stored rollouts and a replay of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from strop.data.packing import pack
from strop.data.shares import SplitRule, divide_batch
from strop.extensions.replay.replay_plan import ReplayError
from strop.extensions.replay.stored_groups import LearnerReads, rebuild_groups
from strop.generation.base import Completion
from strop.monitoring.rollout_store.rollout_record import make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore, StoreFormat
from strop.rollouts.policy_turns import make_policy_turn
from strop.sampling import Sampling
from strop.types import Batch, Group, Rollout, observation_turn
from support.columns import PREDICTED, READ, ROLLOUT, STRANGERS, check_part, check_strangers, report, with_strangers
from support.rollouts import make_agent_groups, make_group, make_rollout


class PlainTemplate:
    def decode_turn(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    def find_opening(self, context: object) -> str:
        return ""


def sample(sample: int) -> Rollout:
    """An episode of two turns, whose completions an engine reports with its columns; its environment sets that of the rollout."""
    rollout = make_rollout([5, 6, 7], sample=sample)
    for answer in ([8, 9 + sample], [12, 13, 14]):
        context = rollout.tokens().tolist()
        completion = Completion(
            tokens=torch.tensor(answer),
            logprobs=torch.zeros(len(answer)),
            versions=torch.zeros(len(answer), dtype=torch.int32),
            text="",
            stopped=True,
            columns=report(context, answer),
        )
        turn = make_policy_turn(completion, context, cast(Any, PlainTemplate()), cast(Any, None), Sampling())
        rollout = rollout.with_turn(turn).with_turn(observation_turn([10, 11], "more"))
    return replace(rollout, columns={ROLLOUT: torch.tensor([[sample, 3, 2**40]])})


def assert_same_columns(one: Batch, other: Batch) -> None:
    for field in ("columns", "read_columns", "rollout_columns"):
        found, wanted = getattr(one, field), getattr(other, field)
        assert found.keys() == wanted.keys() and found
        for name, column in wanted.items():
            assert found[name].dtype == column.dtype and torch.equal(found[name].nan_to_num(-9), column.nan_to_num(-9)), name


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_column_goes_from_an_engine_to_the_ranks_and_to_a_replay(format: StoreFormat, tmp_path: Path) -> None:
    groups = [make_group(sample(0), sample(1), index=3), *map(with_strangers, make_agent_groups())]
    batch = pack(groups)
    check_strangers(groups, batch)
    for share in divide_batch(batch, SplitRule(ranks=2, token_budget=20)):
        for part, _ in share.micro_batches():
            if part is not None:
                check_part(part.batch, part.index, batch, batch.sequence[part.index].unique().tolist())
    store = RolloutStore(tmp_path, format)
    store.write(1, make_records(1, groups))
    rebuilt = rebuild_groups(store.read(1, ledger=False), LearnerReads(columns=STRANGERS)).groups
    assert_same_columns(pack(rebuilt), batch)
    rewritten = RolloutStore(tmp_path / "again", format)
    rewritten.write(1, store.read(1))
    assert rewritten.read(1) == store.read(1)


def test_what_a_declaration_does_not_store_is_missed_by_its_key_and_a_field_of_the_store_is_no_column(tmp_path: Path) -> None:
    (group,) = map(with_strangers, make_agent_groups())
    unstored = replace(PREDICTED, stored="logger.stranger", key="policy.stranger.enabled")

    def renamed(group: Group, **change: Any) -> Group:
        turns = tuple(replace(turn, columns={replace(PREDICTED, **change): torch.zeros(2)}) for turn in group.rollouts[2].turns)
        return make_group(replace(group.rollouts[2], turns=turns, columns={}))

    records = make_records(1, [renamed(group, stored=unstored.stored, key=unstored.key)])
    assert not records[0].columns
    with pytest.raises(ReplayError, match=r"policy.stranger.enabled is true, .* 'stranger_predicted'.* set logger.stranger=true"):
        rebuild_groups(records, LearnerReads(columns=(unstored,)))
    assert rebuild_groups(records, LearnerReads(columns=(READ,))), "no key says that it must be there"
    with pytest.raises(ValueError, match="already have a field 'reward'"):
        make_records(1, [renamed(group, name="reward")])
