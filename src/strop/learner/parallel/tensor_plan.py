"""Tensor-parallel plans: which linear layers are sharded over the tensor ranks, by the model's own plan or a custom one.

A plan maps patterns of module names to styles, as in Transformers. Mixers need none, and neither do models of known code
(``derived_plan.py``). A plan defines a list of *regions*: an attention or an MLP whose first
layers are sharded by columns (outputs: heads, neurons) and whose last layers by rows (inputs), so that each tensor rank computes a partial
sum of the region's output. Modules in a region that are not sharded run on every rank and contribute to that rank's partial sum:
their gradient is a partial sum too, regardless of their style in the plan.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from strop.learner.parallel.derived_plan import DerivedRegion, derive_attentions_and_mlps, derive_mixers, find_mixers
from strop.learner.parallel.expert_parallel import check_experts, find_experts
from strop.learner.parallel.parallel_dims import ParallelDims
from strop.learner.parallel.tensor_mixers import HeadLayout, Sections
from strop.models.attention.attention_interface import mixes_tokens
from strop.models.layers.rounded_layers import RoundedLinear
from strop.models.mixers.mixer_interface import is_mixer

TensorPlan = Mapping[str, str]  # pattern -> style; * matches one part of a name
PLAN_KEY = "policy.dtensor_cfg.custom_parallel_plan"

# Style -> whether the outputs of the layer are gathered.
COLWISE_STYLES = {"colwise": False, "colwise_gather_output": True, "colwise_rep": True}
# Style -> whether the inputs of the layer are replicated.
ROWWISE_STYLES = {"rowwise": False, "rowwise_split_input": True, "rowwise_rep": True}
# Styles of layers that are replicated inside a region, like layers without a style.
REPLICATED_STYLES = frozenset({"replicated_with_grad_allreduce", "mla_kv_a_proj"})
STYLES = (*COLWISE_STYLES, *ROWWISE_STYLES, *sorted(REPLICATED_STYLES))


@dataclass(frozen=True, eq=False)
class ShardedLayer:
    """A sharded linear layer; with an adapter, PEFT's wrapper."""

    name: str
    module: nn.Module
    style: str
    sections: Sections = ()  # of the outputs of a mixer's layer

    @property
    def is_colwise(self) -> bool:
        return self.style in COLWISE_STYLES

    @property
    def is_boundary_replicated(self) -> bool:
        """Whether the output of a colwise layer, or the input of a rowwise layer, is replicated."""
        return (COLWISE_STYLES if self.is_colwise else ROWWISE_STYLES)[self.style]

    @property
    def base(self) -> Any:
        return getattr(self.module, "base_layer", self.module)


@dataclass(frozen=True, eq=False)
class Region:
    """A module whose input is replicated over the tensor ranks and whose output is the sum over them."""

    name: str
    module: nn.Module
    layers: tuple[ShardedLayer, ...]
    layout: HeadLayout | None = None  # of a mixer
    is_known: bool = False  # returns its sum, or a multiple of it

    @property
    def mixes_tokens(self) -> bool:
        return mixes_tokens(self.module)


