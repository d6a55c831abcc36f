"""``strop view`` and ``strop report``."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR, RunParser, find_log_folder
from strop.packages import install_command, is_installed
from strop.safety.site_guard import is_loopback

DEFAULT_FOLDER = "logs"


def view(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop view``. Return its exit code."""
    options = make_parser().parse_args(arguments)
    try:
        places = _find_places(options.runs)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if not is_installed("aiohttp"):
        print(f"error: the view needs the package aiohttp: {install_command('view')}", file=sys.stderr)
        return USAGE_ERROR
    return _serve(options, places)


def make_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop view",
        description="Show runs in the browser: curves, times, what the system does now, configurations, and every rollout by its tokens.",
        epilog="The address that is printed has a secret token: anyone who has it can read the runs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="log folders, configurations, or folders of runs, which are looked through again and again (default: logs)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=_port, default=0, help="port to listen on; 0 is any free one (default: %(default)s)")
    parser.add_argument("--no-token", action="store_true", help="let in anyone who reaches the address")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return int(text)


def _find_places(runs: Sequence[Path]) -> list[Path]:
    """Return the folders that are named. Raises ValueError for one that is not there."""
    if not runs and not Path(DEFAULT_FOLDER).is_dir():
        raise ValueError(
            f"there is no folder {DEFAULT_FOLDER} here; name the log folder of a run (logger.log_dir) or a folder of runs"
        )
    places = [find_log_folder(run) for run in runs] or [Path(DEFAULT_FOLDER)]
    for run, place in zip(runs, places, strict=False):
        if not place.is_dir():
            raise ValueError(
                f"there is no folder {place} ({run}); name the log folder of a run (logger.log_dir) or a folder of runs"
            )
    return places


def _serve(options: argparse.Namespace, places: Sequence[Path]) -> int:
    import asyncio

    from strop.extensions.view.view_routes import ViewOptions, ViewServer

    view_options = ViewOptions(host=options.host, port=options.port, **({"token": None} if options.no_token else {}))
    try:
        server = ViewServer(places, view_options, _parse_yaml)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not is_loopback(options.host):
        who = "whoever reaches it" if options.no_token else "anyone with this address"
        print(f"warning: {options.host} is reached by other machines, over plain HTTP: {who} reads these runs", file=sys.stderr)
    count = len(server.catalogue.list_runs())
    print(f"{count} run{'' if count == 1 else 's'} in {', '.join(map(str, places))}")
    print(f"Open {server.address}", flush=True)
    if options.open:
        import webbrowser

        webbrowser.open(server.address)
    threading.Thread(target=server.api.warm_up, name="warming up", daemon=True).start()
    with suppress(KeyboardInterrupt):  # before the server heeds it
        asyncio.run(server.serve())
    return 0


def _parse_yaml(text: str) -> Any:
    from strop.config.source import yaml_text  # slow to import, and seldom needed

    return yaml_text.parse_value(text)


VIEW = Command(view, "show runs in the browser: curves, rollouts, tokens", group="look")


def report(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop report``. Return its exit code."""
    parser = make_report_parser()
    options, others = parser.parse_known_args(arguments)
    if others and not any(other.startswith("-") or "=" in other for other in others):
        parser.error(f"a report is of one run, found {others[0]} too: strop compare A B compares two")
    parser.parse_args(arguments)
    from strop.config.source import yaml_text
    from strop.extensions.view.saved_view import save_view
    from strop.extensions.view.viewed_run import ViewError

    try:
        print(save_view(find_log_folder(options.run), options.output, yaml_text.parse_value))
    except (ViewError, ValueError, LookupError) as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except OSError as error:
        named = f"{error.filename} cannot be written: {error.strerror}" if error.filename and error.strerror else str(error)
        print(f"error: {named}", file=sys.stderr)
        return USAGE_ERROR
    return 0


def make_report_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="strop report",
        description="Save the view of a run as one HTML file that needs no server and no network: curves, times, configuration, incidents, "
        "what it ran on, and the rollouts and samples of its first and last step.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="log folder of a run, a checkpoint folder or a configuration")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the file to write (default: report.html in the log folder)")
    return parser


REPORT = Command(report, "write a report of a run as one HTML file", group="look")
