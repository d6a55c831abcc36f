"""``strop sandbox check`` and ``strop sandbox serve``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from strop.cli.commands import Command
from strop.cli.output import USAGE_ERROR
from strop.packages import install_command


def sandbox(arguments: Sequence[str], command_line: str) -> int:
    """Run ``strop sandbox``. Return its exit code."""
    options = make_sandbox_parser().parse_args(arguments)
    from strop.base_config import validate_section
    from strop.extensions.code.sandbox.base import SandboxError
    from strop.extensions.code.sandbox.sandbox_config import SandboxConfig

    config = validate_section(
        SandboxConfig, {"level": options.level, "workers": options.workers, "site_packages": options.site_packages}
    )
    try:
        return options.action(options, config)  # type: ignore[no-any-return]
    except (SandboxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def make_sandbox_parser() -> argparse.ArgumentParser:
    from strop.extensions.code.sandbox.base import Limits

    parser = argparse.ArgumentParser(
        prog="strop sandbox", description="Programs that a model wrote: what this machine can isolate, and a service that runs them.",
        allow_abbrev=False,
    )  # fmt: skip
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="try what this machine enforces, and print a table", allow_abbrev=False)
    check.set_defaults(action=_check)
    check.add_argument("--provider", metavar="NAME", help="check a provider of sandboxes from images instead; needs --image")
    check.add_argument("--image", metavar="IMAGE", help="an image with sh, cat, sleep, id, head and dd")
    check.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the provider, as JSON or text"
    )
    check.add_argument(
        "--faults", action="store_true", help="inject faults into the provider, and print what a run does about each"
    )
    serve = actions.add_parser("serve", help="run programs that come over HTTP", allow_abbrev=False)
    serve.set_defaults(action=_serve)
    for each in (check, serve):
        each.add_argument(
            "--level", choices=("namespaces", "seccomp", "limits"), default="namespaces", help="default: %(default)s"
        )
        each.add_argument("--workers", type=_positive, metavar="N", help="programs at a time (default: the number of processors)")
        each.add_argument("--site-packages", action="store_true", help="let Python programs import the packages alongside Strop")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)")
    serve.add_argument("--port", type=int, default=8900, help="port to listen on; 0 is any free one (default: %(default)s)")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the key (default: $STROP_SANDBOX_API_KEY)")
    serve.add_argument("--max-request-mb", type=_positive, default=16, metavar="N", help="largest request (default: %(default)s)")
    serve.add_argument(
        "--max-waiting", type=_positive, default=256, metavar="N", help="most requests that wait (default: %(default)s)"
    )
    for name in asdict(Limits()):
        serve.add_argument(
            f"--max-{name.replace('_', '-')}", type=_positive, metavar="N", help=f"highest {name} that a client may set"
        )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _check(options: argparse.Namespace, config: Any) -> int:
    import asyncio

    if options.provider or options.image:
        from strop.extensions.sandboxes.check_command import check_named

        return asyncio.run(check_named(options.provider or "local", options.image or "", options.option, options.faults))
    from strop.extensions.code.sandbox.sandbox_check import check_sandbox

    findings = asyncio.run(check_sandbox(config))
    print(f"sandbox.level={config.level}")
    for finding in findings:
        answer = "yes" if finding.held else "NO" if finding.promised else "no"
        print(f"  {finding.what:<32}{answer:<5}{finding.note}".rstrip())
    broken = [finding.what for finding in findings if finding.promised and not finding.held]
    if broken:
        print(f"error: the level promises what this machine does not keep: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def _serve(options: argparse.Namespace, config: Any) -> int:
    import asyncio

    key = options.api_key_file.read_text().strip() if options.api_key_file else os.environ.get("STROP_SANDBOX_API_KEY", "")
    if not key:
        print(
            "error: the service needs a key: set STROP_SANDBOX_API_KEY, or --api-key-file to a file that holds it",
            file=sys.stderr,
        )
        return USAGE_ERROR
    from dataclasses import replace

    from strop.extensions.code.sandbox.launcher import check_level
    from strop.extensions.code.sandbox.sandbox_pool import SandboxPool

    try:
        from strop.extensions.code.sandbox.sandbox_server import ServerOptions, serve_sandbox
    except ImportError:
        print(f"error: the service needs aiohttp: {install_command('serve')}", file=sys.stderr)
        return 1
    check_level(config.level)
    server = ServerOptions(
        api_key=key, host=options.host, port=options.port, max_request_mb=options.max_request_mb, max_waiting=options.max_waiting
    )
    given = {name: value for name in asdict(server.ceilings) if (value := getattr(options, f"max_{name}")) is not None}
    server = replace(server, ceilings=replace(server.ceilings, **given))
    if config.level != "namespaces":
        print(f"warning: sandbox.level={config.level} is weaker than namespaces: see docs/security.md", file=sys.stderr)
    asyncio.run(serve_sandbox(SandboxPool(config), server, lambda address: print(f"sandbox at {address}", flush=True)))
    return 0


SANDBOX = Command(sandbox, "check or serve what runs programs that a model wrote", group="check")
