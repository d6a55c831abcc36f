"""Export weights as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.models.loading import from_pretrained, locate_model, quiet_transformers


def load_model_config(name: str) -> Any:
    """Load a model's configuration by its folder or hub name. Raises ModelNotFound."""
    from transformers import AutoConfig

    if (Path(name) / "config.json").exists():  # also a folder of shards, which is no model
        return from_pretrained(AutoConfig, name)
    folder, gguf = locate_model(name)
    return from_pretrained(AutoConfig, folder, **({"gguf_file": gguf} if gguf else {}))


def export_weights(config: Any, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``weights`` as ``save_pretrained`` does, without copying them.

    ``config`` names the model class in ``architectures``. Raises ValueError for weights that do not fit it.
    """
    import transformers

    kind = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if kind is None:
        raise ValueError(
            f"config.json names the architecture {config.architectures}, which this version of Transformers ({transformers.__version__}) "
            "does not have"
        )
    with torch.device("meta"), quiet_transformers():
        model = kind(config)
    names = set(model.state_dict())
    unexpected = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if missing or unexpected:
        raise ValueError(
            f"the weights do not fit {kind.__name__}: of {len(names)} weights, missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
    model.config.dtype = next((tensor.dtype for tensor in weights.values() if tensor.is_floating_point()), None)
    with quiet_transformers():
        model.save_pretrained(folder)
