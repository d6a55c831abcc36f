"""What the commands share: exit codes, the parser of commands that take a configuration, and messages."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.config import ConfigError, EvalRunConfig, LoadedConfig, TrainingRunConfig

OVERRIDES_HELP = "key=value settings that override the file, such as grpo.num_prompts_per_step=8; ~key removes a key"
USAGE_ERROR, INTERRUPTED = 2, 130


def make_run_parser(command: str, description: str, default_config: Path | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"strop {command}", description=description, allow_abbrev=False)
    default = "the default of every key" if default_config is None else str(default_config)
    parser.add_argument(
        "--config", type=Path, default=default_config, metavar="FILE", help=f"a YAML configuration (default: {default})"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="validate, print the resolved configuration and a summary of the run, and exit"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES_HELP)
    return parser


def print_dry_run(config: TrainingRunConfig | EvalRunConfig) -> int:
    from strop.config import dump_config

    print(dump_config(config))
    from strop import build

    try:
        print(build.summarize(config))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def print_warnings(loaded: LoadedConfig[Any]) -> None:
    for problem in loaded.warnings:
        print(f"warning: {problem}", file=sys.stderr)


def print_config_error(error: ConfigError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return USAGE_ERROR


def print_interrupted(hint: str) -> int:
    print(f"\nInterrupted. {hint}", file=sys.stderr)
    return INTERRUPTED