def load_tensor_plan(name: str) -> TensorPlan:
    """Import the plan ``module:NAME`` or ``module.NAME``. Raises ValueError for anything that is not a plan."""
    module, separator, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    if not (module and separator and attribute):
        raise ValueError(
            f"{PLAN_KEY}: {name!r} is not a name of a plan; set it to module:NAME, where NAME is a dictionary in that module"
        )
    try:
        plan: Any = importlib.import_module(module)
        for part in attribute.split("."):
            plan = getattr(plan, part)
    except ImportError as error:
        raise ValueError(
            f"{PLAN_KEY}: {module} of {name!r} cannot be imported ({error}); add its folder to PYTHONPATH in every process"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{PLAN_KEY}: {name!r} does not exist ({error})") from error
    if not (isinstance(plan, Mapping) and plan and all(isinstance(part, str) for item in plan.items() for part in item)):
        raise ValueError(
            f"{PLAN_KEY}: {name!r} is a {type(plan).__name__}, not a plan; a plan is a dictionary of patterns and styles, such as "
            "{'layers.*.mlp.up_proj': 'colwise', 'layers.*.mlp.down_proj': 'rowwise'}"
        )
    return dict(plan)


def check_tensor_plan(model: Any, dims: ParallelDims, plan: TensorPlan | None = None) -> None:
    """Raises ValueError if a model cannot be sharded by ``dims``. Needs the shapes only, so the model may be on the meta device."""
    check_experts(model, dims)
    if dims.tensor > 1:
        find_regions(model, dims, plan)


def find_regions(model: Any, dims: ParallelDims, plan: TensorPlan | None = None) -> list[Region]:
    """Return the checked regions of a model under a plan (None: its own). Raises ValueError as ``check_tensor_plan`` does."""
    mixers = find_mixers(model)
    layers = _planned_layers(model, plan, mixers)
    derived = list(derive_mixers(mixers))
    if plan is None and not layers:
        derived += derive_attentions_and_mlps(model)
    parents: dict[str, list[ShardedLayer]] = {}
    for layer in layers:
        parents.setdefault(layer.name.rpartition(".")[0], []).append(layer)
    regions = [Region(name, model.get_submodule(name), tuple(members)) for name, members in parents.items()]
    regions += [_make_region(model, each) for each in derived]
    if not regions and plan is None and not model.tp_plan:
        raise ValueError(
            f"{type(model).__name__} has no tensor-parallel plan; name one in {PLAN_KEY}, or set tensor_parallel_size=1"
        )
    for region in regions:
        _check_region(region, regions, model, dims)
    if not regions:
        raise ValueError(
            f"tensor_parallel_size is {dims.tensor} and the plan of {type(model).__name__} shards no linear layer; set "
            "tensor_parallel_size=1 and shard only with FSDP"
        )
    if dims.sequence:
        _check_sequence(model, regions)
    return regions


def _make_region(model: Any, derived: DerivedRegion) -> Region:
    layers = tuple(ShardedLayer(each.name, model.get_submodule(each.name), each.style, each.sections) for each in derived.layers)
    return Region(derived.name, model.get_submodule(derived.name), layers, derived.layout, derived.is_known)


# --- from patterns to layers ---------------------------------------------------------------------------------------------


def _planned_layers(model: Any, plan: TensorPlan | None, mixers: Iterable[str]) -> list[ShardedLayer]:
    """Return the layers that a plan shards, in the model's order, without those of mixers."""
    is_default = plan is None
    plan = (model.tp_plan or {}) if plan is None else plan
    experts, elsewhere = find_experts(model), _embedding_and_head(model)
    known = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    styles: dict[str, tuple[str, str]] = {}  # name -> (pattern, style)
    for pattern, style in sorted(plan.items(), key=lambda item: -item[0].count("*")):  # the most specific pattern wins
        names = [name for name in known if _matches(pattern, name, model)]
        if not names and not is_default:
            raise ValueError(f"{PLAN_KEY}: {pattern!r} matches nothing in {type(model).__name__}; correct it, or remove it")
        styles.update((name, (pattern, style)) for name in names if name not in elsewhere and not _is_inside(name, experts))
    modules = dict(model.named_modules())
    divided = [name for name in styles if _is_inside(name, mixers)]
    if divided and not is_default:
        pattern, style = styles[divided[0]]
        raise ValueError(
            f"the tensor-parallel plan gives {divided[0]} (by {pattern!r}) the style {style!r}, and it is part of a recurrent layer, whose "
            f"heads are divided without a plan; name one without it in {PLAN_KEY}"
        )
    styles = {name: each for name, each in styles.items() if name not in divided}
    layers = [ShardedLayer(name, modules[name], styles[name][1]) for name in modules if name in styles]
    for name, (pattern, style) in styles.items():
        _check_style(name, modules.get(name), pattern, style)
    sharded = [layer for layer in layers if layer.style not in REPLICATED_STYLES]
    regions = {layer.name.rpartition(".")[0] for layer in sharded}
    for layer in layers:
        if layer.style in REPLICATED_STYLES and not _is_inside(layer.name, regions):
            raise ValueError(
                f"the tensor-parallel plan gives {layer.name} the style {layer.style!r}, which is valid only between layers sharded by "
                f"columns and by rows, and its neighbours are not sharded; remove it from the plan that {PLAN_KEY} names"
            )
    return sharded


def _check_style(name: str, module: Any, pattern: str, style: str) -> None:
    if style not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan gives {name} (by {pattern!r}) the style {style!r}, which is not supported; supported are "
            f"{', '.join(STYLES)}. Name a plan without it in {PLAN_KEY}, or set tensor_parallel_size=1"
        )
    if style in REPLICATED_STYLES:
        return
    base = getattr(module, "base_layer", module)
    if not isinstance(base, RoundedLinear) and not (isinstance(base, nn.Linear) and type(base).forward is nn.Linear.forward):
        what = "a parameter" if module is None else f"a {type(base).__name__}"
        raise ValueError(
            f"the tensor-parallel plan shards {name} (by {pattern!r}), which is {what}: only linear layers can be sharded; "
            f"name a plan without it in {PLAN_KEY}, or set tensor_parallel_size=1"
        )


