"""``strop replay``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from strop.cli.commands import Command
from strop.cli.output import OVERRIDES_HELP, USAGE_ERROR, RunParser, find_log_folder, plain_warnings, print_interrupted


def replay(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop replay``. Return its exit code: 1 if a replay without overrides does not reproduce what was logged."""
    options = make_parser().parse_intermixed_args(arguments)
    try:
        with plain_warnings():
            return _replay(options)
    except KeyboardInterrupt:
        return print_interrupted(f"Nothing was stored. A replay starts from the beginning:\n    {command_line}")


def _replay(options: argparse.Namespace) -> int:
    import asyncio

    from strop.config import ConfigError
    from strop.extensions.replay.replay import replay as replay_run
    from strop.extensions.replay.replay import store_replay
    from strop.extensions.replay.replay_report import format_replay

    try:
        folder = find_log_folder(options.run)
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}; give the log folder of a run (logger.log_dir)")
        work = replay_run(folder, options.step, options.overrides, weights=options.weights, note=_print_note)
        result = asyncio.run(work)
        stored = store_replay(folder, result) if options.store else None
    except (ConfigError, ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if options.json:
        print(json.dumps(result.to_dict(), allow_nan=False))
    else:
        print("\n".join(format_replay(result)))
        if stored is not None:
            print(f"\nstored in {stored}")
    return 1 if result.failed else 0


def _print_note(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop replay",
        description="Train a step of a run again, from its checkpoint and what it trained on, as it was or under another algorithm, clip, "
        "correction or learning rate, and compare. Nothing of the run changes.",
        epilog="A step begins with the weights of the step before, so its checkpoint is needed (checkpointing.save_period=1 keeps all); "
        "step 1 begins with the initial model.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the training step")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=OVERRIDES_HELP)
    parser.add_argument(
        "--weights",
        choices=("exact", "nearest"),
        default="exact",
        help="nearest begins with the nearest earlier checkpoint where the right one is not kept, and says so",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--store",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether the result is stored in replays/ of the log folder, for the page (default: yes)",
    )
    return parser


REPLAY = Command(replay, "train a step again, as it was or with other settings", group="look")
