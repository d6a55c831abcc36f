"""The names of a model's weights in its checkpoints on the hub."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.loading import RemoteCodeRefused, find_auto_class, from_pretrained, locate_model, quiet_transformers
from strop.models.quantization.quantization_plan import EXPERTS


def load_model_config(name: str) -> Any:
    """Load a model's configuration by its folder or hub name. Raises ModelNotFound."""
    from transformers import AutoConfig

    if (Path(name) / "config.json").exists():  # also a folder of shards, which is not a model
        return from_pretrained(AutoConfig, name)
    folder, gguf = locate_model(name)
    return from_pretrained(AutoConfig, folder, **({"gguf_file": gguf} if gguf else {}))


def describe_model(config: Any, *, classifier: bool = False) -> Any:
    """Return a causal LM, or a classifier with one label, on the meta device, where weights have names and shapes but no memory."""
    from transformers import AutoModelForSequenceClassification

    if classifier:
        config = copy.deepcopy(config)
        config.num_labels = 1
    kind: Any = AutoModelForSequenceClassification if classifier else find_auto_class(config)
    with torch.device("meta"), quiet_transformers():
        return kind.from_config(config)


class CheckpointNames:
    """The names of a model's weights in its checkpoints on the hub, and how Transformers splits weights to save them."""

    def __init__(self, skeleton: Any | None) -> None:
        """``skeleton``: the Transformers model on the meta device; None: weights are named and stored as in the checkpoints."""
        self._skeleton = skeleton
        self._specs: dict[str, Tensor] = {} if skeleton is None else skeleton.state_dict()
        self._parts: dict[str, dict[str, Tensor]] = {}

    @classmethod
    def of(cls, folder: str) -> CheckpointNames:
        """Return those of a model, given a folder with its configuration. A model with code of its own has its own names."""
        try:
            config = load_model_config(folder)
        except RemoteCodeRefused:
            return cls(None)
        return cls(describe_model(config) if type(config).__module__.startswith("transformers.") else None)

    def stored_names(self, name: str) -> list[str]:
        return list(self._find_parts(name)) or [name]

    def module_name(self, name: str) -> str:
        """Return a weight's name in a checkpoint; for all experts of a layer, as if they were in one tensor there."""
        stored = self.stored_names(name)[0]
        if name.endswith(EXPERTS):  # an engine has them in one module, whatever files call their parts
            layer = stored.partition(".experts.")[0] if ".experts." in stored else stored.rsplit(".", 2)[0]
            stored = f"{layer}.experts.{name.rpartition('.')[2]}"
        return stored

    def convert(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a weight as a checkpoint has it, which may be in several parts."""
        parts = self._find_parts(name)
        if all(part is self._specs[name] for part in parts.values()):  # at most renamed
            yield self.stored_names(name)[0], tensor
        else:
            yield from self._revert(name, tensor).items()

    def _find_parts(self, name: str) -> dict[str, Tensor]:
        """Return a weight's parts in a checkpoint, on the meta device; empty for other tensors."""
        if name not in self._parts:
            self._parts[name] = self._revert(name, self._specs[name]) if name in self._specs else {}
        return self._parts[name]

    def _revert(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        reverted: dict[str, Tensor] = revert_weight_conversion(self._skeleton, {name: tensor})
        return reverted
