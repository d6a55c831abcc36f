"""``strop config``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from strop.cli.train_command import TRAINING


def config(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop config``. Return its exit code."""
    parser = argparse.ArgumentParser(
        prog="strop config", description="List every key with its type, default and description.", allow_abbrev=False
    )
    parser.add_argument(
        "schema", choices=(*TRAINING, "eval"), nargs="?", default="grpo", help="command to list the keys of (default: grpo)"
    )
    options = parser.parse_args(arguments)
    from strop.config.load.reference import render_annotated_yaml
    from strop.config.schema.run_config import TRAINING_RUNS, EvalRunConfig

    print(render_annotated_yaml(TRAINING_RUNS.get(options.schema, EvalRunConfig)), end="")
    return 0
