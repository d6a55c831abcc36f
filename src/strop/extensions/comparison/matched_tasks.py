"""Which tasks of two evaluations are the same, and how the two were sampled and scored differently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from strop.extensions.evaluation.statistics import NotComparable

StoredTask = Mapping[str, Any]
_Key = tuple[str, str, int]  # the set, the name, and the index among tasks of that name, because data may be repeated
SHOWN = 80
REPAIR = "compare evaluations of the same data: the same data set, split, size and seed"


class OtherTasks(NotComparable):
    """The tasks of two evaluations are not the same."""


@dataclass(frozen=True, kw_only=True)
class MatchedTask:
    """A task in two evaluations, each with its samples."""

    name: str
    set_name: str
    a: StoredTask
    b: StoredTask


@dataclass(frozen=True, kw_only=True)
class MatchedTasks:
    """The tasks common to two evaluations, and the numbers that only one of them has."""

    tasks: tuple[MatchedTask, ...]
    only_a: int
    only_b: int
    reworded: bool  # the prompts around the questions differ


def match_tasks(a: Sequence[StoredTask], b: Sequence[StoredTask]) -> MatchedTasks:
    """Match the tasks of two evaluations by set and name, and tasks of the same name in order.

    The prompts may differ in the text around every question, such as the instructions of two runs.

    Raises OtherTasks if no task is in both, or if tasks of the same name have different questions or answers.
    """
    with_sets = all(any("set" in task for task in tasks) for tasks in (a, b))  # only if both record the set of each task
    ours, theirs = (_by_name(tasks, with_sets) for tasks in (a, b))
    shared = [key for key in ours if key in theirs]
    if not shared:
        raise OtherTasks(f"no task is in both evaluations: A has {_name_some(ours)} and B has {_name_some(theirs)}; {REPAIR}")
    reworded = _check_questions({key: (ours[key], theirs[key]) for key in shared})
    tasks = tuple(MatchedTask(name=key[1], set_name=key[0] or _name_set(ours[key]), a=ours[key], b=theirs[key]) for key in shared)
    return MatchedTasks(tasks=tasks, only_a=len(ours) - len(shared), only_b=len(theirs) - len(shared), reworded=reworded)


def read_question(task: StoredTask) -> str:
    """Return the prompt of a stored task: the messages before the policy's first one."""
    sample = next((sample for sample in task["samples"] if sample.get("messages")), None)
    if sample is None:
        return ""
    messages = sample["messages"]
    if sample.get("turns"):
        count = len(messages) - sum(turn.get("path", 0) == 0 for turn in sample["turns"])
    else:
        count = next((index for index, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return "\n".join(str(message.get("content", "")) for message in messages[:count])


def _by_name(tasks: Sequence[StoredTask], with_sets: bool) -> dict[_Key, StoredTask]:
    found: dict[_Key, StoredTask] = {}
    times: Counter[tuple[str, str]] = Counter()
    for task in tasks:
        name = (str(task.get("set", "")) if with_sets else "", str(task["task"]))
        found[*name, times[name]] = task
        times[name] += 1
    return found


def _name_set(task: StoredTask) -> str:
    return str(task.get("set") or task["environment"])


def _check_questions(pairs: Mapping[_Key, tuple[StoredTask, StoredTask]]) -> bool:
    """Raise OtherTasks for different tasks of the same name. Return whether the prompts around the questions differ."""
    answers = {key: (str(a.get("answer")), str(b.get("answer"))) for key, (a, b) in pairs.items()}
    _raise_if_different(answers, "expects", "the answer")
    whole = {key: (read_question(a), read_question(b)) for key, (a, b) in pairs.items()}
    whole = {key: texts for key, texts in whole.items() if all(texts)}  # a task whose samples all failed has no prompt
    if any(a == b for a, b in whole.values()) or not whole:
        _raise_if_different(whole, "asks", "the question")
        return False
    ours, theirs = (_strip_common([texts[side] for texts in whole.values()]) for side in (0, 1))
    _raise_if_different(dict(zip(whole, zip(ours, theirs, strict=True), strict=True)), "asks", "the question")
    return True


def _strip_common(texts: Sequence[str]) -> list[str]:
    """Return the differing parts of texts, without the prompt common to all of them."""
    if len(texts) == 1:
        return list(texts)
    rest = [text[_count_common(texts) :] for text in texts]
    end = _count_common([text[::-1] for text in rest])
    return [text[: len(text) - end].strip() for text in rest]


def _count_common(texts: Sequence[str]) -> int:
    """Return the length of the common prefix of all texts."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(texts), max(texts), strict=False)))


def _raise_if_different(pairs: Mapping[_Key, tuple[str, str]], does: str, what: str) -> None:
    different = [key for key, (a, b) in pairs.items() if a != b]
    if different:
        key = different[0]
        a, b = (f"{text[:SHOWN]}..." if len(text) > SHOWN else text for text in pairs[key])
        raise OtherTasks(
            f"{len(different)} of {len(pairs)} tasks have the same name and are not the same: {what} that {key[1]!r} {does} is {a!r} in A "
            f"and {b!r} in B; {REPAIR}"
        )


def _name_some(tasks: Mapping[_Key, StoredTask]) -> str:
    names = [f"{set_name}: {name}" if set_name else name for set_name, name, _ in tasks]
    return ", ".join(map(repr, names[:2])) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


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
SHOWN_TEXT = 60


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
    return text if len(text) <= SHOWN_TEXT else f"{text[: SHOWN_TEXT - 3]}..."
