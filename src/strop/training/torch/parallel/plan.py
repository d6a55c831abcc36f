"""Which linear layers of a model are divided among the tensor ranks, and how: the model's own plan, or one by its dotted name.

A plan maps patterns of module names to styles, as Transformers' plans do. What it means here is a list of *regions*: an attention or an
MLP whose first layers are divided by columns (of outputs: heads, neurons) and whose last ones by rows (of inputs), so that each tensor
rank computes a part of the sum that the region returns. Everything inside that is not divided runs whole on every rank, on the way to
that rank's part: its gradient is a part of the sum too, whatever the plan says of it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.models.attention import mixes_tokens
from strop.training.torch.parallel.experts import check_experts, experts_of
from strop.training.torch.parallel.layout import ParallelSizes

Plan = Mapping[str, str]  # pattern -> style; * is one part of a name
KEY = "policy.dtensor_cfg.custom_parallel_plan"

COLUMNS = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}  # whether the outputs are gathered after it
ROWS = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}  # whether the inputs are whole before it
WHOLE = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj"})  # runs whole inside a region, which needs no style
STYLES = (*COLUMNS, *ROWS, *sorted(WHOLE))


@dataclass(frozen=True, eq=False)
class Layer:
    """One divided linear layer; with an adapter, PEFT's layer around it."""

    name: str
    module: nn.Module
    style: str

    @property
    def by_columns(self) -> bool:
        return self.style in COLUMNS

    @property
    def outside_whole(self) -> bool:
        """Whether what comes out of columns, or goes into rows, is whole."""
        return (COLUMNS if self.by_columns else ROWS)[self.style]

    @property
    def base(self) -> Any:
        return getattr(self.module, "base_layer", self.module)


@dataclass(frozen=True, eq=False)
class Region:
    """A module whose input every tensor rank reads whole, and whose output is the sum of theirs."""

    name: str
    module: nn.Module
    layers: tuple[Layer, ...]

    @property
    def mixes_tokens(self) -> bool:
        return mixes_tokens(self.module)


def load_plan(name: str) -> Plan:
    """The plan that ``module:NAME`` or ``module.NAME`` names. Raises ValueError that says what is there instead."""
    module, separator, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and separator and attribute):
        raise ValueError(f"{KEY}: {name!r} names no plan; set it to module:NAME, where NAME is a dictionary in that module")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except ImportError as error:
        raise ValueError(
            f"{KEY}: {module} of {name!r} cannot be imported ({error}); put its folder on PYTHONPATH in every process"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{KEY}: {name!r} is not there ({error})") from error
    if not (isinstance(found, Mapping) and found and all(isinstance(part, str) for item in found.items() for part in item)):
        raise ValueError(
            f"{KEY}: {name!r} is a {type(found).__name__} and no plan; a plan is a dictionary of patterns and styles, such as "
            "{'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise'}"
        )
    return dict(found)


def check_plan(model: Any, sizes: ParallelSizes, plan: Plan | None = None) -> None:
    """Raise ValueError where a model cannot be divided by these sizes, with what was found and what to set. Needs shapes alone."""
    check_experts(model, sizes)
    if sizes.tensor > 1:
        regions_of(model, sizes, plan)


def regions_of(model: Any, sizes: ParallelSizes, plan: Plan | None = None) -> list[Region]:
    """The regions of a model under a plan (None: its own), checked. Raises ValueError as ``check_plan`` does."""
    layers = _planned(model, plan)
    parents: dict[str, list[Layer]] = {}
    for layer in layers:
        parents.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    regions = [Region(name, model.get_submodule(name), tuple(found)) for name, found in parents.items()]
    for region in regions:
        _check_region(region, regions, model, sizes)
    if not regions:
        raise ValueError(
            f"tensor_parallel_size is {sizes.tensor} and the plan of {type(model).__name__} divides no linear layer; set "
            "tensor_parallel_size=1 and shard with FSDP alone"
        )
    if sizes.sequence:
        _check_sequence(model, regions)
    return regions


# --- from patterns to layers ---------------------------------------------------------------------------------------------


def _planned(model: Any, plan: Plan | None) -> list[Layer]:
    """The layers that are divided, in the model's order."""
    own = plan is None
    if plan is None and not (plan := model.tp_plan):
        raise ValueError(
            f"{type(model).__name__} brings no tensor-parallel plan; name one in {KEY}, or set tensor_parallel_size=1"
        )
    experts, ends = experts_of(model), _ends(model)
    chosen: dict[str, tuple[str, str]] = {}  # name -> (pattern, style)
    for pattern, style in sorted(plan.items(), key=lambda item: -item[0].count("*")):  # the most specific one counts
        names = [name for name in _names(model) if _matches(pattern, name, model)]
        if not names and not own:
            raise ValueError(f"{KEY}: {pattern!r} matches nothing in {type(model).__name__}; correct it, or leave it out")
        chosen.update((name, (pattern, style)) for name in names if name not in ends and not _inside(name, experts))
    modules = dict(model.named_modules())
    layers = [Layer(name, modules[name], chosen[name][1]) for name in modules if name in chosen]
    for name, (pattern, style) in chosen.items():
        _check_choice(name, modules.get(name), pattern, style)
    divided = [layer for layer in layers if layer.style not in WHOLE]
    regions = {layer.name.rpartition(".")[0] for layer in divided}
    for layer in layers:
        if layer.style in WHOLE and not _inside(layer.name, regions):
            raise ValueError(
                f"the tensor-parallel plan gives {layer.name} the style {layer.style!r}, which means something only between layers "
                f"divided by columns and by rows, and its neighbours are not; leave it out of the plan that {KEY} names"
            )
    return divided


def _check_choice(name: str, module: Any, pattern: str, style: str) -> None:
    if style not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan divides {name} (by {pattern!r}) in the style {style!r}, for which there is no rule; known are "
            f"{', '.join(STYLES)}. Name a plan without it in {KEY}, or set tensor_parallel_size=1"
        )
    if style in WHOLE:
        return
    base = getattr(module, "base_layer", module)
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        what = "a parameter" if module is None else f"a {type(base).__name__}"
        raise ValueError(
            f"the tensor-parallel plan divides {name} (by {pattern!r}), which is {what}: only linear layers can be divided; "
            f"name a plan without it in {KEY}, or set tensor_parallel_size=1"
        )


