"""The adapters of the stages of a rank: made, read, merged, switched off, gathered under PEFT's names, and stored in any layout."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.megatron.adapter_folder import PREFIX, AdapterFolder, make_peft_config
from strop.extensions.megatron.megatron_config import MegatronPeftConfig
from strop.extensions.megatron.models.adapted_linear import ParallelAdapter, make_room
from strop.extensions.megatron.models.gpt_stage import GptStage
from strop.extensions.megatron.weight_map import (
    HfWeight,
    MemoryWeights,
    PlacedWeight,
    WeightMap,
    WeightReader,
    gather_weight,
    iter_weights,
    load_weight,
)
from strop.models.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config
from strop.user_code import suggest_names
from strop.weight_sync.weight_source import Weight


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
        if placed.layer is None or not re.fullmatch(r".*\.(linear_\w+|\w+_proj)\.weight", placed.rule.parameter):
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


dist: Any = torch.distributed
_UNIFORM = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
INITIALISERS: dict[str, Callable[..., Tensor]] = {"xavier": nn.init.xavier_normal_, "uniform": _UNIFORM, "kaiming": _UNIFORM}


class StageAdapters:
    """The adapters of a model, of which this rank has those of its stages. Everything else of the model is frozen but a score layer."""

    def __init__(
        self,
        stages: Sequence[GptStage],
        hf_config: Any,
        config: MegatronPeftConfig,
        *,
        base: str,
        seed: int = 0,
        key: str = "megatron_cfg.peft",
    ) -> None:
        """Add adapters to stages with their weights, in their layout. The model's outputs do not change.

        The adapters depend on ``seed`` and the names of their layers, not on the layout. ``base``: the name that the model is loaded by.
        Raises ValueError on all ranks for patterns that match nothing, or leave a rank without an adapter.
        """
        self.stages, self.hf_config, self.config, self.base = list(stages), hf_config, config, base
        self.scores = stages[0].head == "scalar"
        weights = WeightMap(stages, hf_config)
        self.adapted = find_adapted_weights(weights, config, key=key)
        self._by_name = {each.placed.weight.name: each for each in self.adapted}
        self._by_weight: dict[int, ParallelAdapter] = {}  # by the id of the layer's weight
        for stage in self.stages:
            stage.requires_grad_(False)
        for each in filter(lambda each: weights.is_local(each.placed), self.adapted):
            linear: Any = self.stages[each.placed.place.stage].get_submodule(each.local_layer)
            if id(linear.weight) not in self._by_weight:
                if not hasattr(linear, "add_adapter"):
                    make_room(linear)
                gated = each.layer.endswith("linear_fc1") and stages[0].config.gated_linear_unit
                self._by_weight[id(linear.weight)] = linear.add_adapter(config, gated=gated)
        self._check_ranks(key)
        self.weights = WeightMap(stages, hf_config)  # with the adapters
        self.load(_InitialAdapters(self.adapted, config, seed))
        for score in (stage.score for stage in self.stages if self.scores and stage.post_process):
            score.requires_grad_(True)

    def _check_ranks(self, key: str) -> None:
        count = torch.tensor(len(self._by_weight), device=torch.cuda.current_device())
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        if not count.item():
            raise ValueError(
                f"{key}.target_modules: the layers that match are not in every pipeline stage, and a rank without an adapter has nothing "
                "to train; choose layers of all stages, or lower pipeline_model_parallel_size"
            )

    @property
    def modules(self) -> Sequence[ParallelAdapter]:
        """The adapters of this rank."""
        return list(self._by_weight.values())

    # --- passes -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Read with only the base: bitwise what it was before it had adapters."""
        for adapter in self.modules:
            adapter.enabled = False
        try:
            yield
        finally:
            for adapter in self.modules:
                adapter.enabled = True

    def set_training_pass(self, training: bool) -> None:
        """Say whether the next pass has dropout. (Gradients do not say it: a layer that is recomputed has its first pass without.)"""
        for adapter in self.modules:
            adapter.training_pass = training

    # --- weights ----------------------------------------------------------------------------------------------------------

    def iter_merged(self) -> Iterator[Weight]:
        """Yield the weights of the ordinary model with the adapters merged in, in at least float32. ``gather`` is a collective."""
        return iter_weights(self.stages, self.hf_config, self._merge, self._place)

    def _place(self, placed: PlacedWeight) -> PlacedWeight:
        adapted = self._by_name.get(placed.weight.name)
        return placed if adapted is None else replace(placed, rule=replace(placed.rule, dtype=adapted.dtype))

    def _merge(self, parameter: Tensor) -> Tensor:
        adapter = self._by_weight.get(id(parameter))
        return parameter.detach() if adapter is None else adapter.merged_weight(parameter)

    def iter_halves(self) -> Iterator[tuple[AdaptedWeight, PlacedWeight]]:
        """Yield A and B of each weight; those of one layer of Megatron Core have the same A."""
        for each in self.adapted:
            yield from ((each, each.down), (each, each.up))

    def gather(self) -> dict[str, Tensor]:
        """Gather the trained weights under the names of PEFT's files. All ranks must call it."""
        tensors = {half.weight.name: gather_weight(half, self.weights) for _, half in self.iter_halves()}
        return tensors | {half.weight.name: gather_weight(half, self.weights) for half in self._score_layer()}

    def load(self, reader: WeightReader) -> None:
        """Copy this rank's parts from PEFT's files. A score layer that they lack stays as it is."""
        with torch.no_grad():
            for _, half in self.iter_halves():
                if self.weights.is_local(half):
                    load_weight(half, half.weight.name, self.weights, reader)
            for half in self._score_layer():
                if self.weights.is_local(half) and half.weight.name in reader:
                    load_weight(half, half.weight.name, self.weights, reader)

    def _score_layer(self) -> list[PlacedWeight]:
        """Where the score layer is, which is trained whole and saved with the adapters."""
        return [
            replace(placed, weight=replace(placed.weight, name=f"{PREFIX}{placed.weight.name}"))
            for placed in self.weights.weights
            if self.scores and placed.rule.parameter == "score.weight"
        ]


