"""Turns of the policy, and their tool calls: the tools in the prompt, the calls in the sampled text, and the results as tokens (law 2)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from strop.environments.handle import EnvironmentHandle
from strop.generation.base import Completion, Generator
from strop.models.chat_template import ChatTemplate
from strop.models.vision.image_files import EncodedPrompt
from strop.sampling import KEPT, Sampling
from strop.tools.base import ParsedReply, ToolCallFormat, ToolConfigError
from strop.tools.call_formats import choose_format
from strop.tools.toolbox import ToolOffer
from strop.types import Message, Messages, ToolCall, Turn


def check_columns(completion: Completion, generator: Generator, sampling: Sampling) -> None:
    """Raise RuntimeError if a required sampling mask was not reported."""
    if sampling.records_sampling_mask and KEPT not in completion.columns:
        raise RuntimeError(
            f"{type(generator).__name__} does not report the sampling mask, which policy.generation.keep_sampling_mask requires; set that "
            "key to false, or set policy.generation.backend to torch"
        )


def make_policy_turn(
    completion: Completion, context: Sequence[int], template: ChatTemplate, generator: Generator, sampling: Sampling
) -> Turn:
    """Return the turn to train on; ``context`` is the policy's input. Raises RuntimeError if a required sampling mask was not
    reported.
    """
    check_columns(completion, generator, sampling)
    return Turn(
        author="policy",
        tokens=completion.tokens,
        text=template.decode_turn(completion.tokens.tolist()),
        opening=template.find_opening(context),
        logprobs=completion.logprobs,
        versions=completion.versions,
        columns=completion.columns,
    )


@lru_cache(maxsize=16)
def find_format(template: ChatTemplate, name: str | None) -> ToolCallFormat:
    """Return the format ``name``, or the one that the template writes. Raises ToolConfigError."""
    return choose_format(name, template.write_call)


def describe_tool_calls(environments: Iterable[EnvironmentHandle[Any]], template: ChatTemplate, name: str | None) -> str | None:
    """Describe how the tools of a run are called; None without tools. Raises ToolConfigError if they cannot be."""
    continuations = sorted({continuation for each in environments if (continuation := each.traits.tool_continuation)})
    if not continuations:
        return None
    for continuation in continuations:
        found = ToolTurns.make(ToolOffer((), continuation), template, name).format
    chosen = "as the chat template writes them" if name is None else "policy.tokenizer.tool_call_format"
    described = "" if template.describes_tools else "; a system message describes the tools, since the chat template does not"
    return f"tool calls in the format {found.name} ({chosen}){described}"


@dataclass(frozen=True)
class ToolTurns:
    """How the tools of an episode meet a model's chat template."""

    offer: ToolOffer
    template: ChatTemplate
    format: ToolCallFormat

    @staticmethod
    def make(offer: ToolOffer, template: ChatTemplate, format_name: str | None) -> ToolTurns:
        """Raises ToolConfigError if the format is unknown, or cannot continue within the same message."""
        found = find_format(template, format_name)
        if offer.continuation == "message" and not (found.stop_strings and found.inline_result):
            raise ToolConfigError(
                f"tool_continuation is message, but calls in the format {found.name} end a message; set it to turn, or "
                "policy.tokenizer.tool_call_format to hermes, qwen_xml or xml"
            )
        return ToolTurns(offer, template, found)

    def describe(self, messages: Messages) -> Messages:
        """Return the messages, adding a system message that describes the tools if the chat template does not."""
        if self.template.describes_tools:
            return messages
        role = "system" if self.template.renders_system_messages else "user"
        return with_description(messages, self.offer, self._example(), role)

    def _example(self) -> str:
        """Return an example call: as the chat template writes those of earlier turns, otherwise as the format does."""
        name = self.offer.schemas[0]["function"]["name"] if self.offer.schemas else "NAME"
        written = self.template.write_call(ToolCall(name, {"ARGUMENT": "VALUE"}, id="call00000"))
        return self.format.example(name) if written is None else written[0].strip()

    def encode_prompt(self, messages: Messages) -> list[int]:
        return self.encode_with_images(messages).tokens

    def encode_with_images(self, messages: Messages) -> EncodedPrompt:
        return self.template.encode_with_images(messages, self.offer.schemas if self.template.describes_tools else ())

    def stop_at_calls(self, sampling: Sampling) -> Sampling:
        """Return sampling settings that stop after a call, for calls that continue within the same message."""
        if self.offer.continuation == "turn":
            return sampling
        return replace(sampling, stop_strings=sampling.join_stops(self.format.stop_strings))

    def parse(self, turn: Turn, number: int) -> ParsedReply:
        """Parse a policy turn. Its calls get ids of nine letters and digits, which every template accepts."""
        reply = self.format.parse(turn.opening + turn.text, self.offer.schemas)
        return replace(reply, calls=tuple(_identify(call, number, index) for index, call in enumerate(reply.calls)))

    def encode_results(self, messages: Messages, turn: Turn, reply: ParsedReply) -> EncodedPrompt:
        """Encode the answers to the calls of a turn, and the start of what the policy samples next.

        Raises ValueError for an answer with images if the policy's message continues: an image needs its own message.
        """
        sampled = turn.tokens.tolist()
        if self.offer.continuation == "message" and self.format.inline_result is not None:
            end = self.format.stop_strings[0]
            if self.template.decode_turn(sampled).rstrip().endswith(end):
                if any(message.images for message in messages):
                    raise ValueError(
                        "a tool answered with an image, but its answer goes on in the policy's own message (tool_continuation is "
                        "message), which cannot hold an image; set tool_continuation to turn"
                    )
                text = "".join(self.format.inline_result.format(result=message.content) for message in messages)
                return EncodedPrompt(self.template.encode_after(end, text))
        unread = (ToolCall("tool", {}, id=f"m{len(reply.calls) + index:08d}") for index in range(len(reply.malformed)))
        calls = (*reply.calls, *unread)
        answers = [replace(message, tool_call_id=call.id) for message, call in zip(messages, calls, strict=True)]
        if not self.template.renders_tool_messages:
            answers = [replace(message, role="user", name="", tool_call_id="") for message in answers]
        return self.template.encode_observation_with_images(answers, sampled, calls=calls)


def _identify(call: ToolCall, turn: int, index: int) -> ToolCall:
    """Return the call with an id: the one the policy wrote, if its format has ids, otherwise one derived from its position."""
    return call if len(call.id) == 9 and call.id.isalnum() else replace(call, id=f"c{turn:04d}{index:04d}")


def make_reply_message(reply: ParsedReply) -> Message:
    return Message("assistant", reply.content, tool_calls=reply.calls, reasoning=reply.reasoning)


def with_description(messages: Messages, offer: ToolOffer, example: str, role: str) -> Messages:
    """Return the messages with the tools described in the first one, if it has ``role``, or in a new one before it."""
    listed = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in offer.schemas)
    text = f"You may call these tools:\n{listed}\n\nA call is written exactly like this:\n{example}"
    if messages and messages[0].role == role:
        parts = (messages[0].content, text) if role == "system" else (text, messages[0].content)
        return (replace(messages[0], content="\n\n".join(parts)), *messages[1:])
    return (Message(role, text), *messages)
