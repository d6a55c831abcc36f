"""Messages to tokens, with the tokenizer's chat template. Text becomes tokens only here (law 2).

Sampled tokens are never tokenized again. An observation is tokenized separately, as the part of the rendered template between
the end of the policy's turn and the start of its next one.
"""

from __future__ import annotations

import json
import re
import warnings
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from strop.models.vision.image_files import EncodedPrompt
from strop.thoughts import find_opening
from strop.types import Image, Message, Messages, PromptImage, ToolCall, assistant, user

if TYPE_CHECKING:  # it imports torch, which a template does not need
    from strop.models.vision.vision_processor import VisionProcessor

# A reply that no template changes and no conversation contains. The text rendered around it is the same for every reply.
_REPLY_MARKER = "\u241e\u2418\u241e"
_CALL_MARKER = "strop-call-marker"  # the same for calls; not escaped by any template
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of a message's reasoning in templates
_THOUGHT_SWITCHES = ("enable_thinking", "thinking")  # template options: whether a turn begins with thoughts
TOOL_ROLES = ("tool", "function", "ipython")
_REMEMBERED_TOKENS = 2**20  # of recently encoded prompts
_OPENING_TOKENS = 16  # tokens at the end of a prompt that may open a thought
_REMEMBERED_IMAGES = 512  # recently encoded prompts with images
_CONTEXT_CHARACTERS = 64  # characters before a text that can affect its tokenization


Tools = Sequence[Mapping[str, Any]]  # definitions in the form that templates take


@dataclass(frozen=True)
class CallStyle:
    """How a template expects the calls of a message."""

    arguments_as_text: bool  # JSON, not an object
    content_absent: bool  # messages with calls have no content, rather than an empty text


@dataclass(frozen=True)
class TokenSpan:
    """A part of a recorded conversation, and whether its tokens are in the loss."""

    tokens: list[int]
    in_loss: bool
    text: str
    images: tuple[PromptImage, ...] = ()  # positions count from the span's first token


@dataclass(frozen=True)
class _Reply:
    """An assistant message in the text that it ends; the policy generates the part between ``start`` and ``end``."""

    index: int
    text: str  # the conversation rendered with this message last
    start: int
    end: int

    def follows(self, other: _Reply) -> bool:
        """Whether the policy reads the other reply, exactly as generated, before it writes this one."""
        return other.end <= self.start and self.text.startswith(other.text[: other.end])


class ConversationError(ValueError):
    """The chat template cannot split a recorded conversation into loss tokens and context."""


