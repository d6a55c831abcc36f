"""The version of SGLang that Strop was checked with. It changes and reads what is not part of SGLang's public interface."""

from __future__ import annotations

CHECKED_SGLANG = "0.5.23"  # the one that make setup-sglang installs


def unchecked_sglang() -> str | None:
    """Return the version in this interpreter's environment if Strop was not checked with it; None for another, or where there is none."""
    from importlib import metadata

    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None
    return None if version == CHECKED_SGLANG else version
