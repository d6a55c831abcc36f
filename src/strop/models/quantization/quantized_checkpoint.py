"""Checkpoints with quantised weights: dequantised while they are loaded (``policy.dequantize_base_checkpoint``).

FP8 weights are multiplied by the scales stored with them: ``weight_scale_inv`` of blocks (DeepSeek-V3, arXiv 2412.19437), or
``weight_scale`` of rows or the tensor (compressed-tensors). They are read here, because Transformers 5.19 mishandles the last
blocks of a weight whose size is not a multiple of the block size. MXFP4 (gpt-oss) is left to Transformers. The trained and saved
model is an ordinary one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

KEY = "policy.dequantize_base_checkpoint"
METHODS = ("compressed-tensors", "fp8", "mxfp4")
_SCALES = ("_scale_inv", "_scale")
_INPUT_SCALES = (".activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale")


class QuantizedCheckpoint(ValueError):
    """A checkpoint with quantised weights cannot be loaded as requested."""


def find_method(config: Any) -> str | None:
    """Return the quantisation method of a checkpoint from its model configuration; None if it is not quantised."""
    found = _section(config)
    return None if found is None else str(found.get("quant_method", "an unknown way"))


def _section(config: Any) -> Mapping[str, Any] | None:
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def check_quantized(name: str, config: Any, *, dequantize: bool) -> str | None:
    """Return the quantisation method of a checkpoint, None if it is not quantised. Raises QuantizedCheckpoint if dequantisation
    is needed, but off or unsupported.
    """
    method = find_method(config)
    if method is None:
        return None
    if not dequantize:
        raise QuantizedCheckpoint(
            f"policy.model_name: the weights of {name} are quantised ({method}), and training changes weights by less than their rounding; "
            f"set {KEY}=true to dequantise them while they are loaded"
        )
    if method not in METHODS:
        raise QuantizedCheckpoint(
            f"policy.model_name: the weights of {name} are quantised ({method}), and only {', '.join(METHODS)} are dequantised; set "
            "policy.model_name to a dequantised copy of the model"
        )
    log.info("%s: the weights are dequantised from %s", name, method)
    return method


def dequantizing_options(config: Any) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that make Transformers dequantise MXFP4."""
    from transformers import Mxfp4Config

    section = dict(_section(config) or {})
    return {"quantization_config": Mxfp4Config(modules_to_not_convert=section.get("modules_to_not_convert"), dequantize=True)}


def read_dequantized(folder: Path, config: Any) -> dict[str, Tensor]:
    """Return the weights of a folder with safetensors by name, in float32. Raises QuantizedCheckpoint for a weight without its scale."""
    block = _block_size(_section(config) or {})
    return dict(_iter_dequantized(folder, block))


def _block_size(section: Mapping[str, Any]) -> tuple[int, int] | None:
    if (size := section.get("weight_block_size")) is not None:
        return int(size[0]), int(size[1])
    for group in (section.get("config_groups") or {}).values():
        if (size := (group.get("weights") or {}).get("block_structure")) is not None:
            return int(size[0]), int(size[1])
    return None


def _iter_dequantized(folder: Path, block: tuple[int, int] | None) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    places = _find_tensors(folder)
    for file in dict.fromkeys(places.values()):
        with safe_open(file, "pt") as stored:
            for name in [each for each, place in places.items() if place == file]:
                if name.endswith((*(f".weight{end}" for end in _SCALES), *_INPUT_SCALES)):
                    continue
                tensor = stored.get_tensor(name)
                yield name, _dequantize(name, tensor, _read_scale(name, places), block)


def _find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor, by name."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    if index.exists():
        listed: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in listed.items()}
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            places |= dict.fromkeys(stored.keys(), file)
    return places


def _read_scale(name: str, places: Mapping[str, Path]) -> Tensor | None:
    from safetensors import safe_open

    scale = next((f"{name}{end}" for end in _SCALES if f"{name}{end}" in places), None)
    if scale is None:
        return None
    with safe_open(places[scale], "pt") as stored:
        found: Tensor = stored.get_tensor(scale)
    return found


def _dequantize(name: str, tensor: Tensor, scale: Tensor | None, block: tuple[int, int] | None) -> Tensor:
    if tensor.is_floating_point() and tensor.itemsize > 1:
        return tensor.float()
    if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or scale is None:
        what = f"{tensor.dtype}, without a scale next to it" if scale is None else f"{tensor.dtype}, which is not FP8"
        raise QuantizedCheckpoint(f"policy.model_name: the weight {name} is {what}; set policy.model_name to a dequantised copy")
    return tensor.float() * _spread(name, scale.float(), tensor.shape, block)


def _spread(name: str, scale: Tensor, shape: torch.Size, block: tuple[int, int] | None) -> Tensor:
    """Return the factor of each value, from scales [] or [1] of the tensor, [N] or [N, 1] of rows, or of blocks, the last of
    which may be cut.
    """
    if scale.numel() == 1:
        return scale.reshape(())
    rows, columns = shape[-2:]
    if scale.shape in ((rows,), (rows, 1)):
        return scale.reshape(rows, 1)
    if block is None or scale.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise QuantizedCheckpoint(
            f"policy.model_name: the weight {name} {tuple(shape)} has scales {tuple(scale.shape)}, which are neither of the tensor, of its "
            f"rows nor of blocks of {block}; set policy.model_name to a dequantised copy"
        )
    return scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def forget_quantization(model: Any) -> None:
    """Turn a dequantised model into an ordinary one, which is saved without quantisation."""
    for owner, name in ((model, "_weight_conversions"), (model.config, "quantization_config")):
        if name in vars(owner):
            delattr(owner, name)
    model.hf_quantizer = None
    model.is_quantized = False
