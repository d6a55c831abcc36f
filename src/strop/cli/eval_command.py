"""``strop eval``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strop.cli.output import (
    make_run_parser,
    plain_warnings,
    print_config_error,
    print_dry_run,
    print_interrupted,
    print_warnings,
)


def evaluate(arguments: Sequence[str], command_line: str, default_config: Path | None = None) -> int:
    """Run ``strop eval``. Return its exit code."""
    from strop.config import ConfigError, EvalRunConfig, load_config

    options = make_run_parser("eval", "Evaluate a language model.", default_config).parse_intermixed_args(arguments)
    try:
        loaded = load_config(options.config, options.overrides, root=EvalRunConfig)
        print_warnings(loaded)
        from strop.build.dry_run.examine import examine

        with plain_warnings():
            examination = examine(loaded.config, data=options.dry_run)
        if options.dry_run:
            return print_dry_run(loaded.config, examination, verbose=options.verbose)
        from strop import build

        return build.run_evaluation(loaded.config)
    except ConfigError as error:
        return print_config_error(error)
    except KeyboardInterrupt:
        return print_interrupted(f"An evaluation starts from the beginning:\n    {command_line}")
