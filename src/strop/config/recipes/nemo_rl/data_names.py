"""NeMo-RL's names of data sets that are formats of files, options of its built-in sets, and sets that Strop does not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DatasetFormat:
    """How rows at a path are read: key of NeMo-RL -> Strop's key, and its default."""

    keys: Mapping[str, tuple[str, str | None]]
    path_key: str = "data_path"


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
    "general-conversation-jsonl": DatasetFormat({}),  # from and value, with places for images
    "NemoGymDataset": DatasetFormat({}),  # whole rows, for the servers of NeMo-Gym
    "PreferenceDataset": DatasetFormat({}),  # context and completions with ranks
    "BinaryPreferenceDataset": DatasetFormat(
        {
            "prompt_key": ("input_key", "prompt"),
            "chosen_key": ("chosen_key", "chosen"),
            "rejected_key": ("rejected_key", "rejected"),
        }
    ),
    "arrow_text": DatasetFormat(
        {"text_key": ("text_key", "text"), "characters_per_sample": ("characters_per_sample", None)}, path_key="data_files"
    ),
}

# Options of built-in sets that Strop's entries have fixed: name -> option -> the value that they have.
FIXED_OPTIONS: Mapping[str, Mapping[str, bool]] = {
    "gsm8k": {"extract_answer": True},
    "GSM8K": {"extract_answer": True},
    "NuminaMath-1.5": {"verifiable_only": True, "require_valid": True},
}
