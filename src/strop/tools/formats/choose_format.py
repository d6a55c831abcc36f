"""The format for a model: the one that can parse its chat template's calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

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
    if name is not None:
        if name not in FORMATS:
            raise ToolConfigError(f"policy.tokenizer.tool_call_format is {name!r}{suggest_names(name, FORMATS)}")
        return FORMATS[name]
    written = write(PROBE)
    if written is not None:
        for text in (written[0], "".join(written)):  # some templates omit the end of a single call
            for each in FORMATS.values():
                if [(call.name, dict(call.arguments)) for call in each.parse(text).calls] == [(PROBE.name, PROBE.arguments)]:
                    return each
    what = "writes no calls of tools" if written is None else f"writes calls in an unknown form: {written[0]!r:.200}"
    raise ToolConfigError(
        f"the environment has tools, but the chat template {what}; set policy.tokenizer.tool_call_format to the form that the model "
        f"should write ({', '.join(FORMATS)}), or policy.tokenizer.chat_template to a template with tools"
    )
