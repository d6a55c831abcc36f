"""A conversation is stored turn by turn, whatever text it has, and old files still read."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pyarrow.parquet
import pytest
import torch

from strop.extensions.reading.rollout_view import format_rollout, show_rollout
from strop.monitoring.rollout_store.rollout_record import TurnRecord, make_records
from strop.monitoring.rollout_store.rollout_store import RolloutStore
from strop.types import Ending, Group, Message, Rollout, Task, ToolCall, Turn, observation_turn
from support.rollouts import make_agent_groups


def said(*tokens: int, text: str, version: int = 3) -> Turn:
    size = len(tokens)
    versions = torch.tensor([version] * (size - 1) + [version + 1], dtype=torch.int32)
    return Turn(author="policy", tokens=torch.tensor(tokens), text=text, logprobs=torch.zeros(size), versions=versions)


def a_group(task_id: str = "sum", tool: str = "4824", environment: str = "calculator") -> Group:
    prompt = (Message("system", "Use the tool."), Message("user", "2?"), Message("assistant", "2"), Message("user", "72 * 67?"))
    rollout = (
        Rollout(task=Task(id=task_id, answer="4824"), sample=0, seed=0, messages=prompt, prompt=torch.tensor([1, 2]))
        .with_turn(said(5, 6, text="<tool>72 * 67</tool>"), Message("assistant", "<tool>72 * 67</tool>"))
        .with_turn(observation_turn([7, 8, 9], f"{tool}\nGo on."), Message("tool", tool), Message("user", "Go on."))
        .with_turn(said(10, text="4824"), Message("assistant", "4824"))
    )
    rollout = replace(rollout, ending=Ending.STOP, metrics={"calls": 1.0}, reward=1.0, rewards={"correct": 1.0})
    return Group(index=0, environment=environment, version=3, rollouts=(rollout,))


def test_the_tools_answer_and_the_models_are_turns_of_their_own() -> None:
    (record,) = make_records(1, [a_group()])
    assert record.turns == (
        TurnRecord(role="assistant", text="<tool>72 * 67</tool>", start=0, end=2, sampled=True, versions=(3, 4)),
        TurnRecord(role="tool", text="4824", start=2, end=5, sampled=False, versions=()),
        TurnRecord(role="user", text="Go on.", start=2, end=5, sampled=False, versions=()),
        TurnRecord(role="assistant", text="4824", start=5, end=6, sampled=True, versions=(4,)),
    )
    assert [record.tokens[turn.start : turn.end] for turn in record.turns] == [(5, 6), (7, 8, 9), (7, 8, 9), (10,)]
    assert [message["role"] for message in record.prompt_messages] == ["system", "user", "assistant", "user"]
    assert record.prompt_messages[-1]["content"] == "72 * 67?" and record.answer == "4824" and record.metrics == {"calls": 1.0}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_reasoning_in_a_field_of_its_own_is_stored_and_shown_but_that_of_the_policy_is_its_text(
    tmp_path: Path, format: Literal["parquet", "jsonl"]
) -> None:
    prompt = (Message("assistant", "2", reasoning=f"1\x1b + 1 {'x' * 300}"), Message("user", "3?"))
    rollout = Rollout(task=Task(id="t"), sample=0, seed=0, messages=prompt, prompt=torch.tensor([1]))
    rollout = rollout.with_turn(said(5, text="<think>b</think>3"), Message("assistant", "3", reasoning="b"))
    rollout = rollout.with_turn(observation_turn([7], "c"), Message("assistant", "c", reasoning="another's\ud800"))
    records = make_records(1, [Group(index=0, environment="agent", version=0, rollouts=(rollout,))], decode=lambda tokens: "2 3?")
    store = RolloutStore(tmp_path, format)
    store.write(1, records)
    (record,) = store.read(1)
    assert record.prompt_messages[0]["reasoning"] == prompt[0].reasoning and set(record.prompt_messages[1]) == {"role", "content"}
    assert [turn.reasoning for turn in record.turns] == ["", "another's\N{REPLACEMENT CHARACTER}"]
    shown = show_rollout(record, None)
    text = format_rollout(shown, width=100, colour=False)
    assert "[reasoning, given in its own field, and not in the prompt: the policy did not read it:" in " ".join(text.split())
    assert text.count("x") < 300 and "\\x1b" in text and "\x1b" not in text, "it is folded"
    assert format_rollout(shown, width=100, colour=False, unfold=True).count("x") >= 300


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_tools_and_the_output_of_an_agent_are_stored_and_shown(tmp_path: Path, format: Literal["parquet", "jsonl"]) -> None:
    text = "<tool_call>..."
    calls = (ToolCall("python", {"code": "1"}), ToolCall("search", {"query": "x"}))
    rollout = Rollout(task=Task(id="t"), sample=0, seed=0, messages=(Message("user", "?"),), prompt=torch.tensor([1]))
    rollout = rollout.with_turn(said(5, text=text), Message("assistant", "", tool_calls=calls))
    rollout = rollout.with_turn(
        observation_turn([7], "1 x"), Message("tool", "1", name="python"), Message("tool", "x", name="search")
    )
    rollout = replace(rollout, output="the \x1b[2Jagent's last words\ud800", ending=Ending.STOP)
    store = RolloutStore(tmp_path, format)
    store.write(1, make_records(1, [Group(index=0, environment="agent", version=0, rollouts=(rollout,))]))
    (record,) = store.read(1)
    assert [(turn.calls, turn.tool) for turn in record.turns] == [(("python", "search"), ""), ((), "python"), ((), "search")]
    shown = show_rollout(record, None, ("length",))
    facts = dict(shown.facts)
    assert facts["tools"] == "python 1, search 1" and facts["flagged"].startswith("length")
    assert facts["output"].startswith("the \\x1b[2Jagent's last words") and "\x1b" not in facts["output"]
    assert ", calls python, search" in shown.messages[1].note and shown.messages[2].note.endswith("tool python")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_turns_and_metrics_come_back_as_they_were(tmp_path: Path, format: str) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    records = make_records(1, [a_group()])
    other = make_records(1, [a_group("other")])
    store.write(1, [*records, *other])
    assert store.read(1) == [*records, *other] and store.read(1, "other") == other and store.read(1, "none") == []


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_files_of_earlier_versions_read(tmp_path: Path, format: str) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    new = ["answer", "prompt_messages", "turns", "metrics"]
    path = store.write(1, make_records(1, [a_group()]))
    assert path is not None
    if format == "parquet":
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path).drop_columns(new), path)
    else:
        row = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in row.items() if name not in new}))
    (record,) = store.read(1)
    assert record.turns == () and record.metrics == {} and record.completion == "<tool>72 * 67</tool>4824\nGo on.4824"


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_lone_surrogate_costs_nothing_and_is_noted_once(tmp_path: Path, format: str, caplog: pytest.LogCaptureFixture) -> None:
    store = RolloutStore(tmp_path, format)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        store.write(7, make_records(7, [a_group("t\udc80", tool="a\udcffb\0"), a_group()]))
        store.write(8, make_records(8, [a_group("t\udc80")]))
    (note,) = caplog.messages
    assert "step 7: the environment calculator gave text with lone surrogates" in note and "'t\N{REPLACEMENT CHARACTER}'" in note
    first, second = store.read(7)
    assert first.task_id == "t\N{REPLACEMENT CHARACTER}" and first.turns[1].text == "a\N{REPLACEMENT CHARACTER}b\0"
    assert second.turns[1].text == "4824" and store.read(8)[0].task_id == first.task_id
    assert "\N{REPLACEMENT CHARACTER}" in first.completion and first.tokens == second.tokens


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_state_that_a_turn_was_taken_in_is_stored_and_shown(tmp_path: Path, format: Literal["parquet", "jsonl"]) -> None:
    group = a_group()
    rollout = replace(group.rollouts[0], turn_states=("at\nhome\udc80", None))
    store = RolloutStore(tmp_path, format)
    store.write(1, make_records(1, [replace(group, rollouts=(rollout,))]))
    (record,) = store.read(1)
    assert [turn.state for turn in record.turns] == ["at\nhome\N{REPLACEMENT CHARACTER}", None, None, None]
    notes = [message.note for message in show_rollout(record, None).messages if message.sampled]
    assert notes == ["2 tokens, weights of step 3-4, in state at home\N{REPLACEMENT CHARACTER}", "1 tokens, weights of step 4"]
    spoofed = replace(record.turns[0], state="\x1b[2J" + "x" * 99)
    note = next(each.note for each in show_rollout(replace(record, turns=(spoofed,)), None).messages if each.sampled)
    assert "\x1b" not in note and "characters ..." in note


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_the_turns_of_branches_are_stored_after_those_of_the_conversation_and_shown_with_where_they_begin(
    tmp_path: Path, format: Literal["parquet", "jsonl"]
) -> None:
    store = RolloutStore(tmp_path, format)
    [group] = make_agent_groups()
    store.write(1, make_records(1, [group]))
    record = store.read(1)[0]
    assert record.branches == ((0, 6), (0, 2), (0, 8), (3, 12), (0, 15), (0, 0))
    assert [token for token, sampled in zip(record.tokens, record.sampled, strict=True) if sampled] == [
        token for turn in group.rollouts[0].policy_turns for token in turn.tokens.tolist()
    ]
    assert [turn.path for turn in record.turns] == [0, 0, 0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    notes = [message.note for message in show_rollout(record, None).messages if message.sampled]  # others show none
    assert [note.partition("; ")[2] for note in notes if ";" in note] == [
        "branch 1 begins after 6 tokens of the conversation",
        "branch 2 begins after 2 tokens of the conversation",
        "branch 3 begins after 8 tokens of the conversation",
        "branch 4 begins after 12 tokens of branch 3",
        "branch 5 begins after 15 tokens of the conversation",
        "branch 6 starts again",
    ]
