"""The columns of tokens are stored with the rollouts and read again, and the ledger is made of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from strop.cli.commands import main
from strop.extensions.replay.token_ledger import LedgerError, find_rollout, make_ledger, read_step_sums
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore, StoreFormat
from strop.monitoring.rollout_store.token_values import NAMES, TokenColumns
from strop.types import Group, observation_turn
from support.each import each
from support.rollouts import make_agent_groups, make_group, make_rollout, sampled_turn

FORMATS: tuple[StoreFormat, ...] = ("parquet", "jsonl")


def groups() -> list[Group]:
    """Two groups: one with an observation in the middle, and one that was dropped."""
    turns = (sampled_turn([5, 6], [-0.5, -0.25]), observation_turn([7, 8], "so"), sampled_turn([9], [-0.125]))
    kept = make_group(make_rollout([1, 2], *turns, reward=1.0), make_rollout([1, 2], sampled_turn([4])), index=3)
    return [kept, make_group(make_rollout([1], sampled_turn([2, 3])), index=4)]


def columns() -> TokenColumns:
    """Of the four tokens that the policy sampled in the group that was kept."""
    return TokenColumns(
        sequence=torch.tensor([0, 0, 0, 1]),
        num_rollouts=2,
        columns={
            "entropy": torch.tensor([0.5, 1.0, 1.5, 2.0]),
            "mask": torch.tensor([True, True, False, True]),
            "clipped": torch.tensor([False, True, False, False]),
        },
        reasons=torch.tensor([0, 0, 3, 0], dtype=torch.uint8),
        by_term={
            "loss_terms": {
                "objective": torch.tensor([-1.0, 2.0, 0.0, 0.5]),
                "kl": torch.tensor([0.25, 0.25, 0.0, 0.5]),
                "value/value_error": torch.tensor([1.0, 1.0, 1.0, 1.0]),
            },
            "loss_gradients": {
                "objective": torch.tensor([3.0, -1.0, 0.0, 1.0]),
                "kl": torch.tensor([0.0, 1.0, 0.0, 1.0]),
                "value/value_error": torch.tensor([9.0, 9.0, 9.0, 9.0]),
            },
        },
    )


def store(folder: Path, form: StoreFormat, tokens: TokenColumns | None) -> list[RolloutRecord]:
    kept, dropped = groups()
    records = make_records(
        2, [kept, dropped], dropped={4: "filtered"}, learner_logprobs={(3, 0): torch.tensor([-0.4, -0.3, -0.1])}
    )
    RolloutStore(folder, form).write(2, records, tokens)
    (folder / "config.yaml").write_text("policy: {model_name: nowhere}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 2, "train/loss": 2.5, "train/value_loss": 4.0}) + "\n")
    return RolloutStore(folder, "none").read(2)


@each("form", FORMATS)
def test_columns_are_aligned_with_the_tokens_and_read_as_they_were(form: StoreFormat, tmp_path: Path) -> None:
    first, second, dropped = store(tmp_path / form, form, columns())
    assert first.tokens == (5, 6, 7, 8, 9)
    assert first.entropy == (0.5, 1.0, 0.0, 0.0, 1.5)
    assert first.mask == (True, True, False, False, False)
    assert first.clipped == (False, True, False, False, False)
    assert first.mask_reason == ("", "", "environment", "environment", "overlong")
    assert first.loss_terms["objective"] == (-1.0, 2.0, 0.0, 0.0, 0.0)
    assert list(first.loss_terms) == ["objective", "kl", "value/value_error"]
    assert second.loss_gradients == {"objective": (1.0,), "kl": (1.0,), "value/value_error": (9.0,)}
    assert first.reference_logprobs is None and first.correction is None
    assert dropped.entropy is None and dropped.mask_reason is None and dropped.loss_terms == {}


@each("form", FORMATS)
def test_a_column_at_the_last_token_stands_there(form: StoreFormat, tmp_path: Path) -> None:
    tokens = TokenColumns(
        sequence=torch.tensor([0, 1]),
        num_rollouts=2,
        columns={"mask": torch.tensor([True, True])},
        reasons=torch.zeros(2, dtype=torch.uint8),
        by_term={"loss_terms": {"ranking": torch.tensor([0.5, 0.25])}, "loss_gradients": {}},
        at_end=True,
    )
    first, second, _ = store(tmp_path / form, form, tokens)
    assert first.loss_terms == {"ranking": (0.0, 0.0, 0.0, 0.0, 0.5)} and second.loss_terms == {"ranking": (0.25,)}
    assert first.mask_reason == ("not_predicted", "not_predicted", "environment", "environment", "")


def test_files_of_earlier_versions_have_no_columns(tmp_path: Path) -> None:
    import pyarrow.parquet  # type: ignore[import-untyped,unused-ignore]

    store(tmp_path, "parquet", columns())
    path = RolloutStore(tmp_path, "none").path(2)
    new = [*NAMES, "group_version", "step_rewards", "turn_advantages"]
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(new), path)
    record = RolloutStore(tmp_path, "none").read(2)[0]
    assert all(not getattr(record, name) for name in new) and record.tokens == (5, 6, 7, 8, 9)


@each("form", FORMATS)
def test_the_ledger_sums_a_rollout_and_its_step(form: StoreFormat, tmp_path: Path) -> None:
    folder = tmp_path / form
    store(folder, form, columns())
    ledger = make_ledger(folder, 2, 3, 0)
    assert ledger.totals == {"objective": 1.0, "kl": 0.5, "value/value_error": 3.0}
    assert ledger.step_totals == {"objective": 1.5, "kl": 1.0, "value/value_error": 4.0}
    assert ledger.logged == {"train/loss": 2.5, "train/value_loss": 4.0} and ledger.difference == 0.0
    # gradients of the policy's terms: 3, 0, (0, 0,) 0 here and 2 in the other rollout
    assert ledger.gradient == (3.0, 0.0, 0.0, 0.0, 0.0)
    assert ledger.share == pytest.approx((9 / 13, 0.0, 0.0, 0.0, 0.0))
    assert ledger.ratio[0] == pytest.approx(1.10517, rel=1e-5) and ledger.ratio[2] is None
    assert read_step_sums(RolloutStore(folder, "none").path(2)).gradient_squares == 13.0


def test_a_rollout_is_named_by_its_group_or_its_task(tmp_path: Path) -> None:
    store(tmp_path, "parquet", columns())
    assert find_rollout(tmp_path, 2, "3/1") == (3, 1) == find_rollout(tmp_path, 2, "task/1")
    for name, message in (
        ("3", "write GROUP/SAMPLE"),
        ("3/9", "stored no rollout 3/9; it stored 3, such as 3/0"),
        ("x/0", "x/0"),
    ):
        with pytest.raises(LedgerError, match=message):
            find_rollout(tmp_path, 2, name)
    with pytest.raises(LedgerError, match="no rollouts of step 7"):
        make_ledger(tmp_path, 7, 3, 0)


def test_the_ledger_says_why_it_has_no_terms(tmp_path: Path) -> None:
    store(tmp_path, "parquet", columns())
    assert "dropped (filtered)" in make_ledger(tmp_path, 2, 4, 0).note
    store(tmp_path, "parquet", None)
    ledger = make_ledger(tmp_path, 2, 3, 0)
    assert "logger.token_columns was none" in ledger.note and "strop replay RUN --step 2" in ledger.note
    assert ledger.terms == {} and ledger.ratio[0] is not None


def test_the_command_prints_a_table_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path, "parquet", columns())
    arguments = ["ledger", str(tmp_path), "2", "3/0", "--ids"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "sum over the step:      objective 1.5, kl 1, value/value_error 4" in table and "overlong" in table
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"] == 0.0
    assert main([*arguments, "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("position,token,sampled")
    assert main(["ledger", str(tmp_path), "2", "9/9"]) == 2
    assert "stored no rollout 9/9" in capsys.readouterr().err


def test_rollouts_of_agents_with_branches_have_their_columns_too(tmp_path: Path) -> None:
    agents = [replace(group, index=place) for place, group in enumerate(make_agent_groups())]
    records = make_records(1, agents)
    sizes = [sum(record.sampled) for record in records]
    tokens = TokenColumns(
        sequence=torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
        num_rollouts=len(sizes),
        columns={"entropy": torch.arange(sum(sizes)).float() + 1},
        reasons=torch.zeros(sum(sizes), dtype=torch.uint8),
    )
    RolloutStore(tmp_path, "parquet").write(1, records, tokens)
    stored = RolloutStore(tmp_path, "none").read(1)
    found = [value for record in stored for value, sampled in zip(record.entropy or (), record.sampled, strict=True) if sampled]
    assert found == [float(place + 1) for place in range(sum(sizes))]
