"""Parts of weights from files: nothing is read whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from strop.models.load_report import LoadReport, find_not_finite

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


class WeightReader(Protocol):
    """Reads parts of tensors by name."""

    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a part of a tensor."""
        ...


class MemoryWeights:
    """Reads tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self.tensors[name][index]


class FileWeights:
    """Reads the safetensors files of a model's folder, one or several with an index."""

    def __init__(self, folder: Path | str) -> None:
        """Raises FileNotFoundError if the folder has none."""
        self.folder = Path(folder)
        self.files = _find_files(self.folder)
        self._open: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._file(self.files[name]).get_slice(name)[index]
        LoadReport(not_finite=list(find_not_finite([(name, part)]))).refuse(str(self.folder), "the model", key="")
        return part

    def _file(self, name: str) -> Any:
        from safetensors import safe_open

        if name not in self._open:
            opened: Any = safe_open
            self._open[name] = opened(self.folder / name, framework="pt")
        return self._open[name]


def _find_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    from safetensors import safe_open

    if (folder / INDEX_FILE).exists():
        files: dict[str, str] = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        return files
    if not (folder / SINGLE_FILE).exists():
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: Megatron Core's models are read from safetensors; save the model "
            "again with save_pretrained"
        )
    with safe_open(folder / SINGLE_FILE, framework="pt") as file:  # type: ignore[no-untyped-call]
        return dict.fromkeys(file.keys(), SINGLE_FILE)
