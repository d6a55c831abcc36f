"""What two evaluations were made with differently: how their samples were drawn and scored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Identity = Mapping[str, Any]  # "settings" of all sets, and those of each of the "sets" by its name, as an evaluation stores them

SAMPLED = ("tokenizer", "hf_config_overrides", "engine", "precision", "vllm_kwargs", "rules", "gateway")
SAMPLED_IN_SET = (  # and env.ALIAS
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
    """A setting that two evaluations do not share."""

    key: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shorten(self.a)} in A, {_shorten(self.b)} in B"


def list_setting_differences(a: Identity, b: Identity) -> list[SettingDifference]:
    """Return how two evaluations were sampled and scored differently. Models, seeds and numbers of samples may differ, and data is matched
    task by task."""
    found = list(_compare(_pick(a["settings"]), _pick(b["settings"])))
    pairs = [(f"{name}: ", ours, b["sets"][name]) for name, ours in a["sets"].items() if name in b["sets"]]
    if not pairs and len(a["sets"]) == len(b["sets"]) == 1:
        pairs = [("", *a["sets"].values(), *b["sets"].values())]
    for where, ours, theirs in pairs:
        found += _compare(_pick_of_set(ours), _pick_of_set(theirs), where if len(pairs) > 1 else "")
    return found


def _pick(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in SAMPLED}


def _pick_of_set(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in SAMPLED_IN_SET or key.startswith("env.")}


def _compare(a: Mapping[str, Any], b: Mapping[str, Any], where: str = "") -> Iterator[SettingDifference]:
    ours, theirs = dict(_flatten(a)), dict(_flatten(b))
    for key in dict.fromkeys((*ours, *theirs)):
        if key not in OF_THE_MODEL and ours.get(key) != theirs.get(key):
            yield SettingDifference(f"{where}{KEYS.get(key, key)}", ours.get(key), theirs.get(key))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shorten(value: Any) -> str:
    text = "null" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
