"""What a learner reads besides tokens is stored with the rollouts, and a batch of rebuilt groups has it to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from strop.data.packing import pack
from strop.extensions.replay.replay_plan import ReplayError
from strop.extensions.replay.stored_groups import LearnerReads, rebuild_groups
from strop.models.routing.router_config import ROUTES
from strop.monitoring.rollout_store.rollout_record import list_images, make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore, StoreFormat
from strop.sampling import KEPT, pad_kept_tokens
from strop.types import Batch, Branch, Ending, Group, PromptImage, Rollout, Turn, observation_turn
from support.rollouts import make_agent_groups, make_group, make_rollout, sampled_turn

ALL = LearnerReads(columns=(ROUTES, KEPT), baseline=True)
ALL_STORED = LearnerReads(columns=(ROUTES, KEPT))
IMAGE = 7  # the token of images


def change_turns(group: Group, change: Callable[[Turn], Turn]) -> Group:
    """The group with each turn of the policy changed, those of branches too."""

    def changed(turns: Sequence[Turn]) -> tuple[Turn, ...]:
        return tuple(change(turn) if turn.sampled else turn for turn in turns)

    rollouts = [
        replace(
            rollout,
            turns=changed(rollout.turns),
            branches=tuple(replace(branch, turns=changed(branch.turns)) for branch in rollout.branches),
        )
        for rollout in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts))


def with_kept(turn: Turn) -> Turn:
    """The ids that each token was sampled from: as many as the token is large, and itself."""
    sets = [torch.tensor([*range(token % 5), token], dtype=torch.int32) for token in turn.tokens.tolist()]
    return replace(turn, columns={**turn.columns, KEPT: pad_kept_tokens(sets)})


def with_routes(turn: Turn, experts: int = 100) -> Turn:
    dtype = torch.int8 if experts <= 128 else torch.int16
    routes = torch.randint(0, experts, (len(turn.tokens), 2, 3), dtype=dtype, generator=torch.Generator().manual_seed(1))
    return replace(turn, columns={**turn.columns, ROUTES: routes})


def store_and_rebuild(
    folder: Path, groups: Sequence[Group], format: StoreFormat = "parquet", reads: LearnerReads = ALL
) -> list[Group]:
    store = RolloutStore(folder, format)
    store.write_images(list_images(groups))
    store.write(1, make_records(1, groups, stores=lambda _: True))
    return list(rebuild_groups(store.read(1, ledger=False), reads, store.images).groups)


def assert_same(first: Batch, second: Batch) -> None:
    for item in fields(Batch):
        one, other = getattr(first, item.name), getattr(second, item.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and torch.equal(one, other), item.name
    for name in ("columns", "read_columns", "rollout_columns"):
        of_first, of_second = getattr(first, name), getattr(second, name)
        assert of_first.keys() == of_second.keys()
        assert all(
            torch.equal(column, of_second[key]) and column.dtype == of_second[key].dtype for key, column in of_first.items()
        )
    assert [vars(image) for image in first.images] == [vars(image) for image in second.images]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_sets_and_experts_are_kept_on_every_path(format: StoreFormat, tmp_path: Path) -> None:
    groups = [replace(change_turns(group, with_kept), baseline=make_rollout([1])) for group in make_agent_groups()]
    groups = [change_turns(group, with_routes) for group in groups]
    rebuilt = store_and_rebuild(tmp_path, groups, format)
    for share in (True, False):
        batch = pack(groups, share_prefixes=share)
        assert "routes" in batch.read_columns and "kept_tokens" in batch.columns
        assert_same(batch, pack(rebuilt, share_prefixes=share))


def test_more_than_128_experts_are_kept(tmp_path: Path) -> None:
    groups = [change_turns(group, lambda turn: with_routes(turn, 300)) for group in make_agent_groups()]
    rebuilt = store_and_rebuild(tmp_path, groups, reads=LearnerReads(columns=(ROUTES,)))
    assert_same(pack(groups), pack(rebuilt))


def test_what_the_learner_does_not_read_is_left_out(tmp_path: Path) -> None:
    groups = [change_turns(change_turns(group, with_kept), with_routes) for group in make_agent_groups()]
    groups = [replace(group, baseline=make_rollout([1])) for group in groups]
    rebuilt = store_and_rebuild(tmp_path, groups, reads=LearnerReads())
    batch = pack(rebuilt)
    assert not batch.read_columns and not batch.columns and all(group.baseline is None for group in rebuilt)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_greedy_rollout_is_kept_as_far_as_its_credit_reads_it(format: StoreFormat, tmp_path: Path) -> None:
    greedy = make_rollout([1, 2], sampled_turn([3, 4, 5]), reward=0.1 + 0.2, ending=Ending.LENGTH)
    group = replace(make_group(make_rollout([1, 2], sampled_turn([3]))), baseline=greedy)
    (rebuilt,) = store_and_rebuild(tmp_path, [group], format, LearnerReads(baseline=True))
    assert rebuilt.baseline is not None and rebuilt.baseline.reward == 0.1 + 0.2
    assert rebuilt.baseline.sampled_tokens == 3 and rebuilt.baseline.truncated


def image(start: int, name: str) -> PromptImage:
    content = b"\x89PNG\r\n\x1a\n" + name.encode()
    return PromptImage(start=start, length=3, content=content, digest=sha256(content).hexdigest())


def seeing(sample: int) -> Rollout:
    """An image in the prompt, one in an observation, and one in an observation of a branch."""
    observed = observation_turn([5, IMAGE, IMAGE, IMAGE], "see", (image(9, "observed"),))
    turns = (sampled_turn([10, 11]), observed, sampled_turn([12 + sample]))
    beside = observation_turn([6, IMAGE, IMAGE, IMAGE], "look", (image(9, "beside"),))
    branch = Branch(parent=0, start=8, turns=(beside, sampled_turn([20 + sample])))
    rollout = make_rollout([1, 2, IMAGE, IMAGE, IMAGE, 3], *turns)
    return replace(rollout, sample=sample, branches=(branch,), images=(image(2, "shown"),))


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_images_stand_where_they_stood_with_the_content_of_the_run(format: StoreFormat, tmp_path: Path) -> None:
    groups = [make_group(seeing(0), seeing(1), index=3), make_group(make_rollout([1, 2], sampled_turn([3])), index=4)]
    rebuilt = store_and_rebuild(tmp_path, groups, format, LearnerReads())
    for share in (True, False):
        batch = pack(groups, share_prefixes=share)
        assert len(batch.images) >= 5
        assert_same(batch, pack(rebuilt, share_prefixes=share))


def test_an_image_that_is_gone_or_changed_is_refused(tmp_path: Path) -> None:
    groups = [make_group(seeing(0))]
    store_and_rebuild(tmp_path, groups, reads=LearnerReads())
    store = RolloutStore(tmp_path, "none")
    path = store.images.find(image(2, "shown").digest[:32])
    assert path is not None
    path.write_bytes(b"another")
    with pytest.raises(ReplayError, match="its content was changed"):
        rebuild_groups(store.read(1), images=store.images)
    path.unlink()
    with pytest.raises(ReplayError, match="is not in rollouts/images any more"):
        rebuild_groups(store.read(1), images=store.images)


def test_what_an_earlier_version_did_not_store_is_refused_by_name() -> None:
    records = make_records(1, [make_group(seeing(0))])
    for reads, change, message in (
        (LearnerReads(), {"image_places": None}, "where they stand in the tokens"),
        (LearnerReads(columns=(KEPT,)), {}, "keep_sampling_mask is true, .* 'kept_tokens' .* cannot be replayed"),
        (LearnerReads(columns=(ROUTES,)), {}, "set logger.routes=true"),
        (LearnerReads(baseline=True), {}, "greedy rollout of each group, and step 1 stored none"),
    ):
        with pytest.raises(ReplayError, match=message):
            rebuild_groups([replace(record, **change) for record in records], reads)  # type: ignore[arg-type]


def test_files_of_earlier_versions_with_columns_of_nulls_or_values_are_read(tmp_path: Path) -> None:
    """They have a column for each that this version knew, null where a run did not store it, and the sets before the experts."""
    import pyarrow
    import pyarrow.parquet

    groups = [change_turns(change_turns(group, with_kept), with_routes) for group in make_agent_groups()]
    store = RolloutStore(tmp_path, "parquet")
    for number, each in ((1, groups), (2, make_agent_groups())):
        path = store.write(number, make_records(number, each, stores=lambda _: True))
        assert path is not None
        table = pyarrow.parquet.read_table(path)
        values = {name: table[name] for name in table.column_names if name in ("routes", "kept_tokens")}
        experts = pyarrow.list_(
            pyarrow.struct([("turn", pyarrow.int64()), ("shape", pyarrow.list_(pyarrow.int64())), ("data", pyarrow.binary())])
        )
        for name, kind in (("kept_tokens", pyarrow.list_(pyarrow.list_(pyarrow.int32()))), ("routes", experts)):
            table = table.drop_columns([name]) if name in values else table
            table = table.append_column(name, values.get(name, pyarrow.nulls(len(table), kind)))
            assert table[name].type == kind
        pyarrow.parquet.write_table(table, path)
    assert_same(pack(groups), pack(rebuild_groups(store.read(1), ALL_STORED).groups))
    assert not any(record.columns for record in store.read(2))
