"""Data sets by name, as extensions declare them in the entry points ``strop.datasets``: each a mapping of names to sets."""

from __future__ import annotations

from collections.abc import Mapping

from strop import plugins
from strop.data.builtin_dataset import BuiltinDataset

BUILTIN_DATASETS: Mapping[str, BuiltinDataset] = {
    name: each for group in plugins.declared("datasets") for name, each in plugins.load("datasets", group).items()
}
