"""Which environment grades the tasks of an evaluation: the configured one, or that of a built-in set as it is usually reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from strop.data.builtin.builtin_dataset import Grader
from strop.data.data_config import DataEntryConfig
from strop.environments.environment_config import EnvironmentConfig

DEFAULT_TYPE = "math"  # of the environment that a configuration names without having the set in mind

Entry = TypeVar("Entry", bound=DataEntryConfig)


def assign_graders(
    entries: Iterable[Entry], env: Mapping[str, EnvironmentConfig]
) -> tuple[tuple[Entry, ...], dict[str, EnvironmentConfig]]:
    """Return the entries, each of a built-in set with the alias of the environment that grades it, and ``env`` with these environments.

    ``env_name`` of an entry holds, and so does the only environment of ``env`` unless it is of the default type or of the grader's. Else a
    built-in set is graded as it is usually reported, with the options of an alias of the same type laid over those of its grader.
    """
    from strop.data.builtin.all_sets import BUILTIN_DATASETS  # some hundred sets, of which a run seldom names one

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
    """Whether the only environment is another one than the grader's, and not one that is named by default."""
    others = (DEFAULT_TYPE, grader.environment)
    return len(env) == 1 and all(section.type_of(alias) not in others for alias, section in env.items())


def _find_section(name: str, grader: Grader, env: Mapping[str, EnvironmentConfig]) -> tuple[str, EnvironmentConfig]:
    """Return the alias and the section of a set's grader: a configured one if its options are those of the grader, too."""
    same = [(alias, section) for alias, section in env.items() if section.type_of(alias) == grader.environment]
    alias, section = same[0] if same else ("", EnvironmentConfig(type=None))
    options = {**grader.options, **section.options}
    if same and options == section.options:
        return alias, section
    free = name if name not in env else f"{name}_as_reported"
    return free, EnvironmentConfig(type=grader.environment, options=options)
