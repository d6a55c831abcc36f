"""Every field of a message goes through the templates of the field, and the loss covers exactly what the policy would have written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.models import chat_template
from strop.models.chat_template import ChatTemplate, ConversationError, TokenSpan
from strop.types import Image, Message, ToolCall, assistant, user
from support.tokenizer import build_tokenizer
from support.tool_families import TOOL_FAMILIES

pytest.importorskip("trl")

SEEING = {  # templates of models that see: the text that stands for an image, and the end of a turn
    "qwen2_5_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>"),
    "qwen3_vl": ("<|vision_start|><|image_pad|><|vision_end|>", "<|im_end|>"),
    "smolvlm": ("<image>", "<end_of_utterance>"),
    "idefics3": ("<image>", "<end_of_utterance>"),
    "gemma3": ("<start_of_image>", "<end_of_turn>"),
}
WRITES_NAMES = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (' ' + m.name if m.name else '') + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make(template: str, *specials: str, reads_images: bool = True) -> ChatTemplate:
    tokenizer: Any = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, reads_images=reads_images)


@cache
def seeing(name: str, *, reads_images: bool = True) -> ChatTemplate:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    text = (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    return make(text, *SEEING[name], reads_images=reads_images)


def taught(spans: Sequence[TokenSpan]) -> list[str]:
    return [span.text for span in spans if span.in_loss]


words = st.text("the answr is 12?", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def seen_messages(draw: st.DrawFn) -> list[Message]:
    messages = []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(words)
        places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
        messages += [Message("user", text, images=tuple(Image(f"{place}.png", place) for place in places))]
        messages += [Message("assistant", draw(words), in_loss=draw(st.booleans()))]
    return messages


@pytest.mark.parametrize("name", SEEING)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_images_stand_in_the_context_and_the_loss_is_what_was_answered(name, data):
    template, (mark, end) = seeing(name), SEEING[name]
    messages = data.draw(seen_messages().filter(lambda drawn: any(m.in_loss for m in drawn if m.role == "assistant")))
    (spans,) = template.encode_spans(messages)
    said = [message.content for message in messages if message.role == "assistant" and message.in_loss]
    assert [text.strip().removesuffix(end).strip() for text in taught(spans)] == said
    assert all(end in text for text in taught(spans))
    context = "".join(span.text for span in spans if not span.in_loss)
    assert context.count(mark) == sum(len(message.images) for message in messages)
    whole = template.tokenizer.apply_chat_template(
        [{"role": message.role, "content": message.as_parts()} for message in messages], tokenize=False
    )
    assert "".join(span.text for span in spans) == whole


@pytest.mark.parametrize("name", SEEING)
def test_a_policy_that_reads_text_alone_refuses_images_and_answers_texts(name):
    template = seeing(name, reads_images=False)
    with pytest.raises(ConversationError, match="the policy reads only text"):
        template.encode_prompt([Message("user", "a cat?", images=(Image("a.png"),))])
    assert "a cat?" in template.tokenizer.decode(template.encode_prompt([user("a cat?")]))


def test_a_template_without_a_place_for_images_refuses_them():
    template = TOOL_FAMILIES["qwen2.5"].make_template()
    blind = ChatTemplate(template.tokenizer, reads_images=True)
    with pytest.raises(ConversationError, match="the chat template does not support"):
        blind.encode_prompt([Message("user", "a cat?", images=(Image("a.png"),))])


def test_a_name_is_written_where_the_template_writes_it():
    template = make(WRITES_NAMES, "<|im_start|>")
    (spans,) = template.encode_spans([Message("user", "12 + 7?", name="Ada"), assistant("19")])
    assert "user Ada" in spans[0].text and taught(spans) == ["19<|im_end|>"]
    with pytest.raises(ConversationError, match="opens message 2"):  # the policy would not be asked by that name
        template.encode_spans([user("12 + 7?"), Message("assistant", "19", name="Bo")])


def test_a_name_that_the_template_does_not_write_is_left_out_with_a_warning():
    chat_template._warn_of_name.cache_clear()
    template = TOOL_FAMILIES["qwen2.5"].make_template()
    with pytest.warns(UserWarning, match="does not write the names of speakers: the names of 'user' messages are left out"):
        named = template.encode_prompt([Message("user", "12 + 7?", name="Ada")])
    assert named == template.encode_prompt([user("12 + 7?")])


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3_instruct", "llama3.1", "mistral"])
@given(weights=st.lists(st.booleans(), min_size=2, max_size=4).filter(any), calls=st.booleans())
@settings(max_examples=15, deadline=None)
def test_messages_of_weight_0_are_context_between_turns_with_calls_and_without(name, weights, calls):
    template = cached_template(name)
    messages: list[Message] = []
    for place, weight in enumerate(weights):
        messages.append(user(f"{place} + 1?"))
        if calls:
            call = ToolCall("add", {"a": place}, id=f"call{place:05}")
            messages.append(Message("assistant", "", tool_calls=(call,), in_loss=weight))
            messages.append(Message("tool", f"result {place}", name="add", tool_call_id=call.id))
        messages.append(Message("assistant", f"It is {place}.", in_loss=weight))
    (everything,) = template.encode_spans([replace(message, in_loss=True) for message in messages])
    (spans,) = template.encode_spans(messages)
    assert "".join(span.text for span in spans) == "".join(span.text for span in everything)
    of_all = taught(everything)
    kept = [weight for weight in weights for _ in range(1 + calls)]
    assert taught(spans) == [text for text, weight in zip(of_all, kept, strict=True) if weight]
    assert not any("result" in text for text in taught(spans))


@cache
def cached_template(name: str) -> ChatTemplate:
    return TOOL_FAMILIES[name].make_template()


def test_a_conversation_whose_every_reply_has_weight_0_has_no_loss_tokens():
    with pytest.raises(ConversationError, match="all assistant messages have weight 0"):
        cached_template("qwen2.5").encode_spans([user("a"), Message("assistant", "b", in_loss=False)])
    assert taught(*cached_template("qwen2.5").encode_spans([user("a"), assistant("b")])) == ["b<|im_end|>"]
