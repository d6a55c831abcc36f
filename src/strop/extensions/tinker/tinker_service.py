"""``strop serve --tinker``: the options of the service, and what it needs."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import packages
from strop.packages import install_command

if TYPE_CHECKING:
    from strop.extensions.serve.serve_model import ServeJob


class TinkerService:
    """A service for the Tinker SDK, whose clients train adapters on the model."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("training by the Tinker SDK")
        group.add_argument(
            "--tinker",
            action="store_true",
            help="serve the Tinker SDK in place of OpenAI's API: clients train adapters on CHECKPOINT",
        )
        group.add_argument(
            "--state-dir",
            default="tinker_state",
            metavar="DIR",
            help="where weights that clients save are kept (default: %(default)s)",
        )
        group.add_argument(
            "--max-models", type=int, default=4, metavar="N", help="models trained at a time (default: %(default)s)"
        )

    def check(self, job: ServeJob) -> None:
        if job.engine == "vllm":
            raise ValueError("--tinker trains and samples with the torch engine; leave out --engine vllm")
        if not packages.is_installed("tinker"):
            raise ValueError(f"--tinker needs the package tinker, whose messages it speaks: {install_command('tinker')}")

    def make_app(self, job: ServeJob, model: dict[str, Any], length: int) -> tuple[Any, str]:
        from strop.extensions.tinker.tinker_server import TinkerServer
        from strop.extensions.tinker.wire import WeightFolders

        server = TinkerServer(
            name=job.name,
            base=model,
            folders=WeightFolders(Path(job.options["state_dir"])),
            length=length,
            api_key=job.api_key,
            host=job.host,
            max_models=job.options["max_models"],
            kv_cache_gb=job.kv_cache_gb,
        )
        return server.make_app(), f"serving {job.name} to the Tinker SDK: TINKER_BASE_URL={{}}"


TINKER = TinkerService()
