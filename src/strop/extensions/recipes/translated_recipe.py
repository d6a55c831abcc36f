"""A recipe of another library as a configuration of Strop."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.config.load.load import LoadedConfig, load_source
from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig
from strop.config.source import yaml_text
from strop.extensions.recipes.difference import Difference, Effect
from strop.extensions.recipes.recipe_format import DEFAULT, ReadRecipe, RecipeFormat, find_format, list_formats
from strop.packages import assume_packages
from strop.problems import ConfigError, Problem

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
