"""``strop algorithm check``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, RunParser

EPILOG = "Exit codes: 0 no faults, 1 faults, 2 there is no such algorithm or option."


def algorithm(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop algorithm check``. Return its exit code."""
    options = make_algorithm_parser().parse_intermixed_args(arguments)
    from strop.algorithm_factory import make_algorithm
    from strop.extensions.checks.algorithm_check import check_algorithm
    from strop.extensions.checks.algorithm_report import format_report, plot_formula

    try:
        made = make_algorithm(options.name, read_options(options.options))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    report = check_algorithm(options.name, made)
    print(json.dumps(report.as_dict(), indent=1) if options.json else format_report(report))
    if options.plot is not None:
        if not report.formula.curves:
            print(f"error: --plot: {options.name} has no formula of a ratio or a margin, or has faults", file=sys.stderr)
            return USAGE_ERROR
        plot_formula(report, options.plot)
    return 1 if report.faults else 0


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Read ``option=value`` and ``part.option=value``, with or without ``algorithm.`` in front. Raises ValueError."""
    from strop.config.source.yaml_text import parse_value

    read: dict[str, Any] = {}
    for word in words:
        key, found, text = word.removeprefix("algorithm.").partition("=")
        if not found:
            raise ValueError(f"{word}: options are written option=value, such as objective.high=0.28")
        *parts, last = key.split(".")
        place = read
        for part in parts:
            place = place.setdefault(part, {})
        place[last] = parse_value(text)
    return read


def make_algorithm_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop algorithm",
        description="Check an algorithm on made-up rollouts, in seconds: what it returns, its gradient, its metrics, its formula.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["check"], help="what to do")
    parser.add_argument("name", metavar="NAME", help="one of Strop's algorithms, or path/to/file.py:Class, or module:Class")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw objective and gradient into FILE (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    parser.add_argument("options", nargs="*", default=[], metavar="option=value", help="options, such as objective.high=0.28")
    return parser


ALGORITHM = Command(algorithm, "check a loss of yours: strop algorithm check FILE:CLASS", group="check")
