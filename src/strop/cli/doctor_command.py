"""``strop doctor`` and ``strop cluster check``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.output import OVERRIDES_HELP, USAGE_ERROR, find_log_folder, print_config_error, print_interrupted, print_warnings


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


def cluster(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop cluster check``. Return 0 if a run can start, 1 if there are problems, 2 for an error in the configuration."""
    parser = argparse.ArgumentParser(
        prog="strop cluster",
        description="check: connect to the Ray cluster that a run would use, or start one here as it would, and check every node: "
        "versions, GPUs, shared folders, models, the speed of an all-reduce, and whether the layout fits.",
        epilog="Exit codes: 0 a run can start, 1 there are problems, 2 error in the configuration.\n\n"
        "  strop cluster check cluster.num_nodes=2 cluster.gpus_per_node=8\n"
        "  strop cluster check --config examples/configs/grpo_math_1B.yaml cluster.num_nodes=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("check",), metavar="check", help="the only action")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="the YAML configuration of the run (default: none; key=value settings describe the cluster)",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    options = parser.parse_intermixed_args(arguments)
    from strop.config import ConfigError
    from strop.config.load.load import load_any_kind

    try:
        loaded = load_any_kind(options.config, options.overrides)
        print_warnings(loaded)
    except ConfigError as error:
        return print_config_error(error)
    try:
        from strop.runs.cluster.cluster_run import check_cluster

        return check_cluster(loaded.config)
    except KeyboardInterrupt:
        return print_interrupted("All processes and files of the check were removed.")
