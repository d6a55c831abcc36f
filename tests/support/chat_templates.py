"""Chat templates modelled on the common families, and a tokenizer with their special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.tokenizer import build_tokenizer


@dataclass(frozen=True)
class Family:
    template: str
    end: str  # the end of the policy's turn
    begin: str = ""  # written before the content
    specials: tuple[str, ...] = ()
    trims: bool = False  # strips white space around contents
    system: bool = True  # supports system messages
    tool: bool = True  # supports roles other than user and assistant, in any order


CHATML_DEFAULT_SYSTEM = Family(
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    end="<|im_end|>",
    specials=("<|im_start|>",),
)
LLAMA3 = Family(
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    end="<|eot_id|>",
    specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    trims=True,
)
GEMMA = Family(
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    end="<end_of_turn>",
    specials=("<start_of_turn>", "<end_of_turn>"),
    trims=True,
    system=False,
    tool=False,
)
PHI = Family(  # writes the end of the conversation where a new turn would start
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    end="<|end|>",
    specials=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
)
MISTRAL = Family(  # no header before replies, and a space around them
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}",
    begin=" ",
    end=" <|im_end|>",
    trims=True,
)
FAMILIES = {"chatml": CHATML_DEFAULT_SYSTEM, "llama3": LLAMA3, "gemma": GEMMA, "phi": PHI, "mistral": MISTRAL}

# Adds reasoning tags to replies after the last question and removes them from earlier ones.
QWEN3 = Family(
    "{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for message in messages %}{% if message.role == 'assistant' %}{% set content = message.content %}"
    "{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}{% set content = '<think>\n' + thought + '\n</think>\n\n' + content %}{% endif %}"
    "{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    end="<|im_end|>",
    specials=("<|im_start|>",),
)
# The generation prompt opens a reasoning tag; recorded replies are unchanged.
THINKING_PROMPT = Family(
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
    end="<|im_end|>",
    specials=("<|im_start|>",),
)
# Ends a turn by opening the next one.
GLM = Family(
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    end="",
    specials=("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
)


def make_tokenizer(family: Family) -> Any:
    """Build a byte-level tokenizer with the family's template. Its end of sequence is <|im_end|>."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.specials)})
    tokenizer.chat_template = family.template
    return tokenizer
