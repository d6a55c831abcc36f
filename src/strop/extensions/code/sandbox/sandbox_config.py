"""The section ``sandbox``: where programs that a model wrote run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from strop.base_config import BaseConfig

SandboxLevel = Literal["namespaces", "seccomp", "limits"]


def _check_urls(value: Any) -> Any:
    urls = [value] if isinstance(value, str) else value
    for url in urls if isinstance(urls, list | tuple) else ():
        if not str(url).startswith(("http://", "https://")):
            raise ValueError(f"{url} is no address of a sandbox service; write it as http://HOST:PORT")
    return tuple(urls) if isinstance(urls, list) else urls


class SandboxConfig(BaseConfig):
    """Where programs that a model wrote run: in processes of this machine, or behind ``strop sandbox serve``."""

    level: SandboxLevel = Field(
        "namespaces",
        description="How programs are kept apart: namespaces (bubblewrap, a filter of system calls, limits); seccomp (Python only: a "
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
        False, description="Whether Python programs may import the packages that are installed beside Strop, such as numpy."
    )
    url: Annotated[tuple[str, ...], BeforeValidator(_check_urls)] = Field(
        (),
        description="Services of `strop sandbox serve` that run the programs instead of this machine; several share the load. Their key is "
        "read from STROP_SANDBOX_API_KEY.",
    )
