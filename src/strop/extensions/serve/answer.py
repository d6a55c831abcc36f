"""Chat completions and completions in the format of OpenAI's API: whole, or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from strop.extensions.serve.chat_message import format_calls, format_reply
from strop.extensions.serve.completion_request import CompletionRequest
from strop.extensions.serve.streamed_text import cut_at_stop
from strop.generation.base import Completion
from strop.tools.base import ParsedReply


class Answer:
    """Formats the answer to one request."""

    def __init__(self, asked: CompletionRequest, *, model: str, tokenizer: Any) -> None:
        self.asked, self.tokenizer = asked, tokenizer
        self.count = len(asked.prompts) * asked.choices
        self.kind = "chat.completion" if asked.is_chat else "text_completion"
        prefix = "chatcmpl" if asked.is_chat else "cmpl"
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def format_whole(self, completions: Sequence[Completion], replies: Sequence[ParsedReply] = ()) -> dict[str, Any]:
        """Return the whole answer. ``replies`` are the parsed completions, if they were parsed."""
        read = replies or [ParsedReply(cut_at_stop(completion.text, self.asked.stop)) for completion in completions]
        choices = [self._format_choice(index, *each) for index, each in enumerate(zip(completions, read, strict=True))]
        return {**self.head, "object": self.kind, "choices": choices, "usage": self.count_tokens(completions)}

    def format_role(self, index: int) -> dict[str, Any]:
        return self._chunk_of(index, {"delta": {"role": "assistant", "content": ""}})

    def format_part(self, index: int, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        content = {"delta": {"content": text}} if self.asked.is_chat else {"text": text}
        return self._chunk_of(index, content, logprobs=self.format_logprobs(tokens, logprobs))

    def format_parts(self, index: int, completion: Completion, reply: ParsedReply) -> list[dict[str, Any]]:
        """Return the chunks of a finished completion."""
        tokens, logprobs = completion.tokens.tolist(), completion.logprobs.tolist()
        parts = [self.format_part(index, reply.content, tokens, logprobs)] if reply.content or self.asked.logprobs else []
        if self.asked.is_chat:
            reasoning = [self._chunk_of(index, {"delta": {"reasoning_content": reply.reasoning}})] if reply.reasoning else []
            calls = [{"index": number, **call} for number, call in enumerate(format_calls(reply.calls))]
            asked = [self._chunk_of(index, {"delta": {"tool_calls": calls}})] if calls else []
            parts = [self.format_role(index), *reasoning, *parts, *asked]
        return [*parts, self.format_end(index, completion, reply)]

    def format_end(self, index: int, completion: Completion, reply: ParsedReply | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.asked.is_chat else {"text": ""}
        return self._chunk_of(index, content, finish_reason=finish_reason(completion, reply))

    def format_usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self.count_tokens(completions)}

    def _chunk_of(self, index: int, content: dict[str, Any], **fields: Any) -> dict[str, Any]:
        return self._chunk([{"index": index, **content, **{"logprobs": None, "finish_reason": None, **fields}}])

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": "chat.completion.chunk" if self.asked.is_chat else self.kind, "choices": choices}

    def _format_choice(self, index: int, completion: Completion, reply: ParsedReply) -> dict[str, Any]:
        content: dict[str, Any] = {"message": format_reply(reply)} if self.asked.is_chat else {"text": reply.content}
        logprobs = self.format_logprobs(completion.tokens.tolist(), completion.logprobs.tolist())
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason(completion, reply)}

    def format_logprobs(self, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not self.asked.logprobs:
            return None
        texts = [self.tokenizer.decode([token]) for token in tokens]
        if not self.asked.is_chat:
            return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": []}
        pairs = zip(texts, logprobs, strict=True)
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []} for text, value in pairs
            ]
        }

    def count_tokens(self, completions: Sequence[Completion]) -> dict[str, int]:
        prompt, sampled = sum(map(len, self.asked.prompts)), sum(len(completion.tokens) for completion in completions)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_reason(completion: Completion, reply: ParsedReply | None = None) -> str:
    if reply is not None and reply.calls:
        return "tool_calls"
    return "stop" if completion.stopped else "length"
