"""The format for a model: the one that can parse its chat template's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from strop import plugins
from strop.tools.base import ToolCallFormat, ToolConfigError
from strop.tools.formats.deepseek import DeepSeekFormat
from strop.tools.formats.gpt_oss import GptOssFormat
from strop.tools.formats.hermes import HermesFormat
from strop.tools.formats.llama3_json import Llama3JsonFormat
from strop.tools.formats.mistral_calls import MistralFormat
from strop.tools.formats.plain_xml import XmlFormat
from strop.tools.formats.qwen_xml import QwenXmlFormat
from strop.types import ToolCall
from strop.user_code import suggest_names

FORMATS: Final[dict[str, ToolCallFormat]] = {
    each.name: each
    for each in (
        HermesFormat(),
        QwenXmlFormat(),
        XmlFormat(),
        Llama3JsonFormat(),
        MistralFormat(),
        GptOssFormat(),
        DeepSeekFormat(),
    )
}
PROBE = ToolCall("probe_tool", {"text": "two words"}, id="call00000")


def choose_format(name: str | None, write: Callable[[ToolCall], tuple[str, str] | None]) -> ToolCallFormat:
    """Return the format ``name``, or if it is None the one that parses the output of ``write``. Raises ToolConfigError.

    ``write`` renders a call with the chat template: as sampled by the policy, plus the token that ends the turn. None: no calls.
    """
    known = [*FORMATS, *plugins.declared("tool_call_formats")]
    if name is not None:
        if name not in known:
            raise ToolConfigError(f"policy.tokenizer.tool_call_format is {name!r}{suggest_names(name, known)}")
        return _load(name)
    written = write(PROBE)
    if written is not None:
        for text in (written[0], "".join(written)):  # some templates omit the end of a single call
            for each in map(_load, known):
                if [(call.name, dict(call.arguments)) for call in each.parse(text).calls] == [(PROBE.name, PROBE.arguments)]:
                    return each
    what = "writes no tool calls" if written is None else f"writes calls in an unknown form: {written[0]!r:.200}"
    raise ToolConfigError(
        f"the environment has tools, but the chat template {what}; set policy.tokenizer.tool_call_format to the form in which the model "
        f"is to write them ({', '.join(known)}), or policy.tokenizer.chat_template to a template with tools"
    )


def _load(name: str) -> ToolCallFormat:
    return FORMATS.get(name) or plugins.load("tool_call_formats", name)