class ChatTemplate:
    """Renders prompts and observations as token ids."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        options: Mapping[str, Any] | None = None,
        reads_images: bool = False,
        vision: VisionProcessor | None = None,
    ) -> None:
        """``options`` are passed to the template, such as ``enable_thinking``. ``vision``: the image processor of a model that
        reads images; without it, messages with images are an error. ``reads_images``: the model reads images, but messages are
        only rendered as text.

        Without a template, messages are joined as plain text and a warning is issued.
        """
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.reads_images = reads_images or vision is not None
        self.vision = vision
        self._encoded: OrderedDict[tuple[Message, ...], EncodedPrompt] = OrderedDict()  # with images
        self._prompts: dict[tuple[Message, ...], array[int]] = {}
        self._prompt_tokens = 0  # in ``_prompts``
        self._variants: dict[str, ChatTemplate] = {}  # by their options
        self.joins_plain_text = not getattr(tokenizer, "chat_template", None)
        if self.joins_plain_text:
            warnings.warn(
                "the tokenizer has no chat template: messages are joined as plain text; set policy.tokenizer.chat_template to change that",
                stacklevel=2,
            )

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with these options on top of its own; the same object for the same options."""
        merged = {**self.options, **options}
        if merged == self.options:
            return self
        key = json.dumps(merged, sort_keys=True, default=str)
        if key not in self._variants:
            self._variants[key] = ChatTemplate(self.tokenizer, options=merged, reads_images=self.reads_images, vision=self.vision)
        return self._variants[key]

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token may stand for; a longer text has at least two tokens. Unknown words count as 64."""
        return max(64, *map(len, self.tokenizer.get_vocab()))

    def encode_prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Encode the conversation so far and the start of the policy's turn. Raises ValueError if it is empty."""
        if tools:
            return self._encode_prompt(messages, tools)
        try:
            known = self._prompts.get(tuple(messages))
        except TypeError:  # a message with calls has no hash
            return self._encode_prompt(messages, ())
        if known is not None:
            return known.tolist()
        ids = self._encode_prompt(messages, ())
        self.remember_prompt(messages, ids)
        return ids

    def render_prompt(self, messages: Messages, tools: Tools = ()) -> str:
        """Return the text that ``encode_prompt`` encodes. Raises ValueError if there are no messages."""
        if not messages:
            raise ValueError("a prompt needs at least one message; the environment returned none")
        return _join_messages(messages) if self.joins_plain_text else self._render(messages, open_turn=True, tools=tools)

    def remember_prompt(self, messages: Messages, ids: Sequence[int]) -> None:
        """Cache the tokens of a prompt for the other samples of its task."""
        if self._prompt_tokens > _REMEMBERED_TOKENS:
            self._prompts, self._prompt_tokens = {}, 0
        self._prompts[tuple(messages)] = array("q", ids)
        self._prompt_tokens += len(ids)

    def encode_with_images(self, messages: Messages, tools: Tools = ()) -> EncodedPrompt:
        """Encode the conversation so far and the start of the policy's turn, with the images of its messages.

        Raises ValueError if the prompt is empty or its placeholders do not match its images, ImageError for an unreadable image.
        """
        if self.vision is None or not (images := images_of(messages)):
            return EncodedPrompt(self.encode_prompt(messages, tools))
        key = None if tools or any(message.tool_calls for message in messages) else tuple(messages)  # calls have no hash
        encoded = None if key is None else self._encoded.pop(key, None)
        if encoded is None:
            encoded = self.vision.encode_text(self.render_prompt(messages, tools), [self.vision.read(image) for image in images])
        if key is not None:
            self._encoded[key] = encoded  # samples of a task share the files
            if len(self._encoded) > _REMEMBERED_IMAGES:
                self._encoded.popitem(last=False)
        return encoded

    def encode_observation_with_images(
        self, messages: Messages, sampled: Sequence[int], *, calls: Sequence[ToolCall] | None = None
    ) -> EncodedPrompt:
        """Encode the tokens to append to the policy's turn ``sampled``, as ``encode_observation``, with the images of the messages.

        Image positions count from the first of these tokens.
        """
        if self.vision is None or not (images := images_of(messages)):
            return EncodedPrompt(self.encode_observation(messages, sampled, calls=calls))
        contents = [self.vision.read(image) for image in images]
        tokens = self._drop_end(
            self._encode(self.vision.write_images(self._after_turn(messages, calls), contents)), sampled, calls
        )
        return EncodedPrompt(tokens, self.vision.find_images(tokens, contents))

    def _encode_prompt(self, messages: Messages, tools: Tools) -> list[int]:
        if self.vision is not None and images_of(messages):
            return self.encode_with_images(messages, tools).tokens
        text = self.render_prompt(messages, tools)
        if self.joins_plain_text:
            ids: list[int] = self.tokenizer(text)["input_ids"]
            return ids
        return self._encode(text)

    def encode_observation(
        self, messages: Messages, sampled: Sequence[int], *, calls: Sequence[ToolCall] | None = None
    ) -> list[int]:
        """Encode the tokens to append to the policy's turn ``sampled``.

        They are the end of that turn (unless it was sampled), the messages, and the start of a new turn. ``calls`` are the calls
        answered by the messages; if none could be parsed, any call may stand in.
        """
        if self.joins_plain_text:
            return self._encode("\n" + _join_messages(messages) + "\n")
        if self.vision is not None and images_of(messages):
            return self.encode_observation_with_images(messages, sampled, calls=calls).tokens
        return self._drop_end(self._encode(self._after_turn(messages, calls)), sampled, calls)

    def _after_turn(self, messages: Messages, calls: Sequence[ToolCall] | None) -> str:
        """Return the rendered text from the end of the policy's turn to the start of its next one."""
        if calls and self.call_style is not None:
            return self._after_calls(calls, messages)
        context = [Message("user", "?"), Message("assistant", _REPLY_MARKER)]
        _, marker, rest = self._render([*context, *messages], open_turn=True).partition(_REPLY_MARKER)
        if not marker:
            raise ValueError(
                "the chat template does not render an assistant's message unchanged, so a conversation cannot be continued as tokens; "
                "set policy.tokenizer.chat_template to one that does, or allow only one turn"
            )
        return rest

    def _drop_end(self, ids: list[int], sampled: Sequence[int], calls: Sequence[ToolCall] | None) -> list[int]:
        """Return the ids without the end of the policy's turn, if it was sampled."""
        ended = sampled[-4:] if calls else sampled[-1:]  # a call may end with several tokens, of which a template writes one
        return ids[1:] if ids and ids[0] in ended else ids

    def encode_after(self, preceding: str, text: str) -> list[int]:
        """Encode text that continues the policy's turn, after ``preceding``."""
        return self._encode_continuation(preceding, text)

    def decode_turn(self, sampled: Sequence[int]) -> str:
        """Decode a policy turn with its special tokens, which call formats may use, but without the one that ends it."""
        last = self.tokenizer.decode(sampled[-1:], skip_special_tokens=True) if len(sampled) else ""
        text: str = self.tokenizer.decode(sampled if last else sampled[:-1], skip_special_tokens=False)
        return text

    def find_opening(self, context: Sequence[int]) -> str:
        """Return the opening tag of a thought that a turn after these tokens continues; empty if it begins outside of thoughts."""
        return find_opening(self.tokenizer.decode(context[-_OPENING_TOKENS:], skip_special_tokens=False))

    # --- tools ----------------------------------------------------------------------------------------------------------------

    @cached_property
    def describes_tools(self) -> bool:
        """Whether the template includes tool definitions."""
        if self.joins_plain_text:
            return False
        parameters = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": _CALL_MARKER, "description": "", "parameters": parameters}}
        return _CALL_MARKER in self._render([user("?")], open_turn=True, tools=[tool])

    @cached_property
    def renders_tool_messages(self) -> bool:
        """Whether the template accepts tool messages."""
        call = ToolCall("f", {"text": "x"}, id="call00000")
        message = Message("tool", _CALL_MARKER, name="f", tool_call_id=call.id)
        turns = [Message("assistant", "", tool_calls=(call,))] if self.call_style is not None else [assistant("x")]
        return self.joins_plain_text or _CALL_MARKER in self._try_render([user("?"), *turns, message])

    @cached_property
    def renders_system_messages(self) -> bool:
        """Whether the template accepts a system message."""
        return self.joins_plain_text or _CALL_MARKER in self._try_render([Message("system", _CALL_MARKER), user("?")])

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the template expects calls; None: it has no calls, and they are part of the content."""
        if self.joins_plain_text:
            return None
        for style in (CallStyle(text, absent) for absent in (False, True) for text in (False, True)):
            message = Message("assistant", "", tool_calls=(ToolCall("f", {"text": _CALL_MARKER}, id="call00000"),))
            if _CALL_MARKER in self._try_render([user("?"), message], style):
                return style
        return None

    def write_call(self, call: ToolCall) -> tuple[str, str] | None:
        """Return a call as the template writes it in a turn, and the token that ends the turn; None if it does not write calls."""
        if self.call_style is None:
            return None
        opened = self._render([user("?")], open_turn=True)
        rendered = self._render([user("?"), Message("assistant", "", tool_calls=(call,))], open_turn=False)
        common = next((index for index, (a, b) in enumerate(zip(opened, rendered, strict=False)) if a != b), len(opened))
        tag = rendered.rfind("<", 0, common)  # tokens that begin alike
        text = rendered[common if ">" in rendered[tag:common] or tag < 0 else tag :].rstrip()
        end = max((token for token in self._special_tokens if text.endswith(token)), key=len, default="")
        return text.removesuffix(end), end

    def _after_calls(self, calls: Sequence[ToolCall], messages: Messages) -> str:
        """Return the rendered text from the end of a turn with these calls to the start of the next one."""
        marked = (*calls[:-1], replace(calls[-1], arguments={"text": _CALL_MARKER}))
        turn = [user("?"), Message("assistant", "", tool_calls=marked)]
        closing = self._render(turn, open_turn=False).rpartition(_CALL_MARKER)[2]
        following = self._render([*turn, *messages], open_turn=True).rpartition(_CALL_MARKER)[2]
        text = closing.rstrip()
        end = max((token for token in self._special_tokens if text.endswith(token)), key=len, default="")
        cut = len(text) - len(end) if end else len(closing)
        if not following.startswith(closing[: cut + len(end)]):
            raise ValueError(
                f"the chat template ends a turn with calls with {closing!r:.80}, and with {following[: len(closing)]!r:.80} when results "
                "follow, so the conversation cannot be continued as tokens; set policy.tokenizer.chat_template to one that ends all turns "
                "with calls alike"
            )
        return following[cut:]

    @cached_property
    def _special_tokens(self) -> frozenset[str]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        return frozenset({*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""})

    def encode_conversation(self, messages: Messages, *, trailing: bool = True, tools: Tools = ()) -> list[int]:
        """Encode a complete conversation, for example for a reward model; without ``trailing``, up to the template's trailing
        white space.
        """
        text = self.render_conversation(messages, tools=tools)
        return self._encode(text if trailing else text.rstrip())

    def render_conversation(self, messages: Messages, *, tools: Tools = ()) -> str:
        """Return a complete conversation as text."""
        return _join_messages(messages) if self.joins_plain_text else self._render(messages, open_turn=False, tools=tools)

    def encode_spans(
        self, messages: Messages, *, loss_from: int = 0, opened: bool = True, tools: Tools = ()
    ) -> list[list[TokenSpan]]:
        """Split a recorded conversation into paths of spans: a prompt, then loss spans and context spans in alternation.

        The loss covers the assistant's messages from index ``loss_from`` on, except one that opens the conversation and those with
        ``in_loss=False``. Each is rendered as the last message, as the policy would write it: it begins where sampling would
        begin, after ``encode_prompt(messages before it)``, and ends with the template's end-of-turn token, if there is one. It
        continues the path of the previous turn if the template still renders that turn identically, and otherwise starts another
        path. The first path is that of the last turn, the others follow in order; most templates need only one. Joined, the
        texts of a path are the rendered conversation up to its last turn; those of the last turn's path reach to its end. The
        first span has exactly the tokens of the prompt of the path's first turn. With ``opened=False``, the template's opening
        of a turn is in the loss too, as if the policy had generated it. Raises ConversationError if the template renders a turn
        differently from how it would have been sampled.
        """
        turns = self._find_turns(messages, loss_from)
        if self.joins_plain_text:
            return [self._plain_spans(messages, turns)]
        paths = self._cut_conversation(messages, turns, opened, tools)
        if self.vision is None or not images_of(messages):
            return [self._spans(texts, self._encode(texts[0])) for texts, _ in paths]
        contents = [self.vision.read(image) for image in images_of(messages)]
        return [self._spans_with_images(texts, contents[: len(images_of(shown))], self.vision) for texts, shown in paths]

    def _spans_with_images(self, texts: Sequence[str], contents: Sequence[bytes], vision: VisionProcessor) -> list[TokenSpan]:
        """Return the spans of texts with image placeholders, in order."""
        counts = [text.count(vision.placeholder) for text in texts]
        if sum(counts) != len(contents):
            vision.write_images("".join(texts), contents)  # raises
        ends = list(accumulate(counts))
        of_text = [contents[end - count : end] for end, count in zip(ends, counts, strict=True)]
        written = [vision.write_images(text, own) for text, own in zip(texts, of_text, strict=True)]
        spans = zip(
            self._spans(written, self._encode(written[0])), texts, of_text, strict=False
        )  # an empty last text becomes no span
        return [replace(span, text=text, images=vision.find_images(span.tokens, own)) for span, text, own in spans]

    def split_text(
        self, messages: Messages, *, loss_from: int = 0, opened: bool = True, tools: Tools = ()
    ) -> list[list[str]] | None:
        """Return the texts of ``encode_spans`` before tokenization; None where messages are joined as plain text."""
        turns = self._find_turns(messages, loss_from)
        if self.joins_plain_text:
            return None
        return [texts for texts, _ in self._cut_conversation(messages, turns, opened, tools)]

    def _find_turns(self, messages: Messages, loss_from: int) -> list[int]:
        """Return the indices of the messages in the loss. Raises ConversationError if there are none."""
        replies = [index for index, message in enumerate(messages) if message.role == "assistant" and index >= max(loss_from, 1)]
        turns = [index for index in replies if messages[index].in_loss]
        if not turns:
            raise ConversationError(
                "all assistant messages have weight 0, so there are no loss tokens"
                if replies
                else "the conversation has no assistant message that follows another message, so there are no loss tokens"
            )
        return turns

    def _cut_conversation(
        self, messages: Messages, turns: Sequence[int], opened: bool, tools: Tools
    ) -> list[tuple[list[str], Messages]]:
        """Return the texts of each path, and the messages in them."""
        if tools and not self.describes_tools:
            raise ConversationError(
                "the data has definitions of tools, which the chat template does not show; write them into the system message of the data, "
                "or set policy.tokenizer.chat_template to a template with tools"
            )
        rendered = self._render(messages, open_turn=False, tools=tools)
        paths: list[list[_Reply]] = []
        for turn in turns:
            reply = self._find_reply(messages, turn, rendered, opened=opened, tools=tools)
            if not paths or not reply.follows(paths[-1][-1]):
                paths.append([])
            paths[-1].append(reply)
        return [_cut_path(path, rendered, messages) for path in (paths[-1], *paths[:-1])]

    def _find_reply(self, messages: Messages, turn: int, rendered: str, *, opened: bool, tools: Tools = ()) -> _Reply:
        """Return the part of message ``turn`` that the policy generates, with the message rendered last."""
        last = turn + 1 == len(messages)
        for mode in self._modes:
            prompt = self._render(messages[:turn], open_turn=opened, tools=tools, mode=mode)
            through = (
                rendered if last and not mode else self._render(messages[: turn + 1], open_turn=False, tools=tools, mode=mode)
            )
            if through.startswith(prompt):
                break
        else:
            prompt = self._render(messages[:turn], open_turn=opened, tools=tools)
            raise ConversationError(
                _opening_mismatch_message(turn, prompt, self._render(messages[: turn + 1], open_turn=False, tools=tools))
            )
        for name, on in mode.items():
            _warn_of_mode(name, on)
        suffix, generated = self._call_suffix if messages[turn].tool_calls else self._reply_suffix
        end = len(through) - len(suffix)
        if not through.endswith(suffix) or end < len(prompt):
            raise ConversationError(
                f"the chat template ends message {turn + 1} with {through[-40:]!r}, and other replies with {suffix[-40:]!r}: it is "
                "unclear where the reply ends; set policy.tokenizer.chat_template to one that ends all replies alike"
            )
        if messages[turn].reasoning.strip() not in through[len(prompt) : end]:
            raise ConversationError(
                f"the chat template leaves out the reasoning of message {turn + 1}, so it would be lost; write it into the content between "
                "the model's own markers, or set policy.tokenizer.chat_template to a template that writes it"
            )
        return _Reply(turn, through, len(prompt), end + generated)

    @cached_property
    def _modes(self) -> list[dict[str, bool]]:
        """Template options a reply may have been sampled with: the run's, then without and with thoughts if the run leaves it
        open.
        """
        template = str(getattr(self.tokenizer, "chat_template", ""))
        switches = [
            name for name in _THOUGHT_SWITCHES if name not in self.options and re.search(rf"(?<![.\w]){name}\b", template)
        ]
        return [{}, *({name: on} for name in switches for on in (False, True))]

    @cached_property
    def _reply_suffix(self) -> tuple[str, int]:
        """The text that the template adds after a reply, and the number of its characters that the policy generates.

        The policy generates the text up to and including the first special token.
        """
        rendered = self._render([user("?"), assistant(_REPLY_MARKER)], open_turn=False)
        _, marker, suffix = rendered.rpartition(_REPLY_MARKER)
        if not marker:
            raise ConversationError(
                "the chat template does not render an assistant's message unchanged; set policy.tokenizer.chat_template to one that does"
            )
        start, length = min(
            ((suffix.index(token), -len(token)) for token in self._special_tokens if token in suffix), default=(0, 0)
        )
        return suffix, start - length

    @property
    def turn_end(self) -> tuple[int, str] | None:
        """The token with which the template ends a reply, as its id and text; None if it uses no special token for it."""
        if self.joins_plain_text:
            return None
        try:
            suffix, generated = self._reply_suffix
        except (ConversationError, ValueError):  # reported when an example is read
            return None
        ids = self.tokenizer.encode(suffix[:generated], add_special_tokens=False)
        return (ids[-1], suffix[:generated]) if ids else None

    @cached_property
    def _call_suffix(self) -> tuple[str, int]:
        """Like ``_reply_suffix`` for a message with calls, which some templates end differently: from the last special token on."""
        message = Message("assistant", "", tool_calls=(ToolCall("f", {"text": _CALL_MARKER}, id="call00000"),))
        closing = self._render([user("?"), message], open_turn=False).rpartition(_CALL_MARKER)[2]
        text = closing.rstrip()
        end = max((token for token in self._special_tokens if text.endswith(token)), key=len, default="")
        return closing[len(text) - len(end) :], len(end)

    def _plain_spans(self, messages: Messages, turns: Sequence[int]) -> list[TokenSpan]:
        """Split plain text joined as in ``encode_prompt`` and ``encode_observation``.

        A reply follows its prompt directly, and later messages start on new lines.
        """
        texts = [_join_messages(messages[: turns[0]])]
        for turn, following in pairwise([*turns, len(messages)]):
            between = messages[turn + 1 : following]
            texts += [messages[turn].content, f"\n{_join_messages(between)}\n" if between or following < len(messages) else ""]
        return self._spans(texts, self.encode_prompt(messages[: turns[0]]))

    def _spans(self, texts: Sequence[str], prompt: list[int]) -> list[TokenSpan]:
        """Return the spans of ``texts``, every second of which is in the loss. An empty last text is left out."""
        spans = [TokenSpan(prompt, False, texts[0])]
        for index, (preceding, text) in enumerate(pairwise(texts), start=1):
            spans.append(TokenSpan(self._encode_continuation(preceding, text), index % 2 == 1, text))
        return spans if texts[-1] else spans[:-1]

    def _encode_continuation(self, preceding: str, text: str) -> list[int]:
        """Encode ``text`` as a continuation of ``preceding``, or separately if the two would share a token.

        Some tokenizers mark the start of their input as the start of a word, which is wrong for a continuation.
        """
        preceding = preceding[-_CONTEXT_CHARACTERS:]
        preceding_ids, joined = self._encode(preceding), self._encode(preceding + text)
        return joined[len(preceding_ids) :] if joined[: len(preceding_ids)] == preceding_ids else self._encode(text)

    def _render(self, messages: Messages, *, open_turn: bool, tools: Tools = (), mode: Mapping[str, bool] | None = None) -> str:
        style = self.call_style if any(message.tool_calls for message in messages) else None
        return self._apply([self._as_dict(message, style) for message in messages], open_turn, tools, mode)

    def _apply(
        self, messages: Sequence[Mapping[str, Any]], open_turn: bool, tools: Tools = (), mode: Mapping[str, bool] | None = None
    ) -> str:
        options = {**self.options, **(mode or {}), **({"tools": [dict(tool) for tool in tools]} if tools else {})}
        text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn, tokenize=False, **options)
        return text

    def _try_render(self, messages: Messages, style: CallStyle | None = None) -> str:
        """Return the rendered messages, or an empty text if the template rejects them, which may raise any exception."""
        style = style or (self.call_style if any(message.tool_calls for message in messages) else None)
        try:
            return self._apply([self._as_dict(message, style) for message in messages], False)
        except Exception:
            return ""

    def _as_dict(self, message: Message, style: CallStyle | None) -> dict[str, Any]:
        """Return a message in the form this template reads. Raises ConversationError for calls and reasoning that it would drop."""
        fields = message.as_dict()
        if message.images:
            self._check_images()
        elif self._wants_parts:
            fields["content"] = message.as_parts()
        if message.name and message.role not in TOOL_ROLES and message.role not in self._named_roles:
            del fields["name"]
            _warn_of_name(message.role)
        if message.tool_calls:
            if style is None:
                raise ConversationError(
                    "the chat template writes no tool calls, so a message's tool_calls would be lost; write them into its content as the "
                    "model does, or set policy.tokenizer.chat_template to a template with tools"
                )
            if style.arguments_as_text:
                for call in fields["tool_calls"]:
                    call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            if style.content_absent and not message.content:
                fields["content"] = None
        if message.reasoning:
            del fields["reasoning_content"]
            if not self._reasoning_keys:
                raise ConversationError(
                    "the chat template writes no reasoning, so a message's reasoning would be lost; write it into its content between the "
                    "model's own markers, or set policy.tokenizer.chat_template to a template that writes it"
                )
            fields |= dict.fromkeys(self._reasoning_keys, message.reasoning)
        return fields

    def _check_images(self) -> None:
        """Raise ConversationError for a message with images that the model or the template does not support."""
        if not self.reads_images:
            raise ConversationError(
                "a message has images, but the policy reads only text: leave out the records with images, or describe them in the "
                "content"
            )
        if not self.renders_images:
            raise ConversationError(
                "a message has images, which the chat template does not support; set policy.tokenizer.chat_template to one that does"
            )

    @cached_property
    def renders_images(self) -> bool:
        """Whether the template supports images in messages."""
        if self.joins_plain_text:
            return False
        text = {"type": "text", "text": _CALL_MARKER}
        with_image, without = (self._try_apply("user", parts) for parts in ([{"type": "image", "image": "x"}, text], [text]))
        return _CALL_MARKER in without and with_image != without and "'type'" not in without and _CALL_MARKER in with_image

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the template accepts contents only as lists of parts."""
        if _CALL_MARKER in self._try_apply("user", _CALL_MARKER):
            return False
        rendered = self._try_apply("user", [{"type": "text", "text": _CALL_MARKER}])
        return _CALL_MARKER in rendered and "'type'" not in rendered

    @cached_property
    def _named_roles(self) -> frozenset[str]:
        """The roles for which the template writes the names of messages."""
        return frozenset(
            role for role in ("system", "user", "assistant") if _CALL_MARKER in self._try_apply(role, "?", name=_CALL_MARKER)
        )

    def _try_apply(self, role: str, content: Any, **fields: str) -> str:
        """Return one rendered message (after a user question unless it is one itself), or an empty text if the template rejects
        it.
        """
        message = {"role": role, "content": content, **fields}
        question = {"role": "user", "content": [{"type": "text", "text": "?"}] if isinstance(content, list) else "?"}
        try:
            return self._apply([question, message] if role == "assistant" else [message], False)
        except Exception:  # a template may raise any exception
            return ""

    @cached_property
    def _reasoning_keys(self) -> tuple[str, ...]:
        """The keys under which the template reads the reasoning of a message."""
        template = str(getattr(self.tokenizer, "chat_template", ""))
        return tuple(key for key in _REASONING_KEYS if re.search(rf"\b{key}\b", template))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@cache
