"""``strop doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.log_folder import find_log_folder
from strop.cli.output import USAGE_ERROR


def doctor(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop doctor``. Return 0 if the run is healthy, 1 if not, 2 if there is no such run."""
    parser = argparse.ArgumentParser(
        prog="strop doctor",
        description="Diagnose a run: whether it is alive, what waits for what and for how long, what went wrong, and how to fix it.",
        epilog="Exit codes: 0 running or finished, 1 there are problems, 2 there is no such run.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, or a configuration (its logger.log_dir)")
    parser.add_argument("--json", action="store_true", help="print the report as a JSON object")
    options = parser.parse_args(arguments)
    from strop.monitoring.doctor import RunNotFound, diagnose, format_diagnosis

    try:
        diagnosis = diagnose(find_log_folder(options.run))
    except (RunNotFound, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        import dataclasses
        import json

        print(json.dumps(dataclasses.asdict(diagnosis), indent=1, ensure_ascii=False))
    else:
        print(format_diagnosis(diagnosis))
    return 0 if diagnosis.healthy else 1
