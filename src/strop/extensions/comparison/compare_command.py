"""``strop compare``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from strop.cli.commands import Command
from strop.cli.output import (
    USAGE_ERROR,
    add_choice_of_weights,
    make_run_parser,
    plain_warnings,
    print_config_error,
    print_interrupted,
    removed_option,
)
from strop.extensions.evaluation.eval_command import is_model_name

if TYPE_CHECKING:
    from strop.extensions.comparison.compare_models import ComparisonJob

DESCRIPTION = (
    "Say whether B is better than A. Each is an evaluation (its JSON file or folder), a log folder, a checkpoint, a Hugging Face folder "
    "or a hub name. Evaluations that are stored are used; what is missing is evaluated as the run of A validates. With overrides both are "
    "evaluated, as by strop eval."
)


def compare(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop compare``. Return its exit code: 0 whatever the verdict, 2 for what cannot be compared."""
    parser = make_compare_parser()
    options = parser.parse_intermixed_args(arguments)
    names = [text for text in options.overrides if is_model_name(text)]
    overrides = [text for text in options.overrides if not is_model_name(text)]
    if len(names) != 2:
        parser.error(f"found {len(names)} to compare{': ' if names else ''}{', '.join(names)}; name two: strop compare A B")
    from strop.config import ConfigError
    from strop.extensions.comparison.compare_models import describe_job, make_comparison_job

    try:
        job = make_comparison_job(
            *names,
            step=options.step,
            best=options.best,
            ema=options.ema,
            config=options.config,
            overrides=overrides,
            metric=options.metric,
            level=options.level,
            margin=options.margin,
        )
        if options.dry_run:
            print(describe_job(job))
            return 0
        return _run(job, as_json=options.json)
    except ConfigError as error:
        return print_config_error(error)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return print_interrupted(f"What was evaluated whole is stored; the same command goes on:\n    {command_line}")


def make_compare_parser() -> argparse.ArgumentParser:
    parser = make_run_parser("compare", DESCRIPTION, None)
    parser.usage = (
        "strop compare A B [--metric NAME] [--margin X] [--level P] [--step N | --best] [--ema] [--config FILE] [--json] "
        "[--dry-run] [key=value ...]"
    )
    add_choice_of_weights(parser)
    parser.add_argument(
        "--metric", default="accuracy", metavar="NAME", help="accuracy (default), pass@K, cons@K, reward, avg_length, ..."
    )
    parser.add_argument(
        "--margin",
        type=float,
        metavar="X",
        help="a difference that does not matter, in units of the metric: 0.02 is 2 points of accuracy",
    )
    parser.add_argument("--level", type=float, default=0.95, metavar="P", help="of the intervals (default: 0.95)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and everything else to stderr")
    instead = "the printed comparison, or --json, says all that the page said"
    parser.add_argument("--html", type=removed_option(instead), help=argparse.SUPPRESS)
    return parser


def _run(job: ComparisonJob, *, as_json: bool) -> int:
    """Compare and print. Raises ValueError for what cannot be compared."""
    from strop.config import ConfigError
    from strop.extensions.comparison.compare_models import compare_models, format_comparison
    from strop.extensions.evaluation.statistics import NotComparable
    from strop.runs.exit_codes import run_command

    refused: list[NotComparable | ConfigError] = []

    async def work() -> None:
        note = partial(print, file=sys.stderr) if as_json else print
        try:
            found = await compare_models(job, note, console="none" if as_json else "auto")
        except (NotComparable, ConfigError) as error:
            refused.append(error)
            return
        print(json.dumps(found.as_dict(), indent=1, allow_nan=False) if as_json else format_comparison(found))

    with plain_warnings():
        code = run_command(work())
    if refused:
        raise refused[0]
    return code


COMPARE = Command(compare, "say whether one run is better than another, on the same tasks", group="use")