class _InitialAdapters:
    """Draws the adapters of a new run: A at random, B zero."""

    def __init__(self, adapted: Sequence[AdaptedWeight], config: MegatronPeftConfig, seed: int) -> None:
        self._downs = {each.down.weight.name: each for each in adapted}
        self._ups = {each.up.weight.name: each for each in adapted}
        self._draw, self._seed = INITIALISERS[config.lora_A_init_method], seed

    def __contains__(self, name: str) -> bool:
        return name in self._downs or name in self._ups

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        if name in self._ups:
            return torch.zeros(self._ups[name].up.weight.shape)[index]
        each = self._downs[name]
        digest = hashlib.blake2b(f"{self._seed} {each.layer}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return self._draw(torch.empty(each.down.weight.shape), generator=generator)[index]


def gather_adapters(adapters: StageAdapters, *, copies: bool = False) -> AdapterFolder:
    """Gather the adapters of all stages. All ranks must call it, in their layout. ``copies``: they may be written during training."""
    tensors = adapters.gather()
    if copies:
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
    names = [each.name for each in adapters.adapted]
    config = make_peft_config(
        names,
        {placed.weight.name.removesuffix(".weight") for placed in adapters.weights.weights} - set(names),
        base=adapters.base,
        model_type=adapters.hf_config.model_type,
        dim=adapters.config.dim,
        alpha=adapters.config.alpha,
        dropout=adapters.config.dropout,
        scores=adapters.scores,
    )
    return AdapterFolder(tensors, config, adapters.hf_config.to_json_string())


def load_adapter_folder(adapters: StageAdapters, folder: Path, *, key: str = "megatron_cfg.peft") -> None:
    """Load adapters that a run with any layout saved, in place. Raises ValueError if they do not fit; warns of another base."""
    from safetensors.torch import load_file

    if not (folder / CONFIG_FILE).exists():
        raise ValueError(
            f"{folder} holds no adapters (no {CONFIG_FILE}), and this run trains adapters; set {key}.enabled=false to continue it, or "
            "start with another checkpointing.checkpoint_dir"
        )
    saved, own = read_adapter_config(folder), adapters.config
    for name, option, current in (("r", "dim", own.dim), ("lora_alpha", "alpha", own.alpha)):
        if saved.get(name) != current:
            raise ValueError(
                f"the adapters in {folder} have {name} = {saved.get(name)}, and this run's have {current}; set {key}.{option} as it was "
                "when they were saved"
            )
    stored = load_file(folder / WEIGHTS_FILE)
    names = {half.weight.name: half.weight.shape for _, half in adapters.iter_halves()}
    wrong = sorted(name for name in names if name not in stored or tuple(stored[name].shape) != names[name])
    extra = sorted(name for name in stored if ".lora_" in name and name not in names)
    if wrong or extra:
        raise ValueError(
            f"the adapters in {folder} do not fit those of this run; they differ in {', '.join([*wrong, *extra][:3])}; set {key} as it "
            "was when they were saved, or start with another checkpointing.checkpoint_dir"
        )
    _check_shared(adapters, stored, folder)
    if (base := saved.get("base_model_name_or_path")) != adapters.base:
        warnings.warn(
            f"the adapters in {folder} were trained on {base}, and this run adds them to {adapters.base}: they are valid only if both "
            "have the same weights",
            stacklevel=2,
        )
    adapters.load(MemoryWeights(stored))


def _check_shared(adapters: StageAdapters, stored: Mapping[str, Tensor], folder: Path) -> None:
    """Raise ValueError if layers that are one of Megatron Core's have different A: the torch learner trained them."""
    first: dict[str, str] = {}
    for each in adapters.adapted:
        name = each.down.weight.name
        other = first.setdefault(each.layer, name)
        if other != name and not stored[other].equal(stored[name]):
            raise ValueError(
                f"the adapters in {folder} have another A in {name} than in {other}, which share one in Megatron Core's "
                f"{each.layer.rpartition('.')[2]}: continue with policy.backend=torch"
            )