def _warn_of_mode(name: str, on: bool) -> None:
    option, other = (f"{name}={str(value).lower()}" for value in (on, not on))
    warnings.warn(
        f"the chat template opens a turn in a way that some replies of the data cannot follow, such as with a thought they do not have. "
        f"With {option} they can, so they are trained on after such prompts. Set policy.tokenizer.chat_template_kwargs.{option} to "
        f"sample with such prompts, too, or {other} to leave these replies out of training",
        stacklevel=2,
    )


@cache
def _warn_of_name(role: str) -> None:
    warnings.warn(
        f"the chat template does not write the names of speakers: the names of {role!r} messages are left out; write them into the "
        "content, or set policy.tokenizer.chat_template",
        stacklevel=2,
    )


def _cut_path(replies: Sequence[_Reply], rendered: str, messages: Messages) -> tuple[list[str], Messages]:
    """Cut the text of consecutive replies at the start and end of each. ``rendered``: all messages."""
    last = replies[-1]
    whole = rendered.startswith(last.text[: last.end])
    text = rendered if whole else last.text
    cuts = [cut for reply in replies for cut in (reply.start, reply.end)]
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])], messages if whole else messages[: last.index + 1]


def images_of(messages: Messages) -> list[Image]:
    """Return the images of messages, in order."""
    return [image for message in messages for image in message.images]


def _join_messages(messages: Messages) -> str:
    if images_of(messages):
        raise ConversationError(
            "a message has images, which plain text cannot contain; set policy.tokenizer.chat_template to a template with images"
        )
    return "\n".join(message.content for message in messages)


def _opening_mismatch_message(turn: int, prompt: str, rendered: str) -> str:
    common = next((index for index, (left, right) in enumerate(zip(prompt, rendered, strict=False)) if left != right), 0)
    return (
        f"the chat template opens message {turn + 1} with {prompt[common:][-40:]!r} when it is to be sampled, and renders it as "
        f"{rendered[common:][:40]!r}: the loss tokens would differ from what the policy samples there. Begin the message as the template "
        "opens it, or set policy.tokenizer.chat_template_kwargs (such as enable_thinking: false) or policy.tokenizer.chat_template; "
        "data.add_generation_prompt=false trains on the message as it is rendered, with what opens it"
    )