def _ends(model: Any) -> set[str]:
    """The embedding and the output layer, which stay whole: each rank reads some of the tokens."""
    ends = {id(model.get_input_embeddings())}
    if (head := model.get_output_embeddings()) is not None:
        ends.add(id(head))
    return {name for name, module in model.named_modules() if id(module) in ends}


def _names(model: nn.Module) -> Iterator[str]:
    yield from (name for name, _ in model.named_modules())
    yield from (name for name, _ in model.named_parameters())


def _matches(pattern: str, name: str, model: Any) -> bool:
    """Whether a pattern of the whole model or of its decoder means this name."""
    expression = "[^.]+".join(re.escape(part) for part in pattern.split("*"))
    short = name.removeprefix(f"{model.base_model_prefix}.")
    return any(re.fullmatch(expression, candidate) for candidate in (name, short))


def _inside(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


# --- what cannot be divided ----------------------------------------------------------------------------------------------


def _check_region(region: Region, regions: list[Region], model: Any, sizes: ParallelSizes) -> None:
    if {layer.by_columns for layer in region.layers} != {True, False}:
        found = ", ".join(f"{layer.name.rpartition('.')[2]} {layer.style}" for layer in region.layers)
        raise ValueError(
            f"the tensor-parallel plan divides in {region.name} only {found}: a part of a sum comes from layers divided by columns "
            f"followed by ones divided by rows, and here one of the two is missing; name another plan in {KEY}"
        )
    others = [other.name for other in regions if other is not region] + list(experts_of(model))
    if (nested := next((name for name in others if name.startswith(f"{region.name}.")), None)) is not None:
        raise ValueError(
            f"the tensor-parallel plan divides layers of {region.name} and of {nested} inside it, so that a sum would be taken twice; "
            f"name another plan in {KEY}"
        )
    _check_heads(region, model, sizes.tensor)
    for layer in region.layers:
        size = layer.base.out_features if layer.by_columns else layer.base.in_features
        if size % sizes.tensor:
            what = "outputs" if layer.by_columns else "inputs"
            raise ValueError(
                f"tensor_parallel_size {sizes.tensor} does not divide the {size} {what} of {layer.name}; set it to a number that does"
            )


def _check_heads(region: Region, model: Any, ways: int) -> None:
    if not region.mixes_tokens or any(layer.outside_whole for layer in region.layers):
        return
    config = model.config.get_text_config()
    counts = {"attention heads": config.num_attention_heads}
    if getattr(config, "kv_lora_rank", None) is None:  # latent attention has keys for every head
        counts["key-value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in counts.items():
        if count % ways:
            raise ValueError(
                f"tensor_parallel_size {ways} does not divide the {count} {what} of {type(model).__name__}, and each rank needs whole "
                f"ones; set it to a divisor of {count}"
            )


def _check_sequence(model: Any, regions: list[Region]) -> None:
    """Between regions a rank has some of the tokens, so whatever reads several of them must lie in one."""
    experts = experts_of(model)
    mixers = {
        name: module
        for name, module in model.named_modules()
        if mixes_tokens(module) and not any(_inside(inner, [name]) for inner in experts)
    }
    outside = [name for name in mixers if not _inside(name, [region.name for region in regions])]
    if outside or not mixers:
        where = outside[0] if outside else "its layers"
        raise ValueError(
            f"sequence_parallel is true, and the tensor-parallel plan of {type(model).__name__} leaves the attention of {where} whole, "
            f"which would see only its own rank's tokens; set sequence_parallel=false, or name a plan that divides it in {KEY}"
        )
