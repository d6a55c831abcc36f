"""Keys of earlier versions. A removed key is refused for one version with a replacement; then its row is deleted too."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from strop.config.source.yaml_source import ConfigSource, delete_key, get_at
from strop.problems import Problem


@dataclass(frozen=True)
class RemovedKey:
    pattern: str  # of dotted keys, as in ``fnmatch``
    default: Any  # the value of a run that did not set it, which has no effect
    instead: str


_REPLAY = (
    "Remove it: asynchronous runs no longer repeat bit by bit. Train synchronously for a run that does; `strop replay` recomputes a step "
    "of any run from its stored rollouts."
)

REMOVED_KEYS = (
    RemovedKey("*.async_*.repeatable", False, _REPLAY),
    RemovedKey("*.async_*.answer_delay", 0, _REPLAY),
    RemovedKey("*.async_*.record_events", False, _REPLAY),
    RemovedKey("*.async_*.replay_events", None, _REPLAY),
)


def drop_removed_keys(source: ConfigSource) -> tuple[ConfigSource, list[Problem]]:
    """Return the source without removed keys, and a problem for each that has an effect."""
    problems = []
    for path in list(source.origins):
        removed = next((each for each in REMOVED_KEYS if fnmatchcase(".".join(path), each.pattern)), None)
        if removed is None:
            continue
        if (value := get_at(source.values, path)) != removed.default:
            message = f"found {value!r}, and this key is gone"
            problems.append(Problem(".".join(path), message, removed.instead, source.origins[path]))
        _, source = delete_key(source, path, source.origins[path])
    return source, problems
