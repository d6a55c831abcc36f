"""The section ``sandbox``: where programs that a model wrote run."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from strop import packages
from strop.base_config import BaseConfig
from strop.problems import Problem
from strop.safety.confinement import build_program_filter

SandboxLevel = Literal["namespaces", "seccomp", "limits"]


def _check_urls(value: Any) -> Any:
    urls = [value] if isinstance(value, str) else value
    for url in urls if isinstance(urls, list | tuple) else ():
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"{url} is no address of a sandbox service; write it as http://HOST:PORT")
    return tuple(urls) if isinstance(urls, list) else urls


class SandboxConfig(BaseConfig):
    """Where programs that a model wrote run: in processes of this machine, or behind ``strop sandbox serve``."""

    unrelated_keys: ClassVar[tuple[str, ...]] = ("workers", "sessions", "memory_mb", "url")

    level: SandboxLevel = Field(
        "namespaces",
        description="How programs are isolated: namespaces (bubblewrap, a filter of system calls, limits); seccomp (Python only: a "
        "program computes and reads this machine's files, nothing else); limits (only limits: it can read and write what the run can).",
    )
    workers: int | None = Field(None, ge=1, description="Programs at a time in each process; null is the number of processors.")
    sessions: int = Field(256, ge=1, description="Open interpreters (the python tool) at a time in each process.")
    memory_mb: int | None = Field(
        None,
        ge=1,
        description="Memory that open interpreters may hold together between their calls; null is half of the machine's (MB).",
    )
    site_packages: bool = Field(
        False, description="Whether Python programs may import the packages that are installed alongside Strop, such as numpy."
    )
    url: Annotated[tuple[str, ...], BeforeValidator(_check_urls)] = Field(
        (),
        description="Services of `strop sandbox serve` that run the programs instead of this machine; several share the load. Their key is "
        "read from STROP_SANDBOX_API_KEY.",
    )

    def examine(self, key: str, environments: Mapping[str, Any]) -> Iterator[Problem]:
        if self.url or not any("sandbox" in each.traits.needed_resources for each in environments.values()):
            return
        if (missing := find_missing(self.level)) and not packages.assume("sandbox"):
            yield Problem(f"{key}.level", missing)


def find_missing(level: SandboxLevel) -> str:
    """Return why this machine cannot have a level, as far as it can be told without starting it; "" if it can."""
    if sys.platform != "linux":
        return (
            f"sandbox.level={level} needs Linux, and this is {sys.platform}: run `strop sandbox serve` on a Linux machine and set "
            "sandbox.url to its address"
        )
    if level != "limits":
        try:
            build_program_filter()
        except OSError as error:
            return f"sandbox.level={level}: {error}. Set sandbox.level=limits if the programs are trusted, or sandbox.url"
    if level == "namespaces" and shutil.which("bwrap") is None:
        return (
            "sandbox.level=namespaces needs bubblewrap, and there is no bwrap here: install it (apt-get install bubblewrap), or set "
            "sandbox.url to a service that has it, or a weaker level by name: sandbox.level=seccomp or sandbox.level=limits"
        )
    return ""
