"""NeMo-RL's names of data sets that are formats of files, or that Strop does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetFormat:
    """How rows at ``data_path`` are read: key of NeMo-RL -> Strop's key, and its default."""

    keys: Mapping[str, tuple[str, str | None]]


RESPONSES = DatasetFormat(
    {
        "input_key": ("input_key", "input"),
        "output_key": ("output_key", "output"),
        "messages_key": ("messages_key", "messages"),  # read in place of the two where the data has it
    }
)
CONVERSATIONS = DatasetFormat({"chat_key": ("messages_key", "messages"), "system_key": ("system_key", None)})
DATASET_FORMATS: Mapping[str, DatasetFormat] = {
    "ResponseDataset": RESPONSES,
    "openai_format": CONVERSATIONS,
    "OpenAIFormatDataset": CONVERSATIONS,
    "NemoGymDataset": DatasetFormat({}),  # whole rows, for the servers of NeMo-Gym
    "PreferenceDataset": DatasetFormat({}),  # context and completions with ranks
    "BinaryPreferenceDataset": DatasetFormat(
        {
            "prompt_key": ("input_key", "prompt"),
            "chosen_key": ("chosen_key", "chosen"),
            "rejected_key": ("rejected_key", "rejected"),
        }
    ),
}

# Refused with everything else of models that see and hear.
MEDIA_DATASETS = frozenset(
    {
        *("audiomcq", "avqa", "clevr-cogent", "daily-omni", "geometry3k", "mmpr-tiny", "intent-train", "intent-bench", "refcoco"),
        *("mmau", "TwinkStart/MMAU", "general-conversation-jsonl"),
    }
)

MISSING_DATASETS = {
    "arrow_text": "raw text without a prompt is not trained on in this version",
    "open_assistant": "its trees of messages are not cut into conversations here",
    "NuminaMath-1.5": "its rows without an answer that can be checked are not left out here",
}
