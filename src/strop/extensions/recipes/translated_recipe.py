"""Recipes of another library as configurations of Strop: one, or the outcome of each in a folder."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from strop.config.load.load import LoadedConfig, load_source
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig
from strop.config.source import yaml_text
from strop.extensions.recipes.library_recipe import DEFAULT, ReadRecipe, RecipeFormat, find_format, list_formats
from strop.extensions.recipes.rules import Difference, Effect
from strop.packages import assume_packages
from strop.problems import ConfigError, Problem
from strop.runs.dry_run.assumed_cluster import describe_assumed
from strop.runs.dry_run.examine import examine
from strop.runs.dry_run.examined_data import examine_data

LONGEST_LINE = 130
NO_RUN = "the file configures no run: it has none of the sections grpo, ppo, distillation, sft, dpo, rm and eval"


class NotARun(ConfigError):
    """A YAML file that does not configure a run."""


@dataclass(frozen=True)
class TranslatedRecipe:
    """The result of translating a recipe."""

    kind: str  # kind of run: grpo, sft, ..., eval
    loaded: LoadedConfig[Any]
    differences: tuple[Difference, ...]

    @property
    def changes_meaning(self) -> bool:
        return any(difference.effect is Effect.CHANGED for difference in self.differences)


@assume_packages()
def translate_recipe(
    path: Path, overrides: Sequence[str] = (), library: str = "auto", *, gpus: int | None = None
) -> TranslatedRecipe:
    """Read a recipe of a library, with overrides in Strop's keys. Raises ConfigError with every reason why it cannot run.

    ``gpus``: number of GPUs, for libraries where it is set by the start command.
    """
    recipe_format = find_format(path) if library == "auto" else list_formats()[library]
    read = _read(path, recipe_format, gpus)
    if read.kind is None:
        raise NotARun([Problem("", NO_RUN, "Name the configuration of a run.")])
    refused = [difference.to_problem() for difference in read.differences if difference.effect is Effect.REFUSED]
    try:
        loaded = load_source(read.source, overrides, root=TRAINING_RUNS.get(read.kind, EvalRunConfig))
    except ConfigError as error:
        of_another = recipe_format.name != DEFAULT
        problems = [problem for problem in error.problems if not (of_another and _is_missing_here(problem))]
        if refused or problems:
            raise ConfigError([*refused, *problems]) from error
        loaded = load_source(read.source, overrides, root=TRAINING_RUNS[read.kind], check=False)
    if refused:
        raise ConfigError(refused)
    return TranslatedRecipe(read.kind, loaded, (*read.differences, *loaded.differences))


def _read(path: Path, recipe_format: RecipeFormat, gpus: int | None) -> ReadRecipe:
    if gpus is None:
        return recipe_format.read(path)
    if recipe_format.read_for is None:
        message = f"a recipe of {recipe_format.name} says itself how many GPUs it is for"
        raise ConfigError([Problem("--gpus", message, "Set cluster.gpus_per_node and cluster.num_nodes.")])
    return recipe_format.read_for(path, gpus)


def _is_missing_here(problem: Problem) -> bool:
    """Return whether data is missing on this machine, where the run need not be started."""
    return problem.key.startswith("data.") and problem.message.startswith("there is no file")


def render_recipe(translated: TranslatedRecipe, made_by: str) -> str:
    """Return YAML in Strop's keys that loads to the same configuration without differences, with each difference as a comment."""
    start = f"start it with: strop {translated.kind} --config FILE"
    comments = [f"made by: {made_by}", start, *_describe_differences(translated.differences)]
    lines = [line for comment in comments for line in _wrap(comment)]
    return "\n".join(lines) + "\n" + yaml_text.dump(translated.loaded.source.values)


def _describe_differences(differences: Sequence[Difference]) -> Iterator[str]:
    for effect, heading in ((Effect.CHANGED, "differs in meaning"), (Effect.RENAMED, "says the same in another key")):
        for difference in differences:
            if difference.effect is effect:
                yield f"{heading}: {difference.key}: {difference.text}"
    reasons: dict[str, list[str]] = {}
    for difference in differences:
        if difference.effect is Effect.UNUSED:
            reasons.setdefault(difference.text, []).append(difference.key)
    for reason, keys in reasons.items():
        section = reason.removesuffix(" is switched off")
        if all(key.startswith(f"{section}.") for key in keys):  # it has many keys, which add no information
            keys, reason = [section], "it is switched off"
        yield f"left out: {', '.join(keys)}: {reason}"


def _wrap(comment: str) -> list[str]:
    text = " ".join(comment.split())
    return textwrap.wrap(text, LONGEST_LINE, initial_indent="# ", subsequent_indent="#     ", break_long_words=False)


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
