"""Which layers tensor ranks share where no plan says so: those of mixers, and of attentions and MLPs of a model without a plan."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.learner.parallel.tensor_mixers import HeadLayout, Section, Sections, find_head_layout
from strop.models.layers.known_code import find_form
from strop.models.mixers.mixer_interface import is_mixer

COLWISE, ROWWISE = "colwise", "rowwise"


@dataclass(frozen=True)
class DerivedLayer:
    """A linear layer that tensor ranks share."""

    name: str
    style: str
    sections: Sections = ()  # of its outputs, if they are of several kinds


@dataclass(frozen=True, eq=False)
class DerivedRegion:
    """A module with such layers."""

    name: str
    layers: tuple[DerivedLayer, ...]
    layout: HeadLayout | None = None  # of a mixer
    is_known: bool = False  # by its code, which multiplies the sum of its last layer by a constant at most


def find_mixers(model: nn.Module) -> dict[str, HeadLayout | None]:
    """Return the mixers of a model by name, with where their heads are; None: each rank computes all of them."""
    return {name: find_head_layout(module) for name, module in model.named_modules() if is_mixer(module)}


def derive_mixers(mixers: Mapping[str, HeadLayout | None]) -> Iterator[DerivedRegion]:
    for name, layout in mixers.items():
        if layout is not None:
            colwise = (DerivedLayer(f"{name}.{each}", COLWISE, sections) for each, sections in layout.projections.items())
            rowwise = (DerivedLayer(f"{name}.{each}", ROWWISE) for each in layout.inputs)
            yield DerivedRegion(name, (*colwise, *rowwise), layout)


# Form -> layers sharded by columns, layer sharded by rows.
_MLPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "llama.LlamaMLP": (("gate_proj", "up_proj"), "down_proj"),
    "nemotron_h.NemotronHMLP": (("up_proj",), "down_proj"),
    "falcon_h1.FalconH1MLP": (("gate_proj", "up_proj"), "down_proj"),
    "lfm2.Lfm2MLP": (("w1", "w3"), "w2"),
    "granitemoehybrid.GraniteMoeHybridMLP": (("input_linear",), "output_linear"),
}
_HALVES = "input_linear"  # gate and up in one layer


def derive_attentions_and_mlps(model: nn.Module) -> Iterator[DerivedRegion]:
    for name, module in model.named_modules():
        form = find_form(type(module), tuple(_MLPS))
        found = _MLPS[form] if form is not None else _attention_layers(module)
        if found is not None:
            colwise = (DerivedLayer(f"{name}.{each}", COLWISE, _halves(module, each)) for each in found[0])
            yield DerivedRegion(name, (*colwise, DerivedLayer(f"{name}.{found[1]}", ROWWISE)), is_known=form is not None)


def _halves(module: nn.Module, name: str) -> Sections:
    if name != _HALVES:
        return ()
    layer: Any = module.get_submodule(name)
    size = layer.out_features // 2
    return (Section(size, size, "neurons"),) * 2


def _attention_layers(module: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """Return the layers of an attention that follows a plan, unless it has weights of all heads besides them."""
    if "ALL_ATTENTION_FUNCTIONS" not in inspect.unwrap(type(module).forward).__code__.co_names:
        return None
    children = dict(module.named_children())
    output = next((name for name in ("o_proj", "out_proj") if name in children), None)
    colwise = ("q_proj", "k_proj", "v_proj")
    if output is None or not children.keys() >= {*colwise}:
        return None
    others = [child for name, child in children.items() if name not in (*colwise, output)]
    sizes = [parameter.numel() for child in others for parameter in child.parameters()]
    sizes += [parameter.numel() for parameter in module.parameters(recurse=False)]
    return (colwise, output) if all(size <= getattr(module, "head_dim", 0) for size in sizes) else None
