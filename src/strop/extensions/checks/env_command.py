"""``strop env check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.commands import Command
from strop.cli.output import (
    OVERRIDES_HELP,
    USAGE_ERROR,
    RunParser,
    plain_warnings,
    print_config_error,
    print_interrupted,
    print_warnings,
)

EPILOG = "Exit codes: 0 no faults, 1 faults, 2 the configuration or the arguments are wrong."


def env(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop env check``. Return its exit code."""
    parser = make_env_parser()
    options = parser.parse_intermixed_args(arguments)
    from strop.config import ConfigError
    from strop.extensions.checks.task_checks import CHECKS
    from strop.user_code import suggest_names

    for name in options.skip:
        if name not in CHECKS:
            print(f"error: --skip: there is no check {name!r}{suggest_names(name, CHECKS)}", file=sys.stderr)
            return USAGE_ERROR
    try:
        return _check(options)
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        return print_interrupted("Nothing was written.")


def make_env_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop env",
        description="Check the environments of a configuration without a model: tasks, splits and rewards.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["check"], help="what to do")
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a YAML configuration of training or of an evaluation")
    parser.add_argument("--env", metavar="NAME", help="this environment only")
    parser.add_argument("--tasks", type=_count, default=32, metavar="N", help="how many tasks to look at (default: 32)")
    parser.add_argument(
        "--bound",
        type=float,
        default=0.5,
        metavar="X",
        help="share of the reference's score that is too much without knowledge (default: 0.5)",
    )
    parser.add_argument("--skip", action="append", default=[], metavar="CHECK", help="leave a check out; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the reports as a JSON object")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text} is not a number of tasks; give 2 or more")
    return int(text)


def _check(options: argparse.Namespace) -> int:
    from strop.config import EvalRunConfig, RolloutRunConfig
    from strop.config.load.load import load_training_or_evaluation
    from strop.data.sources.records import DataError
    from strop.environments.base import EnvironmentConfigError

    loaded = load_training_or_evaluation(options.config, options.overrides)
    if not isinstance(loaded.config, RolloutRunConfig | EvalRunConfig):
        print(
            f"error: {options.config} is a run on recorded data (strop {loaded.config.section}), which has no environments",
            file=sys.stderr,
        )
        return USAGE_ERROR
    print_warnings(loaded)
    from strop.extensions.checks.environment_check import EnvironmentCheckOptions, check_environments
    from strop.extensions.checks.task_checks import format_reports

    asked = EnvironmentCheckOptions(tasks=options.tasks, bound=options.bound, only=options.env, skip=tuple(options.skip))
    try:
        with plain_warnings():
            reports = check_environments(loaded.config, asked)
    except (EnvironmentConfigError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if not reports:
        names = ", ".join(loaded.config.env) or "none"
        print(f"error: --env: no training data is of the environment {options.env!r}; there are: {names}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        import json

        print(
            json.dumps(
                {"ok": not any(each.faults for each in reports), "environments": [each.as_dict() for each in reports]}, indent=1
            )
        )
    else:
        print(format_reports(reports))
    return 1 if any(report.faults for report in reports) else 0


ENV = Command(env, "check tasks and rewards without a model: strop env check", group="check")
