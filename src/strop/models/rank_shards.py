"""Folders of weights that the ranks of a learner wrote, each its shards, by the learner that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from strop import plugins
from strop.lazy_torch import Tensor


class RankShardReader(Protocol):
    """What a learner (``strop.learners``) knows of weights that its ranks saved, in files of ``torch.distributed.checkpoint``.

    ``find_shards`` imports no torch.
    """

    title: str  # what messages call the learner
    shards_title: str  # and its shards
    section: str  # of the configuration: enabled, it continues from such a checkpoint

    def find_shards(self, folder: Path) -> Path | None:
        """Return the folder of shards that a folder is or has; None if this learner wrote none there."""
        ...

    def model_folder(self, shards: Path) -> Path:
        """Return the folder with configuration and tokenizer."""
        ...

    def open_shards(self, shards: Path) -> Any:
        """Return a ``TensorReader`` of the shards, under the learner's own names."""
        ...

    def read_shards(self, shards: Path, config: Any) -> Mapping[str, Tensor]:
        """Return the weights under Hugging Face's names. ``config``: of the Hugging Face model."""
        ...

    def is_index(self, file: str) -> bool:
        """Return whether a file next to configuration and tokenizer is about the shards, and means nothing without them."""
        ...

    def explain(self, name: str) -> str:
        """Say what the folder ``name`` has, and how it becomes a model that can be loaded."""
        ...


def find_shards(folder: Path) -> tuple[RankShardReader, Path] | None:
    """Return the folder of shards that a folder is or has, and who reads them; None for weights in other formats."""
    for name in sorted(plugins.declared("learners"), key=lambda name: name == "torch"):  # its format is what others extend
        reader: RankShardReader = plugins.load("learners", name)()
        if folder.is_dir() and (found := reader.find_shards(folder)) is not None:
            return reader, found
    return None
