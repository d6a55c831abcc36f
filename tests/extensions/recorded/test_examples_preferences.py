"""Pairs and judged completions from files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.recorded.examples import Preference, UnpairedPreference, preferences, unpaired_preferences
from strop.types import assistant, system, user

ASK = {"role": "user", "content": "12 + 7?"}
GOOD, BAD = {"role": "assistant", "content": "19"}, {"role": "assistant", "content": "20"}
AGAIN = {"role": "user", "content": "sure?"}


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def pair_of(folder: Path, row: Any, **options: Any) -> Preference:
    return preferences(DataSource(dataset_name=jsonl(folder, row), **options))[0]


def verdicts(folder: Path, *rows: Any, **options: Any) -> list[UnpairedPreference]:
    return list(unpaired_preferences(DataSource(dataset_name=jsonl(folder, *rows), **options)))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "12 + 7?", "chosen": "19", "rejected": "20"},
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "19", "rejected": "20"},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "12 + 7?", "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "12 + 7?", "prompt_id": "x", "chosen": [ASK, GOOD], "rejected": [ASK, BAD], "messages": [ASK, GOOD]},
        {"context": [ASK], "response1": "20", "response2": "19", "overall_preference": 1},
        {"context": [ASK], "response1": "19", "response2": "20", "overall_preference": -3},
    ],
)
def test_the_layouts_of_the_field_give_the_same_pair(row, tmp_path):
    pair = pair_of(tmp_path, row)
    assert (pair.prompt, pair.chosen, pair.rejected) == ((user("12 + 7?"),), (assistant("19"),), (assistant("20"),))
    assert (pair.question, pair.answer) == ("12 + 7?", "19")
    assert pair.margin == (abs(row["overall_preference"]) if "context" in row else None)


def test_a_common_beginning_of_several_turns_is_the_prompt(tmp_path):
    pair = pair_of(tmp_path, {"chosen": [ASK, GOOD, AGAIN, GOOD], "rejected": [ASK, GOOD, AGAIN, BAD]})
    assert len(pair.prompt) == 3 and (pair.chosen, pair.rejected) == ((assistant("19"),), (assistant("20"),))


def test_completions_may_part_early_and_go_on_differently(tmp_path):
    pair = pair_of(tmp_path, {"chosen": [ASK, GOOD], "rejected": [ASK, BAD, AGAIN, BAD]})
    assert pair.prompt == (user("12 + 7?"),) and pair.rejected == (assistant("20"), user("sure?"), assistant("20"))


def test_keys_name_other_columns(tmp_path):
    row = {"q": "12 + 7?", "good": "19", "bad": "20", "gap": "0.5", "chosen": "x", "rejected": "y"}
    options = {"input_key": "q", "chosen_key": "good", "rejected_key": "bad", "margin_key": "gap"}
    pair = pair_of(tmp_path, row, **options)
    assert (pair.chosen, pair.margin, pair.metadata) == ((assistant("19"),), 0.5, {"chosen": "x", "rejected": "y"})


def test_prompts_are_worded_and_get_the_system_prompt(tmp_path):
    (tmp_path / "prompt.txt").write_text("Q: {question}")
    row = {"prompt": "12 + 7?", "chosen": "19", "rejected": "20"}
    options = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt": "Add."}
    assert pair_of(tmp_path, row, **options).prompt == (system("Add."), user("Q: 12 + 7?"))
    whole = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert pair_of(tmp_path, whole, system_prompt="Add.").prompt == (system("Add."), user("12 + 7?"))
    with pytest.raises(DataError, match="'chosen' holds messages, but prompt_file applies only to plain questions"):
        pair_of(tmp_path, whole, prompt_file=str(tmp_path / "prompt.txt"))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "x", "rejected": "x"}, "the chosen and the rejected completion are equal"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}, "are the same conversation"),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [GOOD, AGAIN]}, "the chosen and the rejected completion are equal"),
        (
            {"chosen": [ASK, GOOD], "rejected": [AGAIN, BAD]},
            "'chosen' and 'rejected' must be the same .* they differ from message 1 on",
        ),
        ({"chosen": [ASK, GOOD, AGAIN, GOOD], "rejected": [ASK, GOOD, ASK, GOOD]}, "they differ from message 3 on"),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD, AGAIN, BAD]}, "they differ from message 3 on"),
        ({"chosen": "x", "rejected": "y"}, "has no prompt column, and .* do not begin with a prompt. Set input_key"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "has no prompt"),
        ({"chosen": [ASK, GOOD], "rejected": [BAD]}, "has no prompt"),
        ({"prompt": "a", "chosen": [ASK, GOOD], "rejected": [BAD]}, "'chosen' begins with a message by 'user'"),
        ({"prompt": [AGAIN], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "'chosen' begins with a message by 'user'"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [BAD]}, "'chosen' has no assistant message"),
        ({"prompt": "", "chosen": "x", "rejected": "y"}, "'prompt' is empty"),
        ({"prompt": "a", "chosen": "x", "rejected": None}, "'rejected' is None, neither text nor a list"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": -1}, "the margin is -1, which means that the rejected"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": "big"}, "the margin is 'big', not a number"),
        ({"prompt": "a", "chosen": "x", "rejected": "y", "margin": float("nan")}, "the margin is nan, not a number"),
        ({"prompt": "a", "chosen": "x"}, r"has the keys \['chosen', 'prompt'\].*Set chosen_key and rejected_key"),
        ({"context": [ASK], "response1": "x", "response2": "x", "overall_preference": 1}, "are equal, so there is no preference"),
        ({"context": [ASK], "response1": "x", "response2": "y", "overall_preference": "?"}, "not a number from -3 to 3"),
    ],
)
def test_a_row_that_is_no_pair_is_an_error_that_names_it(row, message, tmp_path):
    with pytest.raises(DataError, match=message) as raised:
        pair_of(tmp_path, row)
    assert "rows.jsonl:1" in str(raised.value)


def test_responses_without_a_preference_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"context": [ASK], "response1": f"a{n}", "response2": "b", "overall_preference": n % 3 - 1} for n in range(9)]
    path = jsonl(tmp_path, *rows)
    with caplog.at_level(logging.WARNING):
        pairs = preferences(DataSource(dataset_name=path))
    assert [pair.id for pair in pairs] == [f"{path}:{n}" for n in (0, 2, 3, 5, 6, 8)]
    assert pairs.num_skipped == 3 and "3 of 9 records" in caplog.text
    assert [pair.chosen[0].content for pair in pairs] == ["a0", "b", "a3", "b", "a6", "b"]
    with pytest.raises(DataError, match="none of the 1 records"):
        preferences(DataSource(dataset_name=jsonl(tmp_path, {**rows[0], "overall_preference": 0})))


@pytest.mark.parametrize(
    ("row", "desirable"),
    [
        ({"prompt": "12 + 7?", "completion": "19", "label": True}, True),
        ({"prompt": "12 + 7?", "completion": "19", "label": 0}, False),
        ({"prompt": "12 + 7?", "response": "19", "label": "False"}, False),
        ({"prompt": [ASK], "completion": [GOOD], "label": 1.0}, True),
        ({"prompt": [ASK], "completion": [ASK, GOOD], "label": "1"}, True),
        ({"messages": [ASK, GOOD], "label": True}, True),
    ],
)
def test_a_judged_completion_has_a_prompt_and_a_verdict(row, desirable, tmp_path):
    (example,) = verdicts(tmp_path, row)
    assert (example.prompt, example.completion) == ((user("12 + 7?"),), (assistant("19"),))
    assert (example.desirable, example.answer) == (desirable, "19" if desirable else "")


def test_a_judged_conversation_is_judged_by_its_last_reply(tmp_path):
    (example,) = verdicts(tmp_path, {"messages": [ASK, BAD, AGAIN, GOOD, AGAIN], "label": True})
    assert len(example.prompt) == 3 and example.completion == (assistant("19"),)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "12 + 7?", "chosen": "19", "rejected": "20"},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "label": "unrelated"},
        {"context": [ASK], "response1": "20", "response2": "19", "overall_preference": 1},
    ],
)
def test_a_pair_gives_two_judged_completions(row, tmp_path):
    path = jsonl(tmp_path, row, row)
    examples = unpaired_preferences(DataSource(dataset_name=path))
    assert [(example.completion[0].content, example.desirable) for example in examples] == [("19", True), ("20", False)] * 2
    assert [example.id for example in examples[1:3]] == [f"{path}:0:rejected", f"{path}:1:chosen"]
    assert examples[-1] == examples[3] and len({example.id for example in examples}) == 4
    with pytest.raises(IndexError):
        examples[4]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, {}, "'label' is 'good', not true or false. Set label_key"),
        ({"prompt": "a", "completion": "b", "label": None}, {}, "'label' is None, not true or false"),
        ({"prompt": "a", "completion": "b", "label": 2}, {}, "'label' is 2, not true or false"),
        ({"prompt": "a", "completion": "b"}, {}, "it is unclear which of them make an unpaired preference"),
        ({"completion": "b", "label": True}, {}, "is a completion without a prompt. Set input_key"),
        ({"messages": [ASK], "label": True}, {}, "no assistant message that replies to another"),
        ({"prompt": "a", "completion": "b", "label": True}, {"label_key": "ok"}, "has no key 'ok'"),
    ],
)
def test_a_row_without_a_verdict_is_an_error(row, options, message, tmp_path):
    with pytest.raises(DataError, match=message):
        verdicts(tmp_path, row, **options)
