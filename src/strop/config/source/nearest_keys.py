"""Suggests the key that an unknown one probably means: the same name in another section, or a similar spelling. A hint at an
unrelated key is worse than none.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import lru_cache

from strop.base_config import BaseConfig, fields_of
from strop.config.source.keys import iter_keys

CLOSE_WORD = 0.75  # ratio of two words of which one is a misspelling of the other: one letter in four
MOST_PLACES = 3  # a name in more sections, such as enabled, is ambiguous
MOST_LISTED = 12  # keys of a section in a message
SYNONYMS = {"learning_rate": "lr", "lora": "lora_cfg", "peft": "lora_cfg", "num_train_epochs": "max_num_epochs"}


def suggest_keys(path: Sequence[str], root: type[BaseConfig]) -> str:
    """Suggest the meaning of an unknown key, or list the keys of its section."""
    nearest = find_nearest_keys(path, root)
    return f"Did you mean {' or '.join(nearest)}?" if nearest else _list_section(path[:-1], root)


def find_nearest_keys(path: Sequence[str], root: type[BaseConfig]) -> tuple[str, ...]:
    """Return dotted keys that may be meant, best first; empty if no name is close enough."""
    return _find_nearest_keys(tuple(path), root)  # type: ignore[arg-type]  # mypy: as if a section were hashed


@lru_cache(maxsize=4096)  # one message calls it several times
def _find_nearest_keys(path: tuple[str, ...], root: type[BaseConfig]) -> tuple[str, ...]:
    section, name = ".".join(part for part in path[:-1] if not part.isdigit()), path[-1]
    target = f"{section}.{name}" if section else name
    keys = _list_candidates(root, target)
    siblings = [key for key in keys if key.rpartition(".")[0] == section]
    wanted = SYNONYMS.get(name, name)
    same_name = [
        key for key in keys if _name(key) == wanted and ("." in key or len(path) == 2)
    ]  # a section by its name, if indented
    same_name.sort(key=lambda key: -_similarity(key, target))
    if wanted != name:
        return tuple(same_name[:1])
    if misspelled := [key for key in siblings if is_misspelling(name, _name(key))]:
        return (max(misspelled, key=lambda key: _similarity(key, target)),)
    around, _, last = section.rpartition(".")
    if joined := [key for key in keys if is_misspelling(f"{around}.{last}_{name}".lstrip("."), key)]:
        return (joined[0],)  # wandb.enable of wandb_enabled
    if same_name:
        same_name = same_name if section else sorted(same_name, key=lambda key: key.count("."))
        return tuple(same_name[:2]) if len(same_name) <= MOST_PLACES or not section else ()
    if shortened := [key for key in siblings if _is_shortened(name, _name(key))]:
        return (min(shortened, key=len),)
    elsewhere = [key for key in keys if "_" in name and is_misspelling(name, _name(key))]
    return tuple(sorted(elsewhere, key=lambda key: -_similarity(key, target))[:2]) if len(elsewhere) <= MOST_PLACES else ()


def is_misspelling(name: str, other: str) -> bool:
    """Return whether two names differ only slightly: in letter case, underscores, and small misspellings of at most two words."""
    if name.replace("_", "").casefold() == other.replace("_", "").casefold():
        return True
    words, others = name.casefold().split("_"), other.casefold().split("_")
    if len(words) != len(others):
        return False
    pairs = list(zip(words, others, strict=True))
    return sum(word != near for word, near in pairs) <= 2 and all(_is_close(word, near) for word, near in pairs)


def _is_shortened(name: str, other: str) -> bool:
    """Return whether a name omits the end of another, or words of it: num_generations of num_generations_per_prompt."""
    words, others = name.split("_"), other.split("_")
    if len(words) > 1 and len(words) < len(others):
        leading = all(_is_close(word, near) for word, near in zip(words, others, strict=False))
        return leading or all(any(near.startswith(word) for near in others) for word in words)  # max_step of max_num_steps
    return len(name) > 3 and other.startswith(name)


def _is_close(word: str, other: str) -> bool:
    swapped = sorted(word) == sorted(other)  # two swapped letters change short words a lot
    return word == other or (len(word) > 2 and (swapped or _similarity(word, other) >= CLOSE_WORD))


def _list_candidates(root: type[BaseConfig], target: str) -> list[str]:
    """Return all keys and sections, except those that contain the target."""
    return [key for key in _list_keys(root) if not f"{target}.".startswith(f"{key}.")]  # type: ignore[arg-type]


@lru_cache
def _list_keys(root: type[BaseConfig]) -> tuple[str, ...]:
    keys = [key.dotted for key in iter_keys(root, repeated=True)]
    sections = sorted({key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)} - set(keys))
    return (*keys, *sections)


def _list_section(section: Sequence[str], root: type[BaseConfig]) -> str:
    dotted = ".".join(part for part in section if not part.isdigit())
    names = [key[len(dotted) + 1 :] for key in _list_candidates(root, "") if key.rpartition(".")[0] == dotted] if dotted else []
    if not names:
        sections = [name for name in fields_of(root) if name != "run_name"]
        return f"The sections are {', '.join(sections)}. `strop config` lists every key."
    more = f" and {len(names) - MOST_LISTED} more, which `strop config` lists" if len(names) > MOST_LISTED else ""
    return f"The keys of {dotted} are {', '.join(names[:MOST_LISTED])}{more}."


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _similarity(text: str, other: str) -> float:
    return difflib.SequenceMatcher(None, text, other).ratio()
