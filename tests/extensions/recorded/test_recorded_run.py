"""From a configuration and files of recorded data to the groups a run trains on and is measured by."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from loop.fakes import Recorder
from strop.algorithms.base import Algorithm
from strop.config import load_config
from strop.config.schema.run_config import TRAINING_RUNS
from strop.data.sources.records import DataError
from strop.extensions.recorded.preference.referenced import DPO
from strop.extensions.recorded.preference.unpaired import KTO
from strop.extensions.recorded.recorded_config import RecordedRunConfig
from strop.extensions.recorded.recorded_run import (
    RecordedExamples,
    join_examples,
    make_recorded_options,
    make_recorded_stream,
    make_validation_groups,
    read_examples,
    read_validation_examples,
)
from strop.extensions.recorded.supervised import SFT
from strop.models.chat_template import ChatTemplate, ConversationError
from strop.rollouts.stream import EndOfTasks
from strop.runs.lifecycle import make_early_stop, resolve_metric
from strop.runs.models import LoadedPolicy
from strop.types import Group


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    """All that examples need of a policy: its tokenizer."""
    from support.tokenizer import END, build_tokenizer

    tokenizer = build_tokenizer()
    return LoadedPolicy(network=None, tokenizer=tokenizer, template=ChatTemplate(tokenizer), stop_ids=(END,))  # type: ignore[arg-type]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(path: Path, count: int, *, long: tuple[int, ...] = ()) -> Path:
    return write(path, [{"prompt": f"{n}?", "completion": "x" * 300 if n in long else f"{n}!"} for n in range(count)])


def config(section: str, *overrides: str) -> RecordedRunConfig:
    base = ["policy.model_name=m", f"{section}.val_period=0", "policy.max_total_sequence_length=128"]
    found = load_config(None, [*base, *overrides], root=TRAINING_RUNS[section]).config
    assert isinstance(found, RecordedRunConfig)
    return found


def examples(found: RecordedRunConfig, algorithm: Algorithm, policy: LoadedPolicy) -> RecordedExamples:
    return join_examples(found, found.data.train, read_examples(found, found.data.train, "train", algorithm), algorithm, policy)


def said(group: Group) -> str:
    return group.rollouts[0].text


# --- training data -----------------------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_example_once_and_the_stream_ends(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 7)
    found = examples(config("sft", f"data.train.dataset_name={rows}", "sft.max_num_epochs=2"), SFT(), policy)
    assert (len(found), found.size) == (7, 14)
    epochs = [[said(found.read_group(index)) for index in range(start, start + 7)] for start in (0, 7)]
    assert sorted(epochs[0]) == sorted(epochs[1]) and len(set(epochs[0])) == 7 and epochs[0] != epochs[1]
    after = found.read_group(14)
    assert after.errors and "lies outside the stream" in after.errors[0]


def test_a_group_follows_from_its_position(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 9)
    runs = [
        examples(config("sft", f"data.train.dataset_name={rows}", "sft.max_num_epochs=null", f"sft.seed={seed}"), SFT(), policy)
        for seed in (1, 1, 2)
    ]
    assert runs[0].size is None
    orders = [[run.read_group(index).task.id for index in (30, 3, 17, 4, 5)] for run in runs]
    assert orders[0] == orders[1] != orders[2]
    assert runs[0].read_group(30).index == 30 and runs[0].read_group(30).version == -1


def test_entries_are_mixed_by_weight_and_named(tmp_path: Path, policy: LoadedPolicy) -> None:
    few, many = conversations(tmp_path / "few.jsonl", 2), conversations(tmp_path / "many.jsonl", 50)
    entries = json.dumps([{"dataset_name": str(few), "weight": 1.0}, {"dataset_name": str(many), "weight": 3.0}])
    found = examples(config("sft", f"data.train={entries}", "sft.max_num_epochs=null"), SFT(), policy)
    names = [found.read_group(index).environment for index in range(40)]
    assert names.count(str(many)) == 30 and names.count(str(few)) == 10
    assert len(found.read_all()) == 52, "for a reference that is computed once, each example counts once"


def test_an_example_that_is_too_long_is_a_group_with_its_error(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 4, long=(2,))
    found = examples(config("sft", f"data.train.dataset_name={rows}", "data.shuffle=false"), SFT(), policy)
    (error,) = found.read_group(2).errors
    assert "ExampleTooLong" in error and "at most 128 fit (policy.max_total_sequence_length)" in error
    assert [said(group) for group in found.read_all()] == ["0!", "1!", "3!"]


def test_only_the_final_turn_is_taught_where_that_is_asked_for(tmp_path: Path, policy: LoadedPolicy) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    rows = write(tmp_path / "rows.jsonl", [{"messages": turns}])
    taught = {}
    for final in ("true", "false"):
        found = examples(config("sft", f"data.train.dataset_name={rows}", f"sft.only_unmask_final={final}"), SFT(), policy)
        taught[final] = [turn.text for turn in found.read_group(0).rollouts[0].policy_turns]
    assert taught == {"true": ["d"], "false": ["b", "d"]}


def test_what_is_taught_ends_as_the_configuration_says(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 1)
    with pytest.warns(UserWarning, match="has no chat template"):
        template = ChatTemplate(_without_template(policy.tokenizer))
    plain = LoadedPolicy(policy.tokenizer, template, policy.stop_ids, policy.network)
    ends = {}
    for add in ("true", "false"):
        found = examples(config("sft", f"data.train.dataset_name={rows}", f"data.add_eos={add}"), SFT(), plain)
        ends[add] = int(found.read_group(0).rollouts[0].turns[-1].tokens[-1]) in policy.stop_ids
    assert ends == {"true": True, "false": False}


def _without_template(tokenizer: Any) -> Any:
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    return plain


PAIRS = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": f"{n}."} for n in range(6)]


def test_the_unrelated_completion_of_a_judgement_belongs_to_another_prompt(tmp_path: Path, policy: LoadedPolicy) -> None:
    """Also where verdicts come from pairs, whose two completions stand next to each other."""
    rows = write(tmp_path / "pairs.jsonl", PAIRS)
    found = examples(config("dpo", f"data.train.dataset_name={rows}", "algorithm.name=kto", "data.shuffle=false"), KTO(), policy)
    assert len(found) == 12
    for index in range(12):
        own, unrelated = found.read_group(index).rollouts
        assert own.text == f"{index // 2}{'.' if index % 2 else '!'}" and own.reward == 1.0 - index % 2
        assert unrelated.text[0] != own.text[0] and unrelated.prompt is own.prompt


def test_data_of_another_kind_is_refused(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = write(tmp_path / "pairs.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"pairs\.jsonl"):
        examples(config("dpo", f"data.train.dataset_name={rows}"), DPO(), policy)


# --- the loop ----------------------------------------------------------------------------------------------------------------------


def test_a_step_has_as_many_examples_as_the_global_batch() -> None:
    base = ["data.train.dataset_name=squad", "sft.max_num_steps=-1", "sft.val_at_end=true", "checkpointing.save_period=7"]
    found = make_recorded_options(config("sft", *base, "policy.train_global_batch_size=12"), 1000, share_prefixes=True)
    assert (found.groups_per_step, found.steps_per_batch, found.update_epochs, found.max_staleness) == (12, 1, 1, 0)
    assert found.max_steps > 10**9 and found.val_at_end and found.save_period == 7
    assert (found.section, found.batch_key) == ("sft", "policy.train_global_batch_size")
    without = config("sft", *base)
    assert make_recorded_options(without, 1000, share_prefixes=True).groups_per_step == 32
    assert make_recorded_options(without, 5, share_prefixes=False).groups_per_step == 5


def test_the_stream_is_in_order_and_goes_on_where_it_was_left(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 6)
    found = config("sft", f"data.train.dataset_name={rows}", "sft.max_num_epochs=1", "policy.train_global_batch_size=2")
    options = make_recorded_options(found, 6, share_prefixes=True)

    async def read() -> tuple[list[str], list[str]]:
        whole, ids = make_recorded_stream(examples(found, SFT(), policy), options, None), []
        state = whole.state()
        for count in range(6):
            ids.append((await whole.next()).task.id)
            whole.release(1)
            state = whole.state() if count == 2 else state
        with pytest.raises(EndOfTasks):
            await whole.next()
        rest = make_recorded_stream(examples(found, SFT(), policy), options, state)
        return ids, [(await rest.next()).task.id for _ in range(2)]

    ids, rest = asyncio.run(read())
    assert len(set(ids)) == 6 and rest == ids[3:5]


# --- validation --------------------------------------------------------------------------------------------------------------------


def measured(found: RecordedRunConfig, policy: LoadedPolicy, notes: Recorder | None = None) -> list[str]:
    return [
        said(group)
        for group in make_validation_groups(found, read_validation_examples(found, SFT()), SFT(), policy, notes or Recorder())
    ]


def test_batches_of_validation_are_the_first_examples_that_can_be_used(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows, notes = conversations(tmp_path / "rows.jsonl", 9, long=(1, 8)), Recorder()
    entries = [f"data.train.dataset_name={rows}", f"data.validation.dataset_name={rows}", "sft.val_at_end=true"]
    some = config("sft", *entries, "sft.val_batches=2", "sft.val_global_batch_size=2")
    assert measured(some, policy, notes) == ["0!", "2!", "3!", "4!"]
    assert notes.notes == ["2 examples of the validation data are unusable (most likely too long) and are left out"]
    assert len(measured(config("sft", *entries), policy)) == 7
    assert len(measured(config("sft", *entries, "sft.val_batches=50"), policy)) == 7


def test_what_is_held_out_is_not_trained_on(tmp_path: Path, policy: LoadedPolicy) -> None:
    rows = conversations(tmp_path / "rows.jsonl", 20)
    found = config("sft", f"data.train.dataset_name={rows}", "data.train.split_validation_size=0.25", "sft.val_at_end=true")
    held_out = set(measured(found, policy))
    trained_on = {said(group) for group in examples(found, SFT(), policy).read_all()}
    assert (len(held_out), len(trained_on)) == (5, 15) and not held_out & trained_on


@pytest.mark.parametrize(
    ("name", "tag"),
    [
        ("loss", "validation/loss"),
        ("val:loss", "validation/loss"),
        ("val:val_loss", "validation/loss"),  # NeMo-RL's names of it
        ("val:validation-default_loss", "validation/loss"),
        ("val:accuracy", "validation/accuracy"),
    ],
)
def test_a_run_is_stopped_by_what_is_logged(name: str, tag: str) -> None:
    assert resolve_metric(name, "validation") == tag
    stopping = [f"sft.stop_at_validation_metric={name}", "sft.stop_at_validation_patience=3"]
    lower = "sft.stop_at_validation_higher_is_better=false"
    found = make_early_stop(config("sft", "data.train.dataset_name=squad", *stopping, lower))
    assert found is not None and (found.metric, found.patience, found.threshold) == (tag, 3, None)
    assert not found.higher_is_better
    assert make_early_stop(config("sft", "data.train.dataset_name=squad")) is None


def test_validation_data_that_cannot_be_used_is_left_out_for_its_own_reason(
    tmp_path: Path, policy: LoadedPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConversationError("the template opens it in two ways")

    monkeypatch.setattr(ChatTemplate, "encode_spans", refuse)
    rows, notes = conversations(tmp_path / "rows.jsonl", 2), Recorder()
    entries = [f"data.train.dataset_name={rows}", f"data.validation.dataset_name={rows}", "sft.val_at_end=true"]
    assert measured(config("sft", *entries), policy, notes) == []
    (note,) = notes.notes
    assert note.startswith("2 examples of the validation data are unusable and are left out; example")
    assert "the template opens it in two ways" in note
