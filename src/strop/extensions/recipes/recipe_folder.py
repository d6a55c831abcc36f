"""The outcome of each recipe in a folder: it passes the dry run, is translated, or is refused, with reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from strop.config import EvalRunConfig
from strop.extensions.recipes.difference import Difference
from strop.extensions.recipes.recipe_format import DEFAULT, list_formats
from strop.extensions.recipes.translated_recipe import NotARun, TranslatedRecipe, translate_recipe
from strop.packages import assume_packages
from strop.problems import ConfigError, Problem
from strop.runs.dry_run.assumed_cluster import describe_assumed
from strop.runs.dry_run.examine import examine
from strop.runs.dry_run.examined_data import examine_data

TORCH_LEARNER = "policy.backend=torch"  # override that makes a Megatron Core recipe use the torch learner


class Outcome(StrEnum):
    """The outcome of a file."""

    PASSES = "pass the dry run, with the same meaning"
    TRANSLATED = "pass the dry run, with differences in meaning"
    WITH_TORCH = f"need Megatron Core, and pass the dry run with {TORCH_LEARNER}"
    REFUSED = "are refused"
    NO_RUN = "configure no run"


@dataclass(frozen=True)
class ExaminedRecipe:
    """A file of a folder and its outcome."""

    path: Path
    outcome: Outcome
    kind: str | None = None  # of run
    problems: tuple[Problem, ...] = ()
    differences: tuple[Difference, ...] = ()


def examine_folder(folder: Path, overrides: Sequence[str] = (), library: str = "auto") -> Iterator[ExaminedRecipe]:
    """Yield the outcome of each YAML file below a folder, read as a recipe of ``library`` if given."""
    suffixes = list_formats()[DEFAULT if library == "auto" else library].suffixes
    for path in sorted(path for suffix in suffixes for path in folder.rglob(f"*{suffix}")):
        yield examine_recipe(path, overrides, library)


def examine_recipe(path: Path, overrides: Sequence[str] = (), library: str = "auto") -> ExaminedRecipe:
    """Translate a recipe and try it on the machines that it requests; one refused for Megatron Core is also tried with the torch
    learner.
    """
    try:
        translated = _try(path, overrides, library)
    except NotARun as error:
        return ExaminedRecipe(path, Outcome.NO_RUN, problems=error.problems)
    except ConfigError as error:
        refused = ExaminedRecipe(path, Outcome.REFUSED, problems=error.problems)
    else:
        outcome = Outcome.TRANSLATED if translated.changes_meaning else Outcome.PASSES
        return ExaminedRecipe(path, outcome, translated.kind, differences=translated.differences)
    if not _needs_megatron(refused) or TORCH_LEARNER in overrides:
        return refused
    try:
        translated = _try(path, [*overrides, TORCH_LEARNER], library)
    except ConfigError as error:
        return ExaminedRecipe(path, Outcome.REFUSED, problems=error.problems)
    return ExaminedRecipe(path, Outcome.WITH_TORCH, translated.kind, refused.problems, translated.differences)


def _needs_megatron(recipe: ExaminedRecipe) -> bool:
    return any(problem.key.endswith("megatron_cfg.enabled") or TORCH_LEARNER in problem.fix for problem in recipe.problems)


@assume_packages()
def _try(path: Path, overrides: Sequence[str], library: str) -> TranslatedRecipe:
    """Run a dry run's checks except those for models and data, which a recipe names on its author's machine."""
    translated = translate_recipe(path, overrides, library)
    config = translated.loaded.config
    problems = list(examine_data(config, entries=()).problems)
    try:
        examine(config, data=False)
        if not isinstance(config, EvalRunConfig):
            list(describe_assumed(config))
    except ConfigError as error:
        problems += [problem for problem in error.problems if not problem.key.endswith("model_name")]
    except ValueError as error:
        problems.append(Problem("", str(error)))
    if problems:
        raise ConfigError(problems)
    return translated


@dataclass(frozen=True)
class Reason:
    """A reason for which recipes are refused."""

    text: str
    keys: tuple[str, ...]  # keys that cause it, the most frequent first
    recipes: int
    alone: int  # number of recipes without any other reason


def count_reasons(recipes: Sequence[ExaminedRecipe]) -> list[Reason]:
    """Return the reasons of refused recipes, the most frequent first."""
    of_recipe = [
        {_name_reason(problem): problem.key for problem in recipe.problems}
        for recipe in recipes
        if recipe.outcome is Outcome.REFUSED
    ]
    counts = Counter(reason for reasons in of_recipe for reason in reasons)
    alone = Counter(next(iter(reasons)) for reasons in of_recipe if len(reasons) == 1)
    keys = {reason: Counter(found[reason] for found in of_recipe if reason in found) for reason in counts}
    return [
        Reason(reason, tuple(key for key, _ in keys[reason].most_common()), count, alone[reason])
        for reason, count in counts.most_common()
    ]


def _name_reason(problem: Problem) -> str:
    """Return a problem's message without a recipe's specific values."""
    message = problem.message.splitlines()[0]
    reason = re.sub(r"^found .*?(?:, but |; (?=it must be))", "", message, flags=re.DOTALL)
    if reason == "there is no such key" or not problem.key:
        return f"{problem.key}: {reason}" if problem.key else re.sub(r"\d+", "N", reason)
    return re.sub(r"(?<![\w.])-?\d+(?![\w.])", "N", reason)
