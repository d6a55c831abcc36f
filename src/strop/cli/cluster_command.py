"""``strop cluster check``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from strop.cli.output import OVERRIDES_HELP, print_config_error, print_interrupted, print_warnings


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
        from strop.runs.cluster.cluster_check import check_cluster

        return check_cluster(loaded.config)
    except KeyboardInterrupt:
        return print_interrupted("All processes and files of the check were removed.")
