"""Where the weights of ``tinker://MODEL/weights/NAME`` and ``tinker://MODEL/sampler_weights/NAME`` lie."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from strop.extensions.tinker.datum_batch import TinkerRequestError

Kind = Literal["weights", "sampler_weights"]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,127}")
_ADDRESS = re.compile(r"tinker://([^/]+)/(weights|sampler_weights)/([^/]+)")
_ABOUT = "tinker.json"


@dataclass(frozen=True)
class AdapterShape:
    """The adapters of a model."""

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True


@dataclass(frozen=True)
class WeightFolders:
    """The folders of saved weights under ``root``."""

    root: Path

    def new(self, model: str, kind: Kind, name: str, shape: AdapterShape, *, overwrite: bool = False) -> tuple[str, Path]:
        """Make a folder. Return its address and itself. Raises TinkerRequestError for a name that is taken or cannot be one of a folder."""
        folder = self._folder(model, kind, name)
        if folder.exists() and not overwrite:
            raise TinkerRequestError(f"there are {kind} named {name!r} already; use another name, or overwrite=True")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _ABOUT).write_text(json.dumps(asdict(shape)))
        return f"tinker://{model}/{kind}/{name}", folder

    def find(self, address: str) -> tuple[Path, AdapterShape]:
        """Return the folder of an address. Raises TinkerRequestError if nothing is saved there."""
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise TinkerRequestError(
                f"{address!r} is no address of weights: tinker://MODEL/weights/NAME or .../sampler_weights/NAME"
            )
        folder = self._folder(match[1], match[2], match[3])
        if not (folder / _ABOUT).is_file():
            raise TinkerRequestError(f"nothing is saved as {address}")
        return folder, AdapterShape(**json.loads((folder / _ABOUT).read_text()))

    def _folder(self, *names: str) -> Path:
        for name in names:
            if not _NAME.fullmatch(name):
                raise TinkerRequestError(
                    f"{name!r} cannot be the name of weights: use letters, digits, dots, dashes and underscores"
                )
        return self.root.joinpath(*names)
