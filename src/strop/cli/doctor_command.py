"""``strop doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

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
    from strop.monitoring.watchdog.doctor import RunNotFound, diagnose, format_diagnosis

    try:
        diagnosis = diagnose(_find_log_folder(options.run))
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


def _find_log_folder(run: Path) -> Path:
    """Return the log folder of a run, given the folder itself, a configuration, or a checkpoint, which contains its configuration."""
    from strop.config.load import yaml_text

    for file in (run, run / "config.yaml"):
        if file.suffix in (".yaml", ".yml") and file.is_file() and not (run / "metrics.jsonl").exists():
            try:
                values, _ = yaml_text.parse(file.read_text(encoding="utf-8"))
            except yaml_text.YamlError as error:
                raise ValueError(f"{file} is not valid YAML: {error}") from error
            logger = values.get("logger") if isinstance(values, dict) else None
            log_dir = logger.get("log_dir") if isinstance(logger, dict) else None
            if isinstance(log_dir, str):
                return Path(log_dir)
    return run
