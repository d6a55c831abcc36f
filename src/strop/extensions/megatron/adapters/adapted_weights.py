"""Which weights of a model have adapters, and where these are: the same on every rank, without communication."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from strop.extensions.megatron.adapters.adapter_folder import PREFIX
from strop.extensions.megatron.megatron_peft_config import MegatronPeftConfig
from strop.extensions.megatron.weights.weight_map import HfWeight, PlacedWeight, WeightMap
from strop.user_code import suggest_names


@dataclass(frozen=True)
class AdaptedWeight:
    """A weight of the Hugging Face model, the adapter of which is that of a layer of Megatron Core, or shares its A with others."""

    placed: PlacedWeight
    layer: str  # of Megatron Core, counted in the whole model: decoder.layers.7.self_attention.linear_qkv
    dtype: torch.dtype  # of the adapter
    dim: int
    scale: float

    @property
    def name(self) -> str:
        """The name of the Hugging Face model's layer."""
        return self.placed.weight.name.removesuffix(".weight")

    @property
    def local_layer(self) -> str:
        """The name of the layer in its stage."""
        return self.placed.parameter_name().removesuffix(".weight")

    @property
    def down(self) -> PlacedWeight:
        """Where A is, [dim, inputs]."""
        return self._half("lora_A", "linear_in", (self.dim, self.placed.weight.shape[1]), 1)

    @property
    def up(self) -> PlacedWeight:
        """Where B is, [outputs, dim]."""
        return self._half("lora_B", "linear_out", (self.placed.weight.shape[0], self.dim), 0)

    def _half(self, saved: str, inside: str, shape: tuple[int, int], dim: int) -> PlacedWeight:
        rule = self.placed.rule
        parameter = f"{rule.parameter.removesuffix('.weight')}.adapter.{inside}.weight"
        divided = dim if rule.dim == dim else None
        return replace(
            self.placed,
            weight=HfWeight(f"{PREFIX}{self.name}.{saved}.weight", shape, storage=-1),
            rule=replace(rule, parameter=parameter, dim=divided, dtype=self.dtype, aliases=()),
        )


def find_adapted_weights(
    weights: WeightMap, config: MegatronPeftConfig, *, key: str = "megatron_cfg.peft"
) -> list[AdaptedWeight]:
    """Return the weights that get adapters, in the order of the Hugging Face model.

    Raises ValueError for a pattern that matches no linear layer, or only those of experts. Warns of experts, which are not trained.
    """
    linear: dict[str, list[PlacedWeight]] = {}
    experts: dict[str, None] = {}
    for placed in weights.weights:
        if placed.layer is None or not re.fullmatch(r".*\.linear_\w+\.weight", placed.rule.parameter):
            continue
        layer = re.sub(r"^layers\.", f"decoder.layers.{placed.layer}.", placed.rule.parameter.removesuffix(".weight"))
        if placed.rule.of_experts:
            experts[layer.replace("{expert}", "*")] = None
        elif placed.rule.dim is not None:
            linear.setdefault(layer, []).append(placed)
    selected = _match(f"{key}.target_modules", config.target_modules, linear, experts) if config.target_modules else set(linear)
    selected -= _match(f"{key}.exclude_modules", config.exclude_modules, linear, experts)
    if not selected:
        raise ValueError(f"{key}: of the {len(linear)} linear layers none is left for an adapter; list fewer in exclude_modules")
    if experts:
        warnings.warn(f"{key}: the experts get no adapters and are not trained", stacklevel=2)
    return [
        AdaptedWeight(
            placed,
            layer,
            torch.promote_types(weights.dtype(placed), torch.float32),
            config.dim,
            config.alpha / config.dim,
        )
        for layer, parts in linear.items()
        for placed in parts
        if layer in selected
    ]


def _match(
    key: str, patterns: Sequence[str], linear: Mapping[str, Sequence[PlacedWeight]], experts: Mapping[str, None]
) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        matched = {name for name in linear if matches(pattern, name)}
        if not matched and any(matches(pattern, name) for name in experts):
            raise ValueError(
                f"{key}: {pattern!r} matches only linear layers of experts, which can have no adapters here; remove it (all others: "
                f"{', '.join(sorted({name.rpartition('.')[2] for name in linear}))})"
            )
        if not matched:
            kinds = {name.rpartition(".")[2] for name in linear}
            raise ValueError(f"{key}: {pattern!r} matches nothing{suggest_names(pattern, kinds)}")
        found |= matched
    return found


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern is a layer's full name, its end after a dot, or with * ? or [ the full name as a shell pattern."""
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)
