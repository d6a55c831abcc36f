"""Conversations from files: what layouts are read, and what is said about rows that cannot be taught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strop.data.messages import ROLES
from strop.data.sources.records import DataError
from strop.data.sources.source import DataSource
from strop.extensions.recorded.examples import conversations
from strop.types import Message, assistant, system, user

TALK = [{"role": "user", "content": "12 + 7?"}, {"role": "assistant", "content": "19"}]
TAUGHT = (user("12 + 7?"), assistant("19"))


def jsonl(folder: Path, *rows: Any) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parse_messages(folder: Path, row: Any, **options: Any) -> tuple[Message, ...]:
    return conversations(DataSource(dataset_name=jsonl(folder, row), **options))[0].messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": TALK},
        {"conversations": [{"from": "human", "value": "12 + 7?"}, {"from": "gpt", "value": "19"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 7?"}]}, TALK[1]]},
        {"messages": [{**TALK[0], "tool_calls": None, "name": None}, {**TALK[1], "weight": 1}]},
        {"prompt": "12 + 7?", "completion": "19"},
        {"prompt": "12 + 7?", "response": "19"},
        {"prompt": TALK[:1], "completion": TALK[1:]},
        {"prompt": TALK[:1], "completion": "19"},
        {"prompt": TALK[:1], "completion": TALK},
        {"prompt": "12 + 7?", "completion": TALK[1:]},
        {"problem": "12 + 7?", "answer": 19},
        {"messages": [*TALK, {"role": "user", "content": "thanks"}]},
    ],
)
def test_the_layouts_of_the_field_give_the_same_conversation(row, tmp_path):
    (example,) = conversations(DataSource(dataset_name=jsonl(tmp_path, row)))
    assert example.messages == TAUGHT
    assert (example.question, example.answer) == ("12 + 7?", "19")


def test_keys_name_other_columns_and_reach_inside(tmp_path):
    row = {"data": {"q": "12 + 7?", "a": ["20", "19"]}, "turns": TALK, "level": 3}
    example = conversations(DataSource(dataset_name=jsonl(tmp_path, row), input_key="data.q", output_key="data.a.1"))[0]
    assert example.messages == TAUGHT and example.metadata == {"turns": TALK, "level": 3}
    assert parse_messages(tmp_path, row, messages_key="turns") == TAUGHT


def test_tools_and_other_roles_stay_and_sharegpt_names_are_translated(tmp_path):
    said = [("system", "s"), ("human", "a"), ("function_call", "f(1)"), ("observation", "2"), ("gpt", "b")]
    rows = {"conversations": [{"from": name, "value": text} for name, text in said]}
    assert parse_messages(tmp_path, rows) == (system("s"), user("a"), assistant("f(1)"), Message("tool", "2"), assistant("b"))


def test_a_plain_question_is_worded_as_environments_word_it(tmp_path):
    (tmp_path / "prompt.txt").write_text("Q: {question}\nA:\n")
    options = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt": "Be brief."}
    assert parse_messages(tmp_path, {"prompt": "1+1", "completion": "2"}, **options) == (
        system("Be brief."),
        user("Q: 1+1\nA:"),
        assistant("2"),
    )


def test_messages_get_the_system_prompt_unless_they_have_their_own(tmp_path):
    assert parse_messages(tmp_path, {"messages": TALK}, system_prompt="Be brief.") == (system("Be brief."), *TAUGHT)
    own = [{"role": "system", "content": "Be long."}, *TALK]
    assert parse_messages(tmp_path, {"messages": own}, system_prompt="Be brief.")[0] == system("Be long.")


def test_a_prompt_file_for_messages_is_an_error(tmp_path):
    (tmp_path / "prompt.txt").write_text("Q: {question}")
    with pytest.raises(DataError, match="'messages' holds messages, but prompt_file applies only to plain questions"):
        parse_messages(tmp_path, {"messages": TALK}, prompt_file=str(tmp_path / "prompt.txt"))


def test_squad_teaches_the_first_of_its_answers(tmp_path):
    row = {
        "id": "5",
        "title": "T",
        "context": "It is 19.",
        "question": "What?",
        "answers": {"text": ["19", "19."], "answer_start": [6]},
    }
    (example,) = conversations(DataSource(dataset_name=jsonl(tmp_path, row)))
    assert example.messages == (system("It is 19."), user("What?"), assistant("19"))
    assert example.metadata == {"id": "5", "title": "T"}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'answers' is .*without a first text"):
        parse_messages(tmp_path, {**row, "answers": {"text": [], "answer_start": []}})


BAD = {"role": "bot", "content": "19"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"rows\.jsonl:2: 'messages' is an empty list"),
        ({"messages": "hello"}, "'messages' is 'hello', not a list of messages"),
        ({"messages": None}, "'messages' is None"),
        ({"messages": ["hello"]}, "message 1 is 'hello', not an object"),
        ({"messages": [{"text": "hello"}]}, r"message 1 has the keys \['text'\]; a message needs role and content"),
        ({"messages": [TALK[0], BAD]}, f"message 2 has the unknown role 'bot'; write one of {', '.join(ROLES)}"),
        ({"messages": [TALK[0], {"role": ["user"], "content": "a"}]}, "has the unknown role"),
        ({"messages": [TALK[0], {"role": "assistant", "content": None}]}, "message 2 holds None, which is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "url": "x"}]}, TALK[1]]}, "only text and images"),
        ({"messages": [{"role": "user", "content": []}, TALK[1]]}, "which is not text"),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": [{"nam": "f"}]}]}, "has the call {'nam': 'f'}, without a name"),
        (
            {"messages": [TALK[0], {**TALK[1], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "call of f has the arguments '{', which are no JSON object",
        ),
        ({"messages": [TALK[0], {**TALK[1], "reasoning_content": 3}]}, "'reasoning_content' is 3"),
        ({"messages": TALK, "tools": [{"function": {}}]}, "tools' has the definition {'function': {}}"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "all assistant messages have weight 0"),
        (
            {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]},
            r"message 2 has the weight 0\.5; a message is trained on \(1\) or not",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[1]]}, "has the image .* without a reference"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, TALK[1]], "images": ["a.png", "b.png"]},
            "has places for all but 1 of the images",
        ),
        ({"messages": TALK[:1]}, "no assistant message that replies to another"),
        ({"messages": TALK[1:]}, "no assistant message that replies to another"),
        ({"messages": [TALK[0], {"role": "assistant", "content": " \n"}]}, "all assistant messages are empty"),
        ({"turns": TALK}, r"has no key 'messages'; its keys are \['turns'\]\. Set messages_key"),
    ],
)
def test_a_row_that_cannot_be_taught_is_an_error_that_names_it(row, message, tmp_path):
    with pytest.raises(DataError, match=message) as raised:
        conversations(DataSource(dataset_name=jsonl(tmp_path, {"messages": TALK}, row)))
    assert "rows.jsonl:2" in str(raised.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": " ", "completion": "19"}, "'prompt' is empty; a prompt needs a question"),
        ({"prompt": "a", "completion": ""}, "all assistant messages are empty"),
        ({"prompt": "a", "completion": True}, "'completion' is True, neither text nor a list of messages. Set output_key"),
        ({"prompt": "a", "completion": TALK}, "begins with a message by 'user'"),
        ({"prompt": "a", "completion": TALK[:1]}, "has no assistant message; a completion needs one"),
        ({"text": "a"}, r"has the keys \['text'\], and it is unclear which .*Set messages_key, or input_key and output_key"),
        ({"prompt": "a", "text": "b"}, "it is unclear which of them make a conversation"),
    ],
)
def test_columns_that_make_no_conversation_are_errors(row, message, tmp_path):
    with pytest.raises(DataError, match=message):
        parse_messages(tmp_path, row)


def test_a_key_that_is_set_must_be_there(tmp_path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1 has no key 'chat'; its keys are \['messages'\]. Set messages_key"):
        parse_messages(tmp_path, {"messages": TALK}, messages_key="chat")


def test_messages_are_read_in_place_of_two_columns_where_all_are_named_and_the_data_has_them(tmp_path):
    named = {"messages_key": "messages", "input_key": "q", "output_key": "a"}
    assert parse_messages(tmp_path, {"messages": TALK, "q": "?", "a": "!"}, **named) == parse_messages(
        tmp_path, {"messages": TALK}
    )
    assert parse_messages(tmp_path, {"q": "?", "a": "!"}, **named) == (user("?"), assistant("!"))


def test_ids_are_places_in_the_unsplit_data_and_size_and_repeat_count(tmp_path):
    path = jsonl(tmp_path, *({"prompt": f"q{n}", "completion": "a"} for n in range(20)))
    few = conversations(DataSource(dataset_name=path, size=3, repeat=2))
    assert [example.question for example in few] == ["q0", "q1", "q2", "q0", "q1", "q2"]
    assert [example.id for example in few[2:4]] == [f"{path}:2", f"{path}:0"] and few[-1].question == "q2"
    with pytest.raises(IndexError):
        few[6]
    validation = DataSource(dataset_name=path, split_validation_size=0.2, part="validation")
    assert all(example.id == f"{path}:{example.question[1:]}" for example in conversations(validation))


def test_held_out_conversations_share_no_question_with_training(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"q{n % 10}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(40)
    ]
    path = jsonl(tmp_path, *rows)
    parts = [DataSource(dataset_name=path, split_validation_size=0.2, part=part) for part in ("train", "validation")]
    train, validation = map(conversations, parts)
    assert len(train) + len(validation) == 40 and len(validation) == 8
    assert not {example.question for example in train} & {example.question for example in validation}


def test_rows_of_a_table_are_read_when_they_are_asked_for(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": TALK}, {"messages": TALK[:1]}]), path)
    examples = conversations(DataSource(dataset_name=str(path)))
    assert examples[0].messages == TAUGHT
    with pytest.raises(DataError, match=r"rows\.parquet, row 2: 'messages' has no assistant message"):
        examples[1]
