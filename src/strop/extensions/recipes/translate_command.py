"""``strop translate``: a recipe of another library in Strop's keys, or what becomes of each recipe of a folder."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli.commands import Command
from strop.cli.output import OVERRIDES_HELP, USAGE_ERROR, RunParser, print_config_error
from strop.packages import assume_packages, describe_assumed

if TYPE_CHECKING:
    from strop.extensions.recipes.translated_recipe import ExaminedRecipe

MOST_KEYS = 3  # of a reason


def make_parser() -> argparse.ArgumentParser:
    from strop.extensions.recipes.library_recipe import list_formats

    parser = RunParser(
        prog="strop translate",
        description="Print a recipe in Strop's keys, with a comment for each difference; or say what becomes of each recipe of a folder.",
        epilog="strop translate recipe.yaml policy.model_name=m > mine.yaml\nstrop translate --all recipes --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe",
        type=Path,
        metavar="RECIPE",
        help="a YAML file, a dump of TRL's arguments, a script that starts verl, or with --all a folder",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    parser.add_argument("--all", action="store_true", help="try every recipe below a folder on the machines that it asks for")
    parser.add_argument("--json", action="store_true", help="print a JSON object, with every reason and difference")
    parser.add_argument(
        "--from", dest="library", choices=("auto", *list_formats()), default="auto", help="whose recipe it is (default: auto)"
    )
    parser.add_argument(
        "--gpus", type=int, metavar="N", help="how many GPUs the recipe is for, if it does not say so, as TRL's do not"
    )
    return parser


@assume_packages()
def translate(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop translate``. Return 0, or 2 for a recipe that is refused."""
    parser = make_parser()
    options = parser.parse_intermixed_args(arguments)
    if options.all and not options.recipe.is_dir():
        parser.error(f"--all takes a folder, and {options.recipe} is none")
    if options.gpus is not None and (options.gpus < 1 or options.all):
        parser.error("--gpus takes a number of at least 1, and not with --all")
    code = _translate_folder(options) if options.all else _translate_file(options, command_line)
    for line in describe_assumed():
        print(f"note: {line}", file=sys.stderr)
    return code


def _translate_file(options: argparse.Namespace, command_line: str) -> int:
    from strop.config import ConfigError
    from strop.extensions.recipes.translated_recipe import render_recipe, translate_recipe

    try:
        translated = translate_recipe(options.recipe, options.overrides, options.library, gpus=options.gpus)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"problems": [_as_json(problem) for problem in error.problems]}, indent=1, ensure_ascii=False))
            return USAGE_ERROR
        return print_config_error(error)
    if options.json:
        values = translated.loaded.source.values
        differences = [_as_json(difference) for difference in translated.differences]
        print(json.dumps({"kind": translated.kind, "values": values, "differences": differences}, indent=1, ensure_ascii=False))
        return 0
    print(render_recipe(translated, command_line), end="")
    return 0


def _translate_folder(options: argparse.Namespace) -> int:
    from strop.extensions.recipes.translated_recipe import examine_folder

    recipes = list(examine_folder(options.recipe, options.overrides, options.library))
    if not recipes:
        print(f"error: there is no YAML file below {shlex.quote(str(options.recipe))}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(json.dumps([_recipe_as_json(recipe, options.recipe) for recipe in recipes], indent=1, ensure_ascii=False))
    else:
        _print_summary(recipes, options.recipe)
    return 0


def _print_summary(recipes: Sequence[ExaminedRecipe], folder: Path) -> None:
    from strop.extensions.recipes.translated_recipe import Outcome, count_reasons

    counts = Counter(recipe.outcome for recipe in recipes)
    runs = len(recipes) - counts[Outcome.NO_RUN]
    print(f"{runs} run configurations below {folder}")
    for outcome in Outcome:
        if counts[outcome] and outcome is not Outcome.NO_RUN:
            print(f"{counts[outcome]:>5} {outcome}")
    if counts[Outcome.NO_RUN]:
        print(f"\n{counts[Outcome.NO_RUN]} other files, which have no section of a run:")
        print(*(f"      {recipe.path.relative_to(folder)}" for recipe in recipes if recipe.outcome is Outcome.NO_RUN), sep="\n")
    if reasons := count_reasons(recipes):
        print("\nrecipes  alone  refused because")
        for reason in reasons:
            keys = ", ".join(reason.keys[:MOST_KEYS]) + (", ..." if len(reason.keys) > MOST_KEYS else "")
            print(f"{reason.recipes:>7}  {reason.alone:>5}  {reason.text}" + (f" ({keys})" if keys else ""))


def _recipe_as_json(recipe: ExaminedRecipe, folder: Path) -> dict[str, Any]:
    return {
        "file": str(recipe.path.relative_to(folder)),
        "outcome": recipe.outcome.name.lower(),
        "kind": recipe.kind,
        "problems": [_as_json(problem) for problem in recipe.problems],
        "differences": [_as_json(difference) for difference in recipe.differences],
    }


def _as_json(found: Any) -> dict[str, Any]:
    """Return a Problem or a Difference as an object of JSON."""
    return {name: str(value) if value is not None else None for name, value in vars(found).items()}


TRANSLATE = Command(translate, "print a recipe of another library in Strop's keys", group="start")
