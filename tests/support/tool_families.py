"""Families of models with tools: their chat templates, from the installed TRL, and what a policy of each samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from strop.models.chat_template import ChatTemplate
from strop.types import ToolCall
from support.tokenizer import build_tokenizer

# No package carries Mistral's template: one of its shape, with its demands on ids and on the order of messages.
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}{% if loop.index0 == 0 and tools %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% elif message.role == 'assistant' %}{% if message.tool_calls %}{{ message.content + '[TOOL_CALLS][' }}"
    "{% for call in message.tool_calls %}{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ '{\"name\": ' + call.function.name | tojson + ', \"arguments\": ' + call.function.arguments | tojson + ', \"id\": ' "
    "+ call.id | tojson + '}' }}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% elif message.role == 'tool' %}"
    "{% if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ '[TOOL_RESULTS]{\"content\": ' + message.content | tojson + ', \"call_id\": ' + message.tool_call_id | tojson }}"
    "{{ '}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}"
)


def _hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{c.name}", "arguments": {json.dumps(c.arguments)}}}\n</tool_call>' for c in calls)


def _qwen_xml(calls: Sequence[ToolCall]) -> str:
    bodies = ("".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in c.arguments.items()) for c in calls)
    return "\n".join(
        f"<tool_call>\n<function={c.name}>\n{body}</function>\n</tool_call>" for c, body in zip(calls, bodies, strict=True)
    )


def _llama3(calls: Sequence[ToolCall]) -> str:
    return "; ".join(f'{{"name": "{c.name}", "parameters": {json.dumps(c.arguments)}}}' for c in calls)


def _mistral(calls: Sequence[ToolCall]) -> str:
    listed = [json.dumps({"name": c.name, "arguments": c.arguments, "id": c.id}) for c in calls]
    return f"[TOOL_CALLS][{', '.join(listed)}]"


def _harmony(calls: Sequence[ToolCall]) -> str:
    (call,) = calls
    return f" to=functions.{call.name}<|channel|>commentary json<|message|>{json.dumps(call.arguments)}"


def _deepseek(calls: Sequence[ToolCall]) -> str:
    listed = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{json.dumps(c.arguments)}\n```<｜tool▁call▁end｜>"
        for c in calls
    ]
    joined = "\n".join(listed)
    return f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>"


WRITERS: Mapping[str, Callable[[Sequence[ToolCall]], str]] = {
    "hermes": _hermes,
    "qwen_xml": _qwen_xml,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "gpt_oss": _harmony,
    "deepseek": _deepseek,
}


@dataclass(frozen=True)
class ToolFamily:
    template: str  # a file of TRL's, or the template itself
    format: str  # which is found by the template
    end: str = "<|im_end|>"  # with which a turn ends
    call_end: str = ""  # with which a turn with calls ends, if otherwise
    reasoning: str = ""  # how a turn begins that thinks, with {}
    specials: tuple[str, ...] = ()
    final: str = "{}"  # how the answer is written
    several: bool = True  # calls in one turn
    rewrites: str = ""  # why the whole conversation renders differently from what was sampled

    def write(self, calls: Sequence[ToolCall], answer: str = "", reasoning: str = "") -> str:
        """Write a turn as a policy of the family samples it."""
        thought = self.reasoning.format(reasoning) if self.reasoning and reasoning else ""
        if calls:
            return thought + WRITERS[self.format](calls) + (self.call_end or self.end)
        return thought + self.final.format(answer) + self.end

    def make_template(self) -> ChatTemplate:
        tokenizer: Any = build_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": [*self.specials]})
        spec = find_spec("trl")
        assert spec is not None and spec.origin is not None
        folder = Path(spec.origin).parent / "chat_templates"
        tokenizer.chat_template = self.template if "{" in self.template else (folder / self.template).read_text("utf-8")
        if self.template == MISTRAL_TEMPLATE or self.end != "<|im_end|>":
            tokenizer.eos_token = self.end
        return ChatTemplate(tokenizer)


LLAMA = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
DEEPSEEK = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
MISTRAL = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "</s>",
)
FORGETS = "all reasoning is dropped, and what opens a list of calls is written in the first round only"
TOOL_FAMILIES = {
    "qwen2.5": ToolFamily("qwen2_5.jinja", "hermes"),
    "qwen3": ToolFamily("qwen3.jinja", "hermes", reasoning="<think>\n{}\n</think>\n\n"),
    "qwen3_instruct": ToolFamily("qwen3_instruct_2507.jinja", "hermes"),
    "qwen3.6": ToolFamily("qwen3_6.jinja", "qwen_xml", reasoning="{}\n</think>\n\n"),
    "nemotron3": ToolFamily("nemotron_3_nano.jinja", "qwen_xml", call_end="\n<|im_end|>", reasoning="{}\n</think>\n"),
    "llama3.1": ToolFamily("llama3_1.jinja", "llama3_json", "<|eot_id|>", specials=LLAMA, several=False),
    "llama3.2": ToolFamily("llama3_2.jinja", "llama3_json", "<|eot_id|>", specials=LLAMA, several=False),
    "mistral": ToolFamily(MISTRAL_TEMPLATE, "mistral", "</s>", specials=MISTRAL),
    "gpt_oss": ToolFamily(
        "gptoss.jinja",
        "gpt_oss",
        "<|return|>",
        call_end="<|call|>",
        specials=HARMONY,
        reasoning="<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        final="<|channel|>final<|message|>{}",
        several=False,
        rewrites="the reasoning before calls is dropped once an answer follows",
    ),
    "deepseek_v3": ToolFamily(
        "deepseekv3.jinja", "deepseek", "<｜end▁of▁sentence｜>", specials=DEEPSEEK, reasoning="{}\n</think>\n\n", rewrites=FORGETS
    ),
    "deepseek_r1": ToolFamily(
        "deepseek_r1_distill.jinja",
        "deepseek",
        "<｜end▁of▁sentence｜>",
        specials=DEEPSEEK,
        reasoning="{}\n</think>\n\n",
        rewrites=FORGETS,
    ),
}
