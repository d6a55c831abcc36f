"""``strop cluster check``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.commands import Command
from strop.cli.output import OVERRIDES_HELP, print_config_error, print_interrupted, print_warnings

if TYPE_CHECKING:
    from strop.config import TrainingRunConfig
    from strop.extensions.checks.preflight import Finding, RunNeeds


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
        return check_cluster(loaded.config)
    except KeyboardInterrupt:
        return print_interrupted("All processes and files of the check were removed.")


NODE_WAIT_SECONDS = 30.0  # for nodes to join and resources to become free; a run waits for cluster.wait_seconds


def check_cluster(config: TrainingRunConfig) -> int:
    """Print a report about the cluster. Return 0 if a run can start on it, 1 if there are problems."""
    return asyncio.run(_check(config))


async def _check(config: TrainingRunConfig) -> int:
    from strop.config.load.device_defaults import resolve_auto_backend
    from strop.distributed.placement import PlacementError
    from strop.extensions.checks.preflight import find_problems, format_survey
    from strop.extensions.checks.survey import connect_to_inspect, survey_cluster
    from strop.runs.cluster.cluster_run import compute_reserved_cpus, runs_on_cpu

    cluster = replace(config.cluster, wait_seconds=min(config.cluster.wait_seconds, NODE_WAIT_SECONDS))
    try:
        cpus = compute_reserved_cpus(config)
        async with connect_to_inspect(cluster, on_cpu=runs_on_cpu(config), cpus_per_node=cpus) as connected:
            config = resolve_auto_backend(config, has_gpus=not connected.on_cpu)  # the driver's machine may have none
            survey = await survey_cluster(connected, _list_needs(config))
    except (ConnectionError, PlacementError, ImportError, RuntimeError) as error:
        print(f"problem  {error}", file=sys.stderr)
        return 1
    if connected.cluster.started_here:
        print("No Ray cluster is running: one was started on this machine for the check, as a run would do.\n")
    print(*format_survey(survey), sep="\n")
    return _print_findings(find_problems(survey))


def _list_needs(config: TrainingRunConfig) -> RunNeeds:
    from strop.extensions.checks.preflight import RunNeeds

    return RunNeeds(
        devices=config.cluster.gpus_per_node,
        packages=_required_packages(config),
        folder_keys=_shared_folders(config),
        environment=config.cluster.roles.learner.env_vars,
    )


def _required_packages(config: TrainingRunConfig) -> tuple[str, ...]:
    """Return the packages to compare; the engine's is among them if engines use the packages of the node."""
    from strop.extensions.checks.preflight import PACKAGES

    role = config.cluster.roles.generator
    generation = config.policy.generation
    if role.python is not None or role.pip or not generation.uses_engines or not generation.engine_options.uses_node_packages:
        return PACKAGES
    return (*PACKAGES, str(generation.launched))


def _shared_folders(config: TrainingRunConfig) -> dict[str, str]:
    """Return the folders that all nodes must share, each with the key that sets it."""
    folders = {str(Path(config.logger.log_dir).resolve()): "logger.log_dir"}
    if config.checkpointing.enabled:
        folders[str(Path(config.checkpointing.checkpoint_dir).resolve())] = "checkpointing.checkpoint_dir"
    return folders


def _print_findings(findings: Sequence[Finding]) -> int:
    from strop.extensions.checks.preflight import format_findings

    fatal = sum(finding.fatal for finding in findings)
    ordered = sorted(findings, key=lambda finding: not finding.fatal)
    print("", *format_findings(ordered), sep="\n")
    if fatal:
        print(f"\n{fatal} problem{'s' if fatal > 1 else ''}: a run would fail or misbehave.")
        return 1
    print("no problems found" if not findings else "\nno problems that would stop a run")
    return 0


CLUSTER = Command(cluster, "check the nodes before a run: strop cluster check", group="check")
