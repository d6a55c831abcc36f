"""Fields of a message beyond role and content: they come from the data as they were written, whatever the format."""

from __future__ import annotations

import json

import pytest

from strop.data.messages import join_text, parse_messages
from strop.types import Image, Message, ToolCall, assistant, user

ASKED = {"role": "user", "content": "12 + 7?", "name": "Ada"}
CALLS = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "a sum",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 12, "b": 7}'}}],
}
RESULT = {"role": "tool", "content": "19", "tool_call_id": "c1", "name": "add"}
ADD = ToolCall("add", {"a": 12, "b": 7})


def test_calls_results_reasoning_and_names_are_read_as_they_stand():
    assert parse_messages([ASKED, CALLS, RESULT, {"role": "assistant", "content": "19"}], "row 1") == (
        Message("user", "12 + 7?", name="Ada"),
        Message("assistant", "", tool_calls=(ToolCall("add", {"a": 12, "b": 7}, id="c1"),), reasoning="a sum"),
        Message("tool", "19", name="add", tool_call_id="c1"),
        assistant("19"),
    )


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"sum": 19, "unit": "µ"}, '{"sum": 19, "unit": "µ"}'),
        ([1, 2], "[1, 2]"),
        ([], "[]"),
        ([{"sum": 19}], '[{"sum": 19}]'),
        ([{"type": "text", "text": "19"}], "19"),
        ("19", "19"),
    ],
)
def test_the_result_of_a_tool_may_be_an_object_which_becomes_json(content, text):
    assert parse_messages([{"role": "tool", "content": content}], "row 1") == (Message("tool", text),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (json.dumps({"name": "add", "arguments": {"a": 12, "b": 7}}), Message("assistant", "", tool_calls=(ADD,))),
        ("add(12, 7)", assistant("add(12, 7)")),
        ('{"a": 1}', assistant('{"a": 1}')),
    ],
)
def test_a_call_of_sharegpt_is_one_where_it_is_json_and_a_text_elsewhere(value, message):
    assert parse_messages([{"from": "function_call", "value": value}], "row 1") == (message,)


def test_reasoning_alone_needs_no_content():
    (message,) = parse_messages([{"role": "assistant", "content": None, "reasoning": "hm"}], "row 1")
    assert message == Message("assistant", "", reasoning="hm")


def test_a_message_of_weight_0_is_read_and_not_trained_on():
    (message,) = parse_messages([{"role": "assistant", "content": "20", "weight": 0}], "row 1")
    assert message == Message("assistant", "20", in_loss=False) and "in_loss" not in message.as_dict()


@pytest.mark.parametrize(
    ("part", "record_images", "source"),
    [
        ({"type": "image", "image": "a.png"}, None, "a.png"),
        ({"type": "image", "path": "a.png"}, None, "a.png"),
        ({"type": "image_url", "image_url": {"url": "https://x.org/a.png", "detail": "low"}}, None, "https://x.org/a.png"),
        ({"type": "input_image", "image_url": "data:image/png;base64,AAAA"}, None, "data:image/png;base64,AAAA"),
        ({"type": "image"}, ["a.png"], "a.png"),
        ({"type": "image", "text": None}, [{"path": "a.png", "bytes": None}], "a.png"),
    ],
)
def test_an_image_is_a_reference_and_keeps_its_place(part, record_images, source):
    content = [{"type": "text", "text": "Is "}, part, {"type": "text", "text": " a cat?"}]
    (message,) = parse_messages([{"role": "user", "content": content}], "row 1", record_images)
    assert message == Message("user", "Is  a cat?", images=(Image(source, position=3),))
    image = {"type": "image", "image": source}
    assert message.as_dict()["content"] == [content[0], image, content[2]]
    assert message.shown_content == f"Is [image: {source}] a cat?"


def test_images_at_both_ends_and_in_a_row_keep_their_order():
    images = [{"type": "image", "image": name} for name in "abc"]
    content = [images[0], images[1], {"type": "text", "text": "?"}, images[2]]
    (message,) = parse_messages([{"role": "user", "content": content}], "row 1")
    assert message.as_parts() == content


def test_an_image_alone_is_a_message():
    (message,) = parse_messages([{"role": "user", "content": [{"type": "image", "image": "a"}]}], "row 1")
    assert message.as_parts() == [{"type": "image", "image": "a"}]
    assert user("").as_parts() == [{"type": "text", "text": ""}]


def test_questions_with_other_images_are_other_questions():
    def ask(source: str) -> str:
        return join_text(parse_messages([{"role": "user", "content": [{"type": "image", "image": source}]}], "row 1"))

    assert ask("a.png") != ask("b.png") and ask("a.png") == ask("a.png")
