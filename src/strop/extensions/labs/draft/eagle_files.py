"""Checkpoints of EAGLE-3 heads: ``config.json`` and ``model.safetensors``, as SpecForge writes and vLLM and SGLang load them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.extensions.labs.draft.eagle_config import read_shape
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.models.fit.damaged_weights import naming_damaged_weights
from strop.models.fit.load_report import find_not_finite
from strop.models.loading import ModelNotFound, locate_model

MAPS = ("d2t", "t2d")


def find_head_folder(name: str) -> Path:
    """Return the folder of a head; one of the hub is downloaded to the cache. Raises ModelNotFound."""
    try:
        folder = Path(locate_model(name)[0])
    except ModelNotFound as error:
        raise error.with_key("policy.draft.model_name") from error
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "pytorch_model.bin"]))
    return folder


def load_head(folder: Path, policy_layers: int, policy_head: Tensor) -> EagleHead:
    """Load a head. One without an output layer takes the policy's, [V, H]. Raises ValueError if it is not a head of this policy."""
    try:
        shape = read_shape(json.loads((folder / "config.json").read_text()), policy_layers)
        vocabulary, hidden = policy_head.shape
        if (shape.vocabulary, shape.hidden_size) != (vocabulary, hidden):
            raise ValueError(
                f"it is for a vocabulary of {shape.vocabulary} and hidden states of {shape.hidden_size}, and the policy has "
                f"{vocabulary} and {hidden}"
            )
        if (highest := max(shape.aux_layers)) >= policy_layers:
            raise ValueError(f"it reads the output of layer {highest}, and the policy has {policy_layers} layers")
        head = EagleHead(shape)
        load_head_weights(head, _read_tensors(folder), policy_head)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"{folder} has no EAGLE-3 head for this policy: {error}") from error
    return head


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    with naming_damaged_weights(folder):
        if files:
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
        found: dict[str, Tensor] = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        return found


@torch.no_grad()
def load_head_weights(head: EagleHead, tensors: Mapping[str, Tensor], policy_head: Tensor | None = None) -> None:
    """Copy weights into a head. Its embeddings are the policy's, whatever the checkpoint has. Raises ValueError if some are missing."""
    own: dict[str, Any] = dict(head.named_parameters())
    given = {_canonical_name(name, head.shape.layers): tensor for name, tensor in tensors.items()}
    if head.reduced:
        if "d2t" not in given:
            raise ValueError(f"it proposes {head.shape.draft_vocabulary} tokens, and no tensor d2t says which")
        head.d2t.copy_(given["d2t"])
    if "lm_head.weight" not in given and policy_head is not None:
        head.copy_policy_head(policy_head)
        own.pop("lm_head.weight")
    if missing := sorted(own.keys() - given.keys()):
        raise ValueError(f"it has no {', '.join(missing[:3])}")
    if unknown := sorted(given.keys() - own.keys() - {*MAPS, "embed_tokens.weight", "lm_head.weight"}):
        raise ValueError(f"its {', '.join(unknown[:3])} has no place in a head of {head.shape.layers} layers")
    if broken := sorted(find_not_finite((name, given[name]) for name in own)):
        raise ValueError(f"its {', '.join(broken[:3])} has NaN or infinite values")
    for name, parameter in own.items():
        if parameter.shape != given[name].shape:
            raise ValueError(f"its {name} is {tuple(given[name].shape)}, not {tuple(parameter.shape)}")
        parameter.copy_(given[name])


def _canonical_name(name: str, layers: int) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if layers == 1 and name.startswith("layers.0.") else name
