"""Which optional packages are installed."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Return whether a package can be imported. A folder of that name, such as wandb's run folder, does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
