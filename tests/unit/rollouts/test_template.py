"""Messages become tokens in one place, and what was sampled is never tokenised again."""

from __future__ import annotations

import warnings

import pytest

from loop.tiny import CHATML, tiny_tokenizer
from strop.rollouts.template import ChatTemplate
from strop.types import Message, assistant, system, user

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
    assert ChatTemplate(tokenizer, options=options).prompt(messages) == own
    assert tokenizer.decode(own).endswith("assistant!\n" if options else "assistant\n")


def test_an_empty_conversation_is_no_prompt():
    with pytest.raises(ValueError, match="at least one message"):
        ChatTemplate(tiny_tokenizer()).prompt([])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("said", TEXTS)
@pytest.mark.parametrize("answer", [[user("2")], [user("higher"), user("12")], [Message("tool", "34"), user("the")]])
def test_turn_by_turn_gives_the_tokens_of_the_whole_conversation(name, said, answer):
    tokenizer = tiny_tokenizer(template=TEMPLATES[name])
    template = ChatTemplate(tokenizer)
    question = [user("guess")]
    sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    appended = [*template.prompt(question), *sampled, *template.observation(answer, sampled)]
    assert appended == template.prompt([*question, assistant(said), *answer])


def test_sampled_tokens_stay_as_they_were_sampled_where_text_has_another_tokenisation():
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer)
    one, two, twelve = tokenizer.convert_tokens_to_ids(["1", "2", "12"])
    end = tokenizer.eos_token_id
    observation = template.observation([user("no")], [one, two, end])
    whole = template.prompt([user("?"), assistant("12"), user("no")])
    assert [*template.prompt([user("?")]), twelve, end, *observation] == whole
    assert [*template.prompt([user("?")]), one, two, end, *observation] != whole


@pytest.mark.parametrize("last", ["2", "\n"])
def test_the_end_of_the_turn_is_appended_where_something_else_ended_it(last):
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(tokenizer)
    sampled = tokenizer.convert_tokens_to_ids(["1", last])
    observation = template.observation([user("no")], sampled)
    assert observation[0] == tokenizer.eos_token_id
    assert tokenizer.decode(observation) == "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_rewrites_replies_is_refused():
    rewriting = ChatTemplate(tiny_tokenizer(template=CHATML.replace("message['content']", "message['content'] | urlencode")))
    with pytest.raises(ValueError, match="does not render an assistant's message as it is written"):
        rewriting.observation([user("no")], [5])


def test_a_tokenizer_without_a_template_joins_plain_text_and_says_so():
    tokenizer = tiny_tokenizer(template=None)
    with pytest.warns(UserWarning, match="no chat template"):
        template = ChatTemplate(tokenizer)
    assert tokenizer.decode(template.prompt([system("Add."), user("1+1=")])) == "Add.\n1+1="
    assert tokenizer.decode(template.observation([user("no"), user("again")], [5])) == "\nno\nagain\n"


def test_a_tokenizer_with_a_template_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ChatTemplate(tiny_tokenizer())
