"""Chooses the environment that grades evaluation tasks: the configured one, or the usual one of a built-in set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from strop.data.builtin_dataset import Grader
from strop.data.data_config import DataEntryConfig
from strop.environments.environment_config import EnvironmentConfig

DEFAULT_TYPE = "math"  # default type of an environment that was not configured for the set

Entry = TypeVar("Entry", bound=DataEntryConfig)


def assign_graders(
    entries: Iterable[Entry], env: Mapping[str, EnvironmentConfig]
) -> tuple[tuple[Entry, ...], dict[str, EnvironmentConfig]]:
    """Return the entries, each entry of a built-in set with the alias of its grading environment, and ``env`` with these
    environments.

    An entry's ``env_name`` takes precedence, and so does a single environment in ``env`` unless it has the default type or the
    grader's type. Otherwise a built-in set is graded as usually reported, with its grader's options overridden by those of an
    alias of the same type.
    """
    from strop.data.builtin_sets import BUILTIN_DATASETS  # several hundred sets, of which a run rarely names one

    graded: list[Entry] = []
    known = dict(env)
    for entry in entries:
        builtin = BUILTIN_DATASETS.get(entry.dataset_name or "")
        grader = None if builtin is None else builtin.grader
        if grader is None or entry.env_name is not None or _is_chosen(env, grader):
            graded.append(entry)
            continue
        alias, section = _find_section(str(entry.dataset_name), grader, env)
        known[alias] = section
        graded.append(replace(entry, env_name=alias))
    return tuple(graded), known


def _is_chosen(env: Mapping[str, EnvironmentConfig], grader: Grader) -> bool:
    """Whether the only environment differs from the grader's and is not the default one."""
    others = (DEFAULT_TYPE, grader.environment)
    return len(env) == 1 and all(section.type_of(alias) not in others for alias, section in env.items())


def _find_section(name: str, grader: Grader, env: Mapping[str, EnvironmentConfig]) -> tuple[str, EnvironmentConfig]:
    """Return the alias and section of a set's grader: a configured one if its options match the grader's."""
    same = [(alias, section) for alias, section in env.items() if section.type_of(alias) == grader.environment]
    alias, section = same[0] if same else ("", EnvironmentConfig(type=None))
    options = {**grader.options, **section.options}
    if same and options == section.options:
        return alias, section
    free = name if name not in env else f"{name}_as_reported"
    return free, EnvironmentConfig(type=grader.environment, options=options)
