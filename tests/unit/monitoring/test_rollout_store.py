"""Every rollout is stored, and comes back as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from strop.monitoring.rollout_store import stored_files
from strop.monitoring.rollout_store.rollout_record import RolloutRecord, make_records, split_by_rollout
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.monitoring.rollout_store.stored_files import DamagedRollouts
from strop.types import Batch, Ending, Group, Message, Rollout, Task, Totals, Turn, observation_turn
from support.full_disk import FullDisk
from support.stored_steps import inflate


def policy_turn(*tokens: int, text: str = "4") -> Turn:
    size = len(tokens)
    return Turn(
        author="policy",
        tokens=torch.tensor(tokens),
        text=text,
        logprobs=torch.linspace(-2.0, -0.1, size),
        versions=torch.full((size,), 3, dtype=torch.int32),
    )


def a_group(index: int = 7, error: str | None = None) -> Group:
    task = Task(id=f"sum-{index}", question="2 + 2?", answer="4")
    messages = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "2 + 2?"))
    start = Rollout(task=task, sample=0, seed=1, messages=messages, prompt=torch.tensor([1, 2, 3]))
    short = replace(
        start.with_turn(policy_turn(4, 5), Message("assistant", "4")),
        ending=Ending.STOP, reward=1.1, rewards={"correct": 1.0, "format": 0.1},
    )  # fmt: skip
    long = replace(
        start.with_turn(policy_turn(6, text="5"), Message("assistant", "5"))
        .with_turn(observation_turn([8, 9], " wrong "), Message("user", "wrong"))
        .with_turn(policy_turn(10, 11, 12, text="früh 4 \u2028\n"), Message("assistant", "4")),
        sample=1, ending=Ending.LENGTH, reward=0.1, rewards={"format": 0.1}, error=error,
    )  # fmt: skip
    return Group(index=index, environment="arithmetic", version=3, rollouts=(short, long))


def some_records(step: int = 12) -> list[RolloutRecord]:
    return make_records(
        step,
        [a_group(7), a_group(8, error="sandbox died")],
        advantages={(7, 0): 0.7071067811865475, (7, 1): -0.7071067811865475},
        learner_logprobs={(7, 0): torch.tensor([-0.3, -0.2]), (7, 1): torch.tensor([-0.1, -0.4, -float("inf"), 0.0])},
        dropped={8: "error"},
    )


def test_a_record_says_what_was_read_written_earned_and_thought() -> None:
    first, second, dropped, _ = some_records()
    assert (first.task_id, first.sample, first.reward, first.ending) == ("sum-7", 0, 1.1, "stop")
    assert first.prompt == "user: 1 + 1?\nassistant: 2\nuser: 2 + 2?"
    assert second.tokens == (6, 8, 9, 10, 11, 12)
    assert second.sampled == (True, False, False, True, True, True)
    assert second.completion == "5 wrong früh 4 \u2028\n"
    assert second.versions == (3, -1, -1, 3, 3, 3)
    assert second.learner_logprobs is not None
    assert second.learner_logprobs == pytest.approx((-0.1, 0.0, 0.0, -0.4, -math.inf, 0.0))
    assert second.kept and second.dropped_because is None
    assert dropped.learner_logprobs is None and dropped.advantage is None
    assert not dropped.kept and dropped.dropped_because == "error"


def test_a_rollout_that_failed_before_its_first_turn_has_a_record() -> None:
    group = a_group()
    empty = replace(group.rollouts[0], turns=(), messages=group.rollouts[0].messages[:3], ending=Ending.ERROR, error="no prompt")
    record = make_records(1, [replace(group, rollouts=(empty,))], dropped={7: "error"})[0]
    assert record.tokens == () and record.error == "no prompt" and record.prompt.endswith("2 + 2?")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_records_come_back_as_they_were(tmp_path: Path, format: str) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    records = some_records()
    path = store.write(12, records)
    assert path == tmp_path / "rollouts" / f"step_000012.{format}"
    assert store.read(12) == records


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_values_that_are_not_finite_come_back(tmp_path: Path, format: str) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    odd = replace(some_records()[0], reward=math.nan, advantage=math.inf, sampler_logprobs=(math.nan, -math.inf))
    store.write(1, [odd])
    (back,) = store.read(1)
    assert math.isnan(back.reward) and back.advantage == math.inf
    assert math.isnan(back.sampler_logprobs[0]) and back.sampler_logprobs[1] == -math.inf


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_step_without_rollouts_is_a_file_without_rows(tmp_path: Path, format: str) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    store.write(1, [])
    assert store.read(1) == [] and store.steps() == [1]


def test_a_step_that_runs_again_replaces_its_file_also_in_another_format(tmp_path: Path) -> None:
    RolloutStore(tmp_path, "jsonl").write(3, some_records(3))
    RolloutStore(tmp_path, "parquet").write(3, some_records(3)[:1])
    assert {path.name for path in (tmp_path / "rollouts").iterdir()} == {"step_000003.parquet", "step_000003_ratios.jsonl"}
    assert len(RolloutStore(tmp_path).read(3)) == 1


def test_resume_removes_later_steps_and_half_written_files_and_nothing_else(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, "jsonl")
    for step in range(1, 6):
        store.write(step, some_records(step))
    (store.folder / ".step_000006.jsonl.tmp").write_text("{")
    (store.folder / "notes.txt").write_text("mine")
    store.resume(3)
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "notes.txt", *(f"step_00000{step}{kind}.jsonl" for step in (1, 2, 3) for kind in ("", "_ratios"))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("gone", "said"), [((), ""), ((2,), "1 step, 2"), ((1, 2, 3), "3 steps, 1 to 3"), ((1, 4), "2 steps, 1 to 4")]
)
def test_a_run_that_continues_says_which_rollouts_are_gone(
    tmp_path: Path, gone: tuple[int, ...], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = RolloutStore(tmp_path, "jsonl")
    for step in range(1, 6):
        store.write(step, some_records(step))
    for step in gone:
        store.path(step).unlink()
    store.resume(4)
    assert (f"no rollouts of {said} (of 4 before" in caplog.text) if gone else not caplog.text
    RolloutStore(tmp_path / "other", "none").resume(4)
    assert caplog.text.count("has no rollouts") == bool(gone), "a run that stores none misses none"


def test_a_write_that_fails_leaves_the_step_as_it_was(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, "jsonl")
    store.write(1, some_records(1))
    with pytest.raises(TypeError):
        store.write(1, [*some_records(1)[:1], replace(some_records(1)[1], reward=object())])  # type: ignore[arg-type]
    assert store.read(1) == some_records(1)
    assert store.read_ratios(1)[0].step == 1 and len(list(store.folder.iterdir())) == 2


def test_the_table_of_ratios_has_the_tokens_that_differ_most_with_what_stands_before_them(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path, "jsonl", decode=lambda tokens: "".join(chr(96 + token) for token in tokens))
    store.write(12, some_records())
    first, second = store.read_ratios(12)[:2]
    assert (first.log_ratio, first.learner_logprob) == (-math.inf, -math.inf)
    assert (first.text, first.context, first.position, first.turn, first.version) == ("k", "abcfhij", 3, 2, 3)
    assert (first.task_id, first.group, first.sample, first.step) == ("sum-7", 7, 1, 12)
    assert (second.token, second.position, second.turn) == (6, 1, 1)
    assert second.log_ratio == pytest.approx(1.9) and second.sampler_logprob == -2.0
    assert all(abs(left.log_ratio) >= abs(right.log_ratio) for left, right in pairwise(store.read_ratios(12)))
    assert {row.group for row in store.read_ratios(12)} == {7}, "the learner never saw the dropped group"


def test_errors_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parquet, jsonl, none"):
        RolloutStore(tmp_path, "csv")  # type: ignore[arg-type]
    store = RolloutStore(tmp_path, "jsonl")
    with pytest.raises(FileNotFoundError, match="stored are none"):
        store.read(1)
    store.write(4, [])
    with pytest.raises(FileNotFoundError, match=r"stored are 1 step, 4$"):
        store.read(1)


def test_a_column_of_the_batch_is_cut_into_rollouts() -> None:
    sequence = torch.tensor([0, 0, 1, 1, 1, 1])
    batch = Batch(
        tokens=torch.arange(9), positions=torch.arange(9), segment_start=torch.tensor([0]), segment_parent=torch.tensor([-1]),
        source=torch.arange(6), target=torch.arange(6), sequence=sequence, rollout_logprobs=torch.zeros(6),
        versions=torch.zeros(6, dtype=torch.int32), advantages=torch.zeros(6), mask=torch.ones(6), leaf=torch.zeros(2).long(),
        group=torch.zeros(2).long(), rewards=torch.zeros(2), totals=Totals(tokens=6, sequences=2, groups=1),
    )  # fmt: skip
    parts = split_by_rollout(torch.arange(6.0), batch, [a_group()])
    assert {key: part.tolist() for key, part in parts.items()} == {(7, 0): [0.0, 1.0], (7, 1): [2.0, 3.0, 4.0, 5.0]}
    assert make_records(1, [a_group()], learner_logprobs=parts)[1].learner_logprobs == (2.0, 0.0, 0.0, 3.0, 4.0, 5.0)
    with pytest.raises(ValueError, match="pass the groups that it was packed from"):
        split_by_rollout(torch.arange(6.0), batch, [a_group(), a_group(8)])


def test_rollouts_that_a_full_disk_refuses_are_lost_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, store = FullDisk(tmp_path, monkeypatch), RolloutStore(tmp_path, "jsonl")
    disk.full = True
    for step in (1, 2):
        store.write(step, [])
    disk.full = False
    store.write(3, [])
    assert store.steps() == [3] and caplog.text.count("rollouts cannot be written") == 1


@pytest.mark.parametrize("column", ["completion", "task_id", "prompt"])
@pytest.mark.parametrize("dictionary", [False, True])
def test_no_reader_inflates_a_small_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, dictionary: bool) -> None:
    """A text that all rows repeat, or that is compressed to nothing, is refused before it fills the memory."""
    monkeypatch.setattr(stored_files, "LARGE", 2**22)
    store = RolloutStore(tmp_path)
    store.write(1, some_records(1))
    store.write(2, some_records(2))
    inflate(store.path(2), column, size=2**16, count=1024, dictionary=dictionary)
    readers = {
        "whole": lambda: store.read(2),
        "of a task": lambda: store.read(2, "a" * 2**16 if column == "task_id" else some_records()[0].task_id, ledger=False),
        "one": lambda: store.read_one(2, 0, 0),
        "keys": lambda: store.read_keys(2),
        "of a run": lambda: list(store.read_all()),
    }
    for name, read in readers.items():
        if dictionary and name not in ("whole", "of a run"):
            continue  # it reads a few rows, or no text
        with pytest.raises(DamagedRollouts, match=r"bytes (are .* )?when they are read"):
            read()
            pytest.fail(name)
    assert len(store.read(1)) == len(some_records(1)), "the other steps can be read"
