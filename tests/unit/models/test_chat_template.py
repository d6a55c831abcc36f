"""Messages become tokens in one place, and what was sampled is never tokenised again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loop.tiny import CHATML, tiny_tokenizer
from strop.models.chat_template import ChatTemplate, ConversationError, TokenSpan
from strop.models.tokenizer_config import read_chat_template
from strop.types import Message, assistant, system, user
from support.chat_templates import FAMILIES, GLM, QWEN3, THINKING_PROMPT, make_tokenizer

# The shapes of the common families: a header per message without a line break after its end, and instruction brackets.
HEADERS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n\n{{ message['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
BRACKETS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] }}<|im_end|>"
    "{% else %}[INST]{{ message['content'] }}[/INST]{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "brackets": BRACKETS}
TEXTS = ["", "7", "12", "1", "the end in 34", "a\nb", "[INST]"]


@pytest.mark.parametrize("options", [{}, {"shout": True}])
def test_a_prompt_is_the_tokenizers_own(options):
    tokenizer = tiny_tokenizer(template=CHATML.replace("assistant\n", "assistant{{ '!' if shout else '' }}\n"))
    messages = [system("Be brief."), user("What is 12 + 34?")]
    own = tokenizer.apply_chat_template(
        [message.as_dict() for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    assert ChatTemplate(tokenizer, options=options).encode_prompt(messages) == own
    assert tokenizer.decode(own).endswith("assistant!\n" if options else "assistant\n")


def test_an_empty_conversation_is_no_prompt():
    with pytest.raises(ValueError, match="at least one message"):
        ChatTemplate(tiny_tokenizer()).encode_prompt([])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", TEXTS)
@pytest.mark.parametrize("answer", [[user("2")], [user("higher"), user("12")], [Message("tool", "34"), user("the")]])
def test_turn_by_turn_gives_the_tokens_of_the_whole_conversation(name, said, answer):
    tokenizer = tiny_tokenizer(template=TEMPLATES[name])
    template = ChatTemplate(tokenizer)
    question = [user("guess")]
    sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    appended = [*template.encode_prompt(question), *sampled, *template.encode_observation(answer, sampled)]
    assert appended == template.encode_prompt([*question, assistant(said), *answer])


def test_sampled_tokens_stay_as_they_were_sampled_where_text_has_another_tokenisation():
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer)
    one, two, twelve = tokenizer.convert_tokens_to_ids(["1", "2", "12"])
    end = tokenizer.eos_token_id
    observation = template.encode_observation([user("no")], [one, two, end])
    whole = template.encode_prompt([user("?"), assistant("12"), user("no")])
    assert [*template.encode_prompt([user("?")]), twelve, end, *observation] == whole
    assert [*template.encode_prompt([user("?")]), one, two, end, *observation] != whole


@pytest.mark.parametrize("last", ["2", "\n"])
def test_the_end_of_the_turn_is_appended_where_something_else_ended_it(last):
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer)
    sampled = tokenizer.convert_tokens_to_ids(["1", last])
    observation = template.encode_observation([user("no")], sampled)
    assert observation[0] == tokenizer.eos_token_id
    assert tokenizer.decode(observation) == "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_replies_is_refused():
    rewriting = ChatTemplate(tiny_tokenizer(template=CHATML.replace("message['content']", "message['content'] | urlencode")))
    with pytest.raises(ValueError, match="does not render an assistant's message unchanged"):
        rewriting.encode_observation([user("no")], [5])


def test_a_tokenizer_without_a_template_joins_plain_text_and_says_so():
    tokenizer = tiny_tokenizer(template=None)
    with pytest.warns(UserWarning, match="no chat template"):
        template = ChatTemplate(tokenizer)
    assert tokenizer.decode(template.encode_prompt([system("Add."), user("1+1=")])) == "Add.\n1+1="
    assert tokenizer.decode(template.encode_observation([user("no"), user("again")], [5])) == "\nno\nagain\n"


def test_a_tokenizer_with_a_template_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatTemplate(tiny_tokenizer())


# Recorded conversations


@cache
def family(name: str) -> ChatTemplate:
    return ChatTemplate(make_tokenizer(FAMILIES[name]))


def rendered(template: ChatTemplate, messages: Sequence[Message]) -> str:
    return template.tokenizer.apply_chat_template([message.as_dict() for message in messages], tokenize=False, **template.options)


def taught(spans: Sequence[TokenSpan]) -> list[str]:
    return [span.text for span in spans if span.in_loss]


contents = st.text(
    st.one_of(st.sampled_from("the answer is 12\n 7.?[INST]</s>"), st.characters(exclude_categories=["Cs"])),
    min_size=1,
    max_size=30,
)
replies = st.tuples(contents, contents)


@st.composite
def conversations(draw: st.DrawFn, name: str) -> list[Message]:
    messages = [system(draw(contents))] if FAMILIES[name].system and draw(st.booleans()) else []
    for question, answer in draw(st.lists(replies, min_size=1, max_size=4)):
        messages += [user(question), assistant(answer)]
        if FAMILIES[name].tool and draw(st.booleans()):
            messages += [Message("tool", draw(contents)), assistant(draw(contents))]
    return messages + ([user(draw(contents))] if draw(st.booleans()) else [])


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_spans_of_a_conversation_are_its_rendering_cut_where_the_policy_speaks(name, data):
    template, kind = family(name), FAMILIES[name]
    messages = data.draw(conversations(name))
    (spans,) = template.encode_spans(messages)
    assert "".join(span.text for span in spans) == rendered(template, messages)
    assert all(template.tokenizer.decode(span.tokens) == span.text for span in spans)
    said = [message.content.strip() if kind.trims else message.content for message in messages if message.role == "assistant"]
    assert taught(spans) == [kind.begin + text + kind.end for text in said]
    assert [span.in_loss for span in spans] == [place % 2 == 1 for place in range(len(spans))]
    first = next(place for place, message in enumerate(messages) if message.role == "assistant")
    assert spans[0].tokens == template.encode_prompt(messages[:first])


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_what_precedes_every_taught_turn_is_what_the_policy_would_be_asked_with(name, data):
    template = family(name)
    messages = data.draw(conversations(name))
    texts = [span.text for span in template.encode_spans(messages)[0]]
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    for number, turn in enumerate(turns):
        ((prompt, reply, *_),) = template.encode_spans(messages, loss_from=turn)
        assert prompt.tokens == template.encode_prompt(messages[:turn])
        assert prompt.text == "".join(texts[: 2 * number + 1]) and reply.text == texts[2 * number + 1]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_a_recorded_conversation_has_the_tokens_of_the_same_one_as_an_episode(name):
    template = family(name)
    asked, said = [user("What is 12 + 7?"), user("and the 34?")], ["19", "the 34"]
    (spans,) = template.encode_spans([asked[0], assistant(said[0]), asked[1], assistant(said[1])])
    end = template.tokenizer(FAMILIES[name].end, add_special_tokens=False)["input_ids"]
    sampled = [[*template.tokenizer(text, add_special_tokens=False)["input_ids"], *end] for text in said]
    episode = [template.encode_prompt(asked[:1]), sampled[0], template.encode_observation(asked[1:], sampled[0]), sampled[1]]
    assert [span.tokens for span in spans][:4] == episode


@pytest.mark.parametrize("said", ["<|im_end|>", "a<|im_end|>\nb", "<|im_start|>assistant\n", "\n", " a "])
def test_what_looks_like_the_template_does_not_move_the_cuts(said):
    (spans,) = family("chatml").encode_spans([user(said), assistant(said), user("c"), assistant(said)])
    assert taught(spans) == [said + "<|im_end|>"] * 2


THOUGHT = "<think>\nLet me see.\n</think>\n\n19"


def test_a_template_that_drops_earlier_reasoning_teaches_the_last_turn():
    template = ChatTemplate(make_tokenizer(QWEN3))
    messages = [user("12+7?"), assistant(THOUGHT), user("sure?"), assistant("<think>\nYes.\n</think>\n\nyes")]
    (spans,) = template.encode_spans(messages, loss_from=3)
    assert spans[0].tokens == template.encode_prompt(messages[:3]) and "Let me see" not in spans[0].text
    assert taught(spans) == ["<think>\nYes.\n</think>\n\nyes<|im_end|>"]
    assert "".join(span.text for span in spans) == rendered(template, messages)


@pytest.mark.parametrize("said", [THOUGHT, "19"])
def test_a_turn_that_the_template_rewrites_later_is_taught_on_a_path_of_its_own(said):
    template = ChatTemplate(make_tokenizer(QWEN3))
    messages = [user("12+7?"), assistant(said), user("sure?"), assistant("yes")]
    last, first = template.encode_spans(messages)
    assert "".join(span.text for span in last) == rendered(template, messages)
    assert "".join(span.text for span in first) == rendered(template, messages[:2])
    assert taught(last) == ["<think>\n\n</think>\n\nyes<|im_end|>"]
    assert taught(first) == [(THOUGHT if said == THOUGHT else "<think>\n\n</think>\n\n19") + "<|im_end|>"]
    assert template.split_text(messages) == [[span.text for span in path] for path in (last, first)]


def test_the_templates_options_decide_where_the_policy_begins():
    messages = [user("12+7?"), assistant("19")]
    thinking, brief = (ChatTemplate(make_tokenizer(QWEN3), options={"enable_thinking": on}) for on in (True, False))
    assert taught(*thinking.encode_spans(messages)) == ["<think>\n\n</think>\n\n19<|im_end|>"]
    assert taught(*brief.encode_spans(messages)) == ["19<|im_end|>"]


def test_an_opened_reasoning_mark_belongs_to_the_prompt():
    template = ChatTemplate(make_tokenizer(THINKING_PROMPT))
    (spans,) = template.encode_spans([user("12+7?"), assistant(THOUGHT)])
    assert spans[0].tokens == template.encode_prompt([user("12+7?")]) and spans[0].text.endswith("assistant\n<think>\n")
    assert taught(spans) == ["Let me see.\n</think>\n\n19<|im_end|>"]


def test_a_reply_that_does_not_begin_as_the_template_opens_is_refused():
    template = ChatTemplate(make_tokenizer(THINKING_PROMPT))
    with pytest.raises(
        ConversationError, match=r"opens message 2 with '<think>\\n'.*renders it as '19<\|im_end\|>\\n'.*enable_thinking"
    ):
        template.encode_spans([user("12+7?"), assistant("19")])


def test_a_template_that_takes_no_system_message_says_so_itself():
    with pytest.raises(Exception, match="System role not supported"):
        family("gemma").encode_spans([system("be brief"), user("a"), assistant("b")])


def test_a_template_that_writes_replies_otherwise_is_refused():
    shouting = CHATML.replace("message['content']", "message['content'] | urlencode")
    with pytest.raises(ConversationError, match="does not render an assistant's message unchanged"):
        ChatTemplate(tiny_tokenizer(template=shouting)).encode_spans([user("a"), assistant("b c")])


def test_a_template_that_ends_replies_in_more_than_one_way_is_refused():
    uneven = CHATML.replace("<|im_end|>\n{% endfor %}", "{{ '<|im_end|>\n' if message['content'] != 'b' else '!' }}{% endfor %}")
    with pytest.raises(ConversationError, match="it is unclear where the reply ends"):
        ChatTemplate(tiny_tokenizer(template=uneven)).encode_spans([user("a"), assistant("b")])


@pytest.mark.parametrize("messages", [[], [user("a")], [assistant("a")], [assistant("hello"), user("a")]])
def test_a_conversation_in_which_nobody_is_answered_has_nothing_to_teach(messages):
    for template in (family("chatml"), plain_template()):
        with pytest.raises(ConversationError, match="no loss tokens"):
            template.encode_spans(messages)


def test_a_greeting_that_opens_the_conversation_is_read():
    (spans,) = family("chatml").encode_spans([assistant("Hello!"), user("a"), assistant("b")])
    assert taught(spans) == ["b<|im_end|>"] and "Hello!" in spans[0].text


def plain_template() -> ChatTemplate:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ChatTemplate(tiny_tokenizer(template=None))


def test_without_a_template_replies_follow_what_they_answer():
    template = plain_template()
    messages = [system("Add."), user("1+1="), assistant("2"), user("12+34="), user("="), assistant("46")]
    (spans,) = template.encode_spans(messages)
    assert [(span.text, span.in_loss) for span in spans] == [
        ("Add.\n1+1=", False),
        ("2", True),
        ("\n12+34=\n=\n", False),
        ("46", True),
    ]
    assert spans[0].tokens == template.encode_prompt(messages[:2])
    assert spans[2].tokens == template.encode_observation(messages[3:5], spans[1].tokens)
    assert [span.text for span in template.encode_spans(messages[:4])[0]] == ["Add.\n1+1=", "2", "\n12+34=\n"]


def test_a_reply_that_would_share_a_token_with_its_prompt_is_tokenised_alone():
    template = plain_template()
    ((prompt, reply),) = template.encode_spans([user("1"), assistant("2")])  # "12" is a token
    assert prompt.tokens == template.encode_prompt([user("1")]) and template.tokenizer.decode(reply.tokens) == "2"


@pytest.mark.parametrize("scheme", ["always", "first"])
def test_a_tokenizer_that_marks_the_start_of_a_text_puts_no_space_before_a_reply(scheme):
    """As SentencePiece tokenizers do: "b" alone is "_b", which after a line break would be a space that nobody said."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "<|user|>", "<|assistant|>", "\n", "▁", *"ab▁c", "▁b"]
    tokenizer = Tokenizer(
        models.BPE({word: index for index, word in enumerate(dict.fromkeys(words))}, [("▁", "b")], unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")
    wrapped.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    wrapped.chat_template = GLM.template.replace("message.content", "message.content + '</s>'")
    template = ChatTemplate(wrapped)
    (spans,) = template.encode_spans([user("a"), assistant("b"), user("c"), assistant("b")])
    assert wrapped.convert_ids_to_tokens(template._encode("b")) == ["▁b"]
    assert [wrapped.convert_ids_to_tokens(span.tokens) for span in spans if span.in_loss] == [["b", "</s>"]] * 2
    assert [token for span in spans for token in span.tokens] == template._encode("".join(span.text for span in spans))


@pytest.mark.parametrize("name", ["~0", "~nobody-of-this-name/template.jinja", "missing.jinja"])
def test_a_template_file_that_cannot_be_read_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError, match="file"):
        read_chat_template(name)
