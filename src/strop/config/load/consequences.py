"""Which problems follow from others: what is computed from a wrong value is wrong too, and not the mistake."""

from __future__ import annotations

from collections.abc import Sequence

from strop.base_config import BaseConfig, KeyPath
from strop.config.source.interpolation import iter_targets
from strop.config.source.keys import find_field
from strop.config.source.nearest_keys import find_nearest_keys
from strop.config.source.yaml_source import ConfigSource, get_at
from strop.problems import Problem


def drop_consequences(problems: Sequence[Problem], source: ConfigSource, root: type[BaseConfig]) -> list[Problem]:
    """Return the problems without those of keys whose ``${...}`` refers, perhaps through others, to a key with a problem of its own, or
    to one that a problem says is misspelled."""
    wrong = {tuple(problem.key.split(".")) for problem in problems if problem.key}
    unknown = [path for path in wrong if find_field(root, path) is None and path in source.origins]
    wrong |= {tuple(meant.split(".")) for path in unknown for meant in find_nearest_keys(path, root)[:1]}
    followed = {path: _find_followed(path, source) for path in wrong}

    def is_consequence(path: KeyPath) -> bool:
        return any(
            _overlap(target, cause) and not any(_overlap(path, back) for back in followed[cause])  # a circle has no first
            for target in followed.get(path, ())
            for cause in wrong - {path}
        )

    return [problem for problem in problems if not is_consequence(tuple(problem.key.split(".")))]


def _find_followed(path: KeyPath, source: ConfigSource) -> set[KeyPath]:
    """Return the paths that a key refers to, and those that these refer to."""
    found: set[KeyPath] = set()
    todo = [path]
    while todo:
        here = todo.pop()
        value = get_at(source.values, here)
        targets = set(iter_targets(here, value)) if isinstance(value, str) else set()
        todo += targets - found
        found |= targets
    return found


def _overlap(path: KeyPath, other: KeyPath) -> bool:
    """Return whether two paths are one, or one is inside the other."""
    length = min(len(path), len(other))
    return path[:length] == other[:length]
