"""Sets of recorded answers and preferences. Their layout is detected from their columns (``layouts``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from strop.data.builtin_dataset import BuiltinDataset, Splits
from strop.data.sources.records import DataError, Record, get_text

TREE_SYSTEM_PROMPT = (  # system prompt of Open Assistant's conversations, as in NeMo-RL
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.\n\n"
)
TREE_ROLES = {"prompter": "user", "assistant": "assistant"}
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def read_preferred_response(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """HelpSteer3's preference as a response: the better one, or the first for a tie."""
    first, second, preference = (record.get(key) for key in ("response1", "response2", "overall_preference"))
    if not isinstance(preference, int | float):
        raise DataError(f"{where}: 'overall_preference' is {preference!r:.80}, not a number from -3 to 3. Fix the record")
    return {"response": second if preference > 0 else first}


def read_dialogues(record: Record, where: str, folder: str | None) -> Mapping[str, Any]:
    """hh-rlhf's texts, "\\n\\nHuman: ...\\n\\nAssistant: ...", as messages."""
    return {
        key: _split_dialogue(get_text(record, key, f"{key}_key", where), f"{where}: {key!r}") for key in ("chosen", "rejected")
    }


def _split_dialogue(text: str, where: str) -> list[dict[str, str]]:
    before, *parts = TURN.split(text)
    if before.strip() or not parts:
        raise DataError(f"{where} is {text!r:.80}, which does not begin with a turn, Human: or Assistant:. Fix the record")
    turns = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": SPEAKERS[speaker], "content": content.strip()} for speaker, content in turns]


def cut_tree(record: Record, where: str) -> Iterator[Record]:
    """Yield the conversation from the root of a reply tree to each of its leaves, except prompts without a reply."""
    branches: list[tuple[Any, tuple[dict[str, str], ...]]] = [(record.get("prompt", record), ())]
    while branches:
        node, before = branches.pop()
        messages = (*before, _tree_message(node, where))
        if replies := node.get("replies"):
            branches += [(reply, messages) for reply in reversed(replies)]
        elif len(messages) > 1:
            yield {"messages": [{"role": "system", "content": TREE_SYSTEM_PROMPT}, *messages]}


def _tree_message(node: Any, where: str) -> dict[str, str]:
    if not isinstance(node, Mapping) or node.get("role") not in TREE_ROLES:
        raise DataError(f"{where} is no tree of messages by a prompter and an assistant: {node!r:.80}. Fix the record")
    return {"role": TREE_ROLES[node["role"]], "content": get_text(node, "text", "messages_key", where)}


ULTRAFEEDBACK = BuiltinDataset(
    "HuggingFaceH4/ultrafeedback_binarized",
    Splits("train_prefs", validation="test_prefs"),
    revision="3949bf5f8c17c394422ccfab0c31ea9c20bdeb85",
)
NEMOTRON_SPLITS = Splits("chat+code+math+stem")

CONVERSATION_SETS: Mapping[str, BuiltinDataset] = {
    "squad": BuiltinDataset(
        "rajpurkar/squad",
        Splits("train", validation="validation"),
        input_key="question",
        output_key="answers.text.0",
        revision="7b6d24c440a36b6815f21b70d25016731768db1f",
    ),
    "tulu3_sft_mixture": BuiltinDataset("allenai/tulu-3-sft-mixture"),
    "open_assistant": BuiltinDataset(
        "hf://datasets/OpenAssistant/oasst1/2023-04-12_oasst_all.trees.jsonl.gz",
        revision="fdf72ae0827c1cda404aff25b6603abec9e3399b",
        split_row=cut_tree,
    ),
    "Nemotron-Cascade-2-SFT-Math": BuiltinDataset("nvidia/Nemotron-Cascade-2-SFT-Data", subset="math"),
    "Nemotron-Post-Training-Dataset-v1": BuiltinDataset("nvidia/Nemotron-Post-Training-Dataset-v1", NEMOTRON_SPLITS),
    "Nemotron-Post-Training-Dataset-v2": BuiltinDataset("nvidia/Nemotron-Post-Training-Dataset-v2", NEMOTRON_SPLITS),
    "Llama-Nemotron-Post-Training-Dataset": BuiltinDataset(
        "nvidia/Llama-Nemotron-Post-Training-Dataset",
        Splits("chat+code+math+science+safety"),
        input_key="input",
        output_key="output",
        subset="SFT",
        system_key="system_prompt",
    ),
    "ultrachat_200k": BuiltinDataset(
        "HuggingFaceH4/ultrachat_200k",
        Splits("train_sft", validation="test_sft"),
        revision="8049631c405ae6576f93f445c6b8166f76f5505a",
    ),
    "Capybara": BuiltinDataset("trl-lib/Capybara", Splits("train", validation="test")),
    "smoltalk": BuiltinDataset("HuggingFaceTB/smoltalk", Splits("train", validation="test"), subset="all"),
    "tldr": BuiltinDataset("trl-lib/tldr", Splits("train", "validation", "test"), input_key="prompt", output_key="completion"),
}

PREFERENCE_SETS: Mapping[str, BuiltinDataset] = {
    "HelpSteer3": BuiltinDataset(
        "nvidia/HelpSteer3",
        Splits("train", validation="validation"),
        input_key="context",
        output_key="response",  # the preferred answer, for supervised training
        subset="preference",
        read_row=read_preferred_response,
    ),
    "Tulu3Preference": BuiltinDataset("allenai/llama-3.1-tulu-3-8b-preference-mixture"),
    "UltraFeedback": ULTRAFEEDBACK,
    "HuggingFaceH4/ultrafeedback_binarized": ULTRAFEEDBACK,
    "trl-lib/ultrafeedback_binarized": BuiltinDataset("trl-lib/ultrafeedback_binarized", Splits("train", validation="test")),
    "hh-rlhf": BuiltinDataset(
        "Anthropic/hh-rlhf",
        Splits("train", validation="test"),
        revision="09be8c5bbc57cb3887f3a9732ad6aa7ec602a1fa",
        read_row=read_dialogues,
    ),
    "Skywork-Reward-Preference-80K-v0.2": BuiltinDataset("Skywork/Skywork-Reward-Preference-80K-v0.2"),
}

RECORDED_SETS: Mapping[str, BuiltinDataset] = {**CONVERSATION_SETS, **PREFERENCE_SETS}
