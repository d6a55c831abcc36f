"""Checks a load: weights that do not match the model are refused, naming the tensors.

Transformers and PEFT fill missing weights with random numbers, with a warning. Here, every tensor that is missing, unexpected,
of another shape or not finite is an error. Exceptions are tied weights and weights that a model's class declares ignorable
(``_keys_to_ignore_on_load_missing`` and ``..._unexpected``): Transformers leaves both out of its report.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 5  # names of tensors of each kind in a message


class WeightsDoNotFit(ValueError):
    """The weights of a folder do not match the model. The message names the tensors."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The problematic tensors of a load."""

    missing: Collection[str] = ()
    unexpected: Collection[str] = ()
    mismatched: Collection[str] = ()  # names with both shapes
    not_finite: Collection[str] = ()
    unconverted: Collection[str] = ()  # combined from several tensors, such as experts, some of which are missing

    @classmethod
    def of_transformers(cls, info: Mapping[str, Any], model: nn.Module) -> LoadReport:
        """Read the result of ``from_pretrained(..., output_loading_info=True)``, and check the values."""
        shapes = (f"{name} (found {_format_shape(found)}, the model has {_format_shape(own)})" for name, found, own in
                  info["mismatched_keys"])  # fmt: skip
        return cls(
            missing=info["missing_keys"],
            unexpected=info["unexpected_keys"],
            mismatched=list(shapes),
            not_finite=list(find_not_finite(model.state_dict().items())),
        )

    def refuse(self, name: str, kind: str, key: str = "policy.model_name: ") -> None:
        """Raise WeightsDoNotFit if there is any problem. ``name``: folder or hub model; ``kind``: the model's class."""
        kinds = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape": self.mismatched,
            "with NaN or infinite values": self.not_finite,
            "with parts that are missing or do not fit": self.unconverted,
        }
        if found := [f"{what} {_list_names(names)}" for what, names in kinds.items() if names]:
            raise WeightsDoNotFit(f"{key}the weights in {name} do not fit {kind}: {'; '.join(found)}. {self._advise()}")

    def _advise(self) -> str:
        if prefix := _find_prefix(self.missing, self.unexpected):
            return f"Every name begins with {prefix!r}, which a wrapper has added: save the inner model, or rename the tensors"
        if self.not_finite and not (self.missing or self.unexpected or self.mismatched):
            return "Nothing can be computed with them: use an earlier checkpoint, or download or convert the model again"
        return (
            "Missing weights would be random numbers: use a complete copy of the model, or correct its config.json (and "
            "policy.hf_config_overrides), which determines the model's weights"
        )


def find_conversion_errors(error: RuntimeError) -> list[str]:
    """Return the weights that Transformers failed to combine: it logs them, and raises an error that does not name them."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return sorted(getattr(frame.f_locals.get("loading_info"), "conversion_errors", None) or ())


def find_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yield the names of tensors with NaN or infinite values. One pass over memory for those without, and no copy."""
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta or not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.shape)
        if place in seen:  # tied
            continue
        seen.add(place)
        if tensor.dtype.itemsize == 1:  # FP8 has no sum
            tensor = tensor.to(torch.float32)
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():  # a sum may overflow
            yield name


def _list_names(names: Collection[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")


def _format_shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "a single value"


def _find_prefix(missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return the prefix of all unexpected names, if removing it yields missing names."""
    first = next(iter(unexpected), "")
    for name in missing:
        prefix = first.removesuffix(name)
        if prefix != first and all(each.startswith(prefix) and each.removeprefix(prefix) in missing for each in unexpected):
            return prefix
    return None