def _embedding_and_head(model: Any) -> set[str]:
    """Return the names of the embedding and the output layer, which ``tensor_parallel.py`` divides whatever the plan."""
    ids = {id(model.get_input_embeddings())}
    if (head := model.get_output_embeddings()) is not None:
        ids.add(id(head))
    return {name for name, module in model.named_modules() if id(module) in ids}


def _matches(pattern: str, name: str, model: Any) -> bool:
    """Return whether a pattern matches a name of the model, with or without the prefix of its decoder."""
    expression = "[^.]+".join(re.escape(part) for part in pattern.split("*"))
    short = name.removeprefix(f"{model.base_model_prefix}.")
    return any(re.fullmatch(expression, candidate) for candidate in (name, short))


def _is_inside(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


# --- checks --------------------------------------------------------------------------------------------------------------


def _check_region(region: Region, regions: list[Region], model: Any, dims: ParallelDims) -> None:
    if {layer.is_colwise for layer in region.layers} != {True, False}:
        styles = ", ".join(f"{layer.name.rpartition('.')[2]} {layer.style}" for layer in region.layers)
        raise ValueError(
            f"the tensor-parallel plan shards only {styles} in {region.name}: a partial sum needs layers sharded by columns followed by "
            f"layers sharded by rows, and one of the two is missing; name another plan in {PLAN_KEY}"
        )
    others = [other.name for other in regions if other is not region] + list(find_experts(model))
    if (nested := next((name for name in others if name.startswith(f"{region.name}.")), None)) is not None:
        raise ValueError(
            f"the tensor-parallel plan shards layers of {region.name} and of {nested} inside it, so that the sum would be taken twice; "
            f"name another plan in {PLAN_KEY}"
        )
    if region.layout is None:
        _check_heads(region, model, dims.tensor)
    else:
        _check_mixer(region, region.layout, dims.tensor)
    for layer in region.layers:
        size = layer.base.out_features if layer.is_colwise else layer.base.in_features
        if size % dims.tensor:
            what = "outputs" if layer.is_colwise else "inputs"
            raise ValueError(
                f"tensor_parallel_size {dims.tensor} does not divide the {size} {what} of {layer.name}; set it to a number that does"
            )


def _check_heads(region: Region, model: Any, ranks: int) -> None:
    if not region.mixes_tokens or any(layer.is_boundary_replicated for layer in region.layers):
        return
    config: Any = model.config.get_text_config()
    if getattr(config, "is_heterogeneous", False):  # layers differ in heads (Gemma 4)
        config = config.per_layer_config[region.module.layer_idx]
    counts = {"attention heads": config.num_attention_heads}
    if getattr(config, "kv_lora_rank", None) is None:  # latent attention has keys for every head
        counts["key-value heads"] = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    for what, count in counts.items():
        if count % ranks:
            raise ValueError(
                f"tensor_parallel_size {ranks} does not divide the {count} {what} of {type(model).__name__}, and a head cannot "
                f"be split; set it to one of {', '.join(str(size) for size in range(1, count + 1) if count % size == 0)}"
            )


def _check_mixer(region: Region, layout: HeadLayout, ranks: int) -> None:
    unfit = next((section for section in layout.sections() if not section.fits(ranks)), None)
    if unfit is not None:
        raise ValueError(
            f"tensor_parallel_size {ranks} does not divide the {unfit.count} {unfit.what} of the recurrent layer {region.name}; set it to "
            f"one of {', '.join(map(str, layout.sizes()))}"
        )


def _check_sequence(model: Any, regions: list[Region]) -> None:
    """Check that modules that mix tokens are inside regions, because between regions a rank has only some of the tokens."""
    experts = find_experts(model)
    mixers = {
        name: module
        for name, module in model.named_modules()
        if mixes_tokens(module) and not any(_is_inside(inner, [name]) for inner in experts)
    }
    outside = [name for name in mixers if not _is_inside(name, [region.name for region in regions])]
    if outside and is_mixer(mixers[outside[0]]):
        raise ValueError(
            f"sequence_parallel is true, and {outside[0]} is a recurrent layer that each rank computes whole, from all tokens; set "
            "sequence_parallel=false"
        )
    if outside or not mixers:
        where = outside[0] if outside else "its layers"
        raise ValueError(
            f"sequence_parallel is true, and the tensor-parallel plan of {type(model).__name__} does not shard the attention of {where}, "
            f"which would then see only its own rank's tokens; set sequence_parallel=false, or name a plan that shards it in {PLAN_KEY}"
        )
