"""The section ``sandboxes``: where the images of tasks run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop import packages, plugins
from strop.base_config import BaseConfig
from strop.problems import Problem
from strop.user_code import suggest_names


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class SandboxesConfig(BaseConfig):
    """Sandboxes made from the images of tasks, by a provider. (``sandbox`` runs single programs, without an image.)"""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("max_open", "ready", "start_timeout_s", "options")

    provider: str = Field(
        "local",
        description="What makes them: local (bubblewrap on this machine), docker, podman, kubernetes, e2b, daytona, modal, or a name "
        "that a package declares in strop.sandbox_providers.",
    )
    options: dict[str, Any] = Field({}, description="Options of the provider, such as {cache_gb: 100}.")
    max_open: int = Field(
        64,
        ge=1,
        description="Episodes with a sandbox at a time in each process; others wait. Up to a quarter as many judge in addition.",
    )
    ready: int = Field(0, ge=0, description="Sandboxes kept ready for each image that was used last, in addition to max_open.")
    start_timeout_s: float = Field(
        600.0, gt=0, description="Time for a sandbox to be ready, its image being pulled; then it is tried again (s)."
    )
    cpus: float = Field(1.0, gt=0, description="Processors of one sandbox, where the provider limits them.")
    memory_mb: int = Field(2048, ge=16, description="Memory of one sandbox (MB).")
    disk_mb: int = Field(
        1024,
        ge=1,
        description="What one sandbox may write beyond its image, where the provider limits it; local keeps it in memory (MB).",
    )
    processes: int = Field(256, ge=8, description="Processes of one sandbox.")
    egress: Literal["none", "allow", "all"] = Field(
        "none", description="Where sandboxes may connect to: nowhere, hosts, or everywhere but this machine and private networks."
    )
    hosts: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Hosts for egress=allow: HOST, HOST:PORT or *.DOMAIN."
    )

    def errors(self, key: str) -> Iterator[Problem]:
        known = plugins.declared("sandbox_providers")
        if self.provider not in known:
            found = f"there is no provider {self.provider!r}{suggest_names(self.provider, known)}"
            yield Problem(f"{key}.provider", found, f"Set one of {', '.join(known)}.")
        if (self.egress == "allow") != bool(self.hosts):
            yield Problem(
                f"{key}.hosts",
                f"found {list(self.hosts)} with egress={self.egress}",
                "Set hosts with egress=allow, and only with it.",
            )

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        if self.provider != "local" or not any("sandboxes" in each.traits.needed_resources for each in environments.values()):
            return
        if shutil.which("bwrap") is None and not packages.assume("sandboxes"):
            found = "local needs bubblewrap, and there is no bwrap here"
            yield Problem(f"{key}.provider", found, "Install it (apt-get install bubblewrap), or set docker.")
