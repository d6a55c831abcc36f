"""Differences in how the samples of two evaluations were drawn and scored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import Any

Identity = Mapping[str, Any]  # common "settings", and those of each of the "sets" by name, as stored by an evaluation

SAMPLED = ("tokenizer", "hf_config_overrides", "engine", "precision", "vllm_kwargs", "rules", "gateway.sampling")
SAMPLED_IN_SET = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
    "stop_token_ids",
    "stop_strings",
    "prompt",
    "system prompt",
    "shuffle_choices",
    "env",
)
KEYS = {  # as users set them
    "rules.max_turns": "max_rollout_turns",
    "rules.max_length": "max_total_sequence_length",
    "rules.max_prompt_length": "data.max_input_seq_length",
    "rules.tool_call_format": "tokenizer.tool_call_format",
    "rules.penalties": "reward_penalties",
    "prompt": "data.prompt_file",
    "system prompt": "data.system_prompt",
}
OF_THE_MODEL = ("tokenizer.name",)
SHOWN = 60


@dataclass(frozen=True)
class SettingDifference:
    """A setting that differs between two evaluations."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shorten(self.a)} in A, {_shorten(self.b)} in B"


def list_setting_differences(a: Identity, b: Identity) -> list[SettingDifference]:
    """Return the differences in how two evaluations were sampled and scored. Models, seeds and numbers of samples may differ, and
    data is matched task by task.
    """
    found = list(_compare(_pick(a["settings"], SAMPLED), _pick(b["settings"], SAMPLED)))
    pairs = [(f"{name}: ", ours, b["sets"][name]) for name, ours in a["sets"].items() if name in b["sets"]]
    if not pairs and len(a["sets"]) == len(b["sets"]) == 1:
        pairs = [("", *a["sets"].values(), *b["sets"].values())]
    for where, ours, theirs in pairs:
        pick = partial(_pick, wanted=SAMPLED_IN_SET)
        found += _compare(pick(ours), pick(theirs), where if len(pairs) > 1 else "")
    return found


def _pick(settings: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return the settings with these names or prefixes, without those of the model."""
    flat = dict(_flatten(settings))
    return {
        key: value
        for key, value in flat.items()
        if key not in OF_THE_MODEL and any(key == name or key.startswith(f"{name}.") for name in wanted)
    }


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> Iterator[SettingDifference]:
    for key in dict.fromkeys((*a, *b)):
        if _file_name(a.get(key)) != _file_name(b.get(key)):
            yield SettingDifference(f"{where}{KEYS.get(key, key)}", a.get(key), b.get(key))


def _file_name(value: Any) -> Any:
    """Return FILE.py:NAME without the folder, because code is compared by its text."""
    return PurePath(value).name if isinstance(value, str) and ".py:" in value else value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shorten(value: Any) -> str:
    text = "null" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
