"""A network sharded over several ranks (FSDP2, HSDP): micro-batches are distributed and gradients summed.

Losses are normalized by counts of the full optimizer step, so the ranks' gradients are summed not averaged. The optimizer steps the
local shards: plain tensors that share the memory of FSDP's DTensors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from strop import metrics
from strop.data.shares import BatchShare, ShareRequest, SplitRule, take_share
from strop.device_copies import is_gpu
from strop.learner.muon import Muon
from strop.learner.parallel import sharded_checkpoint
from strop.learner.parallel.context.sample_sharding import SampleSharding
from strop.learner.parallel.micro_batch import LocalOutputs, MicroBatch, OutputsT, make_dummy, run_in_turn, tensor_fields
from strop.learner.parallel.parallel_dims import DeviceMeshes, ParallelDims
from strop.learner.parallel.parallelism import NamedParameters, RankLayers
from strop.learner.parallel.rank_zero_loading import any_rank, broadcast_weights, is_meta_model, to_meta
from strop.learner.parallel.shard_files import is_elsewhere, storage_key
from strop.learner.training_state import TrainingState
from strop.metrics import Metrics
from strop.models.adapters import adapter_weights, lora_layers, merged_weights, weights_with_layers
from strop.models.layers.compiled_layers import use_learner_layers
from strop.models.layers.known_code import decoder_layers
from strop.models.loading import cast_weights
from strop.models.network import Network
from strop.models.value_network import ValueHead
from strop.types import Batch

dist: Any = torch.distributed
log = logging.getLogger(__name__)

WHOLE_SHARE = 0.25  # of a GPU's memory that whole weights and gradients may take between the micro-batches of a step

# Elementwise optimizers, by the name of the class or a base class.
ELEMENTWISE_OPTIMIZERS = frozenset(
    {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "SGD", "RMSprop", "Rprop", "ASGD", "Lion"}
)
# Suffixes of the elementwise optimizers with quantized state in bitsandbytes and torchao.
QUANTIZED_STATE_SUFFIXES = ("8bit", "4bit", "Fp8")


def parallelize_network(network: Network, meshes: DeviceMeshes, **options: Any) -> Sharded:
    """Shard a network over the ranks of ``meshes``, in place. Pipeline stages are handled by ``parallelize_stages``.

    All ranks must call it with the same full network, which may be on the meta device on all but the first rank (``load_on_rank_zero``).
    Freeze parameters before the call. ``options``: those of ``ShardingOptions``. Raises ValueError for a network that cannot be sharded
    this way.
    """
    return Sharded(network, meshes, shard_network(network, meshes, ShardingOptions(**options)))


@dataclass(frozen=True)
class ShardingOptions:
    """Options of ``parallelize_network`` and ``parallelize_stages``."""

    weights_dtype: torch.dtype | None = (
        None  # of weights as they are saved and sent; trained ones are float32 shards; None: their own
    )
    gather_dtype: torch.dtype | None = None  # of float32 shards when they are gathered; None: weights_dtype
    cpu_offload: bool = False  # keep shards, gradients and the optimizer state in CPU memory
    tensor_plan: Mapping[str, str] | None = None  # replaces the model's own tensor-parallel plan
    reshard_after_forward: Literal["auto"] | bool = (
        True  # false: weights and gradients stay whole until a step's last micro-batch
    )


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A sharded model."""

    root: Any  # FSDP's root module
    partial: frozenset[str]  # parameters whose gradients are partial sums on tensor ranks
    param_dtype: torch.dtype | None  # of trained weights as they are saved and sent; None: that of the shards
    gather_dtype: torch.dtype | None  # of trained weights in the passes; None: that of the shards
    stays_whole: bool = False  # weights and gradients between the micro-batches of a step


def shard_network(
    network: Network, meshes: DeviceMeshes, options: ShardingOptions, elsewhere: frozenset[str] = frozenset()
) -> ShardedModel:
    """Shard the model of a network, in place. The parameters ``elsewhere``, which other pipeline stages have, stay on the meta
    device as descriptions."""
    check_parallelizable(network, meshes.dims)
    model: nn.Module = network.model
    policy = _apply_dtypes(model, options.weights_dtype, options.gather_dtype)
    any_meta = any_rank(is_meta_model(model))
    weights = to_meta(model) if any_meta and not is_meta_model(model) else {}
    if not any_meta and meshes.dims.tensor * meshes.dims.expert > 1:
        model.to(_local_device(meshes))  # tensor and expert shards must be on the device of their mesh
    if not any_meta:
        to_meta(model, elsewhere)
    partial, experts = _shard_layers(model, meshes, options.tensor_plan)
    stays_whole = _stays_whole(model, meshes, options, policy)
    offload = CPUOffloadPolicy() if options.cpu_offload and meshes.dense.device_type != "cpu" else OffloadPolicy()
    fsdp_options: dict[str, Any] = {
        "mp_policy": policy,
        "offload_policy": offload,
        "shard_placement_fn": _make_shard_placement(meshes),
    }
    ignored = {parameter for name, parameter in model.named_parameters() if name in elsewhere}
    for name, module in list(model.named_modules()):
        if name in experts and ignored.isdisjoint(module.parameters()):
            _fully_shard(module, meshes.expert_fsdp, fsdp_options)
    layers = decoder_layers(network.decoder)
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    apart = ignored | {parameter for parameter, count in uses.items() if count > 1}  # of several layers (Zamba): with the root
    for layer in layers:
        if apart.isdisjoint(layer.parameters()):
            _fully_shard(layer, meshes.fsdp, fsdp_options)
    fsdp_options |= {"mp_policy": replace(policy, cast_forward_inputs=False), "ignored_params": ignored}
    root = _fully_shard(FsdpRoot(model), meshes.fsdp, fsdp_options)
    if stays_whole:
        root.set_reshard_after_forward(False)
    if network.vision is not None and meshes.dims.sample * meshes.dims.pipeline * meshes.dims.tensor > 1:
        network.disable_vision(
            "its tokens or layers are divided: set tensor, context and pipeline parallel sizes to 1 to read images"
        )
    if meshes.dims.sample * meshes.dims.pipeline > 1:
        network.token_sharding = SampleSharding(meshes)
    network.device = _local_device(meshes)
    if any_meta:
        shard_device = torch.device("cpu") if isinstance(offload, CPUOffloadPolicy) else network.device
        broadcast_weights(root, model, weights, network.device, shard_device, elsewhere)
    saved_dtype = None if options.weights_dtype is None else policy.param_dtype
    return ShardedModel(root, partial, saved_dtype, policy.param_dtype, stays_whole)


def parallelize_head(head: ValueHead, trunk: Sharded) -> Sharded:
    """Shard a critic that is a head on the policy's trunk. All ranks must call it with the same head, after the policy was
    sharded.
    """
    meshes = trunk.meshes
    if meshes.dims.pipeline > 1:
        raise ValueError(
            "value.head_only is true, and with pipeline_parallel_size > 1 only the last stage has the hidden states read by such a "
            "critic; set value.head_only=false, or policy.dtensor_cfg.pipeline_parallel_size=1"
        )
    head.device = trunk.device
    head.model.to(trunk.device)
    root = _fully_shard(FsdpRoot(head.model), meshes.fsdp, {})
    head.compute_hidden = trunk.hidden
    partial = frozenset(name for name, _ in head.model.named_parameters() if meshes.dims.tensor > 1)
    return Sharded(head, meshes, ShardedModel(root, partial, None, None, trunk.stays_whole), trunk=trunk)


def check_parallelizable(network: Network, dims: ParallelDims) -> None:
    """Raises ValueError for a network that cannot be sharded by ``dims``."""
    if not network.packed and (dims.sample > 1 or dims.expert > 1):
        raise ValueError(
            f"{type(network.model).__name__} reads padded rows ({network.fallback or 'as configured'}), and context, tensor and expert "
            "parallelism need packed rows; set their sizes to 1 and use only data parallelism"
        )


def _apply_dtypes(model: nn.Module, weights_dtype: torch.dtype | None, gather_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Cast the weights to the dtypes of their shards and return the policy for gathering them."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if weights_dtype is None and (low_precision := {parameter.dtype for parameter in trained} & {torch.bfloat16, torch.float16}):
        raise ValueError(
            f"trained weights are {low_precision.pop()}: an optimizer would lose small updates; pass that dtype as weights_dtype"
        )
    float32_names = sorted(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if weights_dtype is None:
        if gather_dtype is None or not float32_names:
            return MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=torch.float32 if gather_dtype else None)
        log.info("%s requires %s in float32: all weights are gathered in float32", type(model).__name__, float32_names)
        return MixedPrecisionPolicy()
    if lora_layers(model) or not trained:
        for name, parameter in model.named_parameters():  # adapters are float32, and so is their computation
            if not parameter.requires_grad and parameter.is_floating_point() and ".lora_" not in name:
                parameter.data = parameter.data.to(weights_dtype)
        return MixedPrecisionPolicy()
    if float32_names:
        raise ValueError(
            f"{type(model).__name__} requires {float32_names} in float32, and shards are gathered in one dtype: set weights_dtype=float32"
        )
    cast_weights(model, weights_dtype)
    for parameter in model.parameters():  # frozen ones too, because a group's weights are gathered in one dtype
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    return MixedPrecisionPolicy(param_dtype=weights_dtype, reduce_dtype=torch.float32)


def _stays_whole(model: nn.Module, meshes: DeviceMeshes, options: ShardingOptions, policy: MixedPrecisionPolicy) -> bool:
    """Return whether whole weights and gradients stay on each rank until the last micro-batch of a step.

    FSDP then gathers weights and reduces gradients once per step. Gradients are summed in the dtype of the reduction.
    """
    device = _local_device(meshes)
    if meshes.dims.pipeline > 1:
        return False
    if options.reshard_after_forward != "auto":
        return not options.reshard_after_forward
    if not is_gpu(device) or options.cpu_offload:
        return False
    needed = count_whole_bytes(model, policy)
    total = int(torch.get_device_module(device).get_device_properties(device).total_memory)
    fits = needed <= WHOLE_SHARE * total
    log.info(
        "weights are gathered and gradients reduced %s: whole ones take %.1f GiB of this GPU's %.0f GiB (at most %.0f%% are used so)",
        "once per optimizer step" if fits else "in every micro-batch",
        needed / 2**30,
        total / 2**30,
        100 * WHOLE_SHARE,
    )
    return fits


def count_whole_bytes(model: nn.Module, policy: MixedPrecisionPolicy) -> int:
    """Return the bytes of a model's gathered weights and of their unreduced gradients, on one tensor- and expert-parallel rank."""
    total = 0
    for parameter in model.parameters():
        count = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()
        total += count * (policy.param_dtype or parameter.dtype).itemsize
        total += count * (policy.reduce_dtype or parameter.dtype).itemsize if parameter.requires_grad else 0
    return total


def _shard_layers(
    model: nn.Module, meshes: DeviceMeshes, plan: Mapping[str, str] | None
) -> tuple[frozenset[str], frozenset[str]]:
    """Apply tensor and expert parallelism; return the names of parameters with partial gradients and of expert modules."""
    partial: frozenset[str] = frozenset()
    experts: frozenset[str] = frozenset()
    if meshes.dims.tensor > 1:
        from strop.learner.parallel.tensor_parallel import apply_tensor_parallel

        partial = apply_tensor_parallel(model, meshes, plan)
    if meshes.dims.expert_size > 1:
        from strop.learner.parallel.expert_parallel import apply_expert_parallel

        experts = apply_expert_parallel(model, meshes)
    return partial, experts


def _make_shard_placement(meshes: DeviceMeshes) -> Callable[[nn.Parameter], Shard | None]:
    """Return FSDP's ``shard_placement_fn``: dimension 1 for a weight that is already sharded along dimension 0, if it splits evenly."""
    ranks: int = meshes.fsdp.size(-1)

    def shard_dimension(parameter: nn.Parameter) -> Shard | None:
        if (
            not isinstance(parameter, DTensor)
            or parameter.dim() < 2
            or not any(placement.is_shard(0) for placement in parameter.placements)
        ):
            return None
        return Shard(1) if parameter.to_local().shape[1] % ranks == 0 else None

    return shard_dimension


def _local_device(meshes: DeviceMeshes) -> torch.device:
    kind = meshes.dense.device_type
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _fully_shard(module: nn.Module, mesh: Any, options: Mapping[str, Any]) -> Any:
    sharded: FSDPModule = fully_shard(module, mesh=mesh, **options)
    sharded.set_gradient_divide_factor(1.0)  # gradients are summed
    sharded.set_force_sum_reduction_for_comms(True)  # gloo supports no other reduction
    return sharded


class FsdpRoot(nn.Module):
    """FSDP's root module: the embedding, the final norm and the output layer are gathered in its forward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Run ``compute`` and clone views among its results: FSDP registers hooks on them, which views would lose."""
        return tuple(tensor if tensor._base is None else tensor.clone() for tensor in compute())


class Sharded:
    """A ``Parallelism`` over the ranks of ``meshes``. Created by ``parallelize_network``."""

    def __init__(
        self,
        network: Network | ValueHead,
        meshes: DeviceMeshes,
        model: ShardedModel,
        *,
        trunk: Sharded | None = None,
    ) -> None:
        self.network = network
        self.trunk = trunk  # the sharded trunk, if the network is only a head
        self.meshes = meshes
        self.is_leader = meshes.is_leader
        self.root = model.root
        self.param_dtype = model.param_dtype
        self.gather_dtype = model.gather_dtype
        self.rank_layers: RankLayers | None = RankLayers(model.gather_dtype or torch.float32, meshes.dims.tensor > 1)
        self.stays_whole = model.stays_whole
        self.device: torch.device = network.device
        self.sharded: Mapping[str, Any] = {  # DTensors of the trained parameters by name
            name: parameter
            for name, parameter in network.model.named_parameters()
            if parameter.requires_grad and not is_elsewhere(parameter)
        }
        self.elsewhere: NamedParameters = [
            (name, parameter)
            for name, parameter in network.model.named_parameters()
            if parameter.requires_grad and is_elsewhere(parameter)
        ]
        self.local_parameters = {name: nn.Parameter(_local_tensor(parameter)) for name, parameter in self.sharded.items()}
        self._copy_counts = {
            id(self.local_parameters[name]): _count_copies(parameter, meshes.dims.stage_size)
            for name, parameter in self.sharded.items()
        }
        self._partial = [name for name in self.sharded if name in model.partial]

    # --- the interface of Parallelism ------------------------------------------------------------------------------------

    def trainable_parameters(self) -> Sequence[tuple[str, nn.Parameter]]:
        return list(self.local_parameters.items())

    def prepare_optimizer(self, optimizer: Optimizer, section: str) -> None:
        if isinstance(optimizer, Muon):
            optimizer.apply_whole = self._apply_whole
        elif not any(_base_optimizer_name(kind) in ELEMENTWISE_OPTIMIZERS for kind in type(optimizer).__mro__):
            raise ValueError(
                f"{section}.optimizer.name: {type(optimizer).__name__} is not known to be elementwise, and each rank has only a shard of "
                "each weight: its update would differ from that of the full weight. Use torch.optim.AdamW or another elementwise "
                "optimizer, strop.learner.muon.Muon, or train on a single device"
            )

    def _apply_whole(self, name: str, local: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Gather a matrix from its shards, and return this rank's shard of ``function`` of it, which each rank computes."""
        like = self.sharded[name]
        whole: Tensor = function(dtensor_like(like, local.to(self.device)).full_tensor())
        copies = [Replicate()] * like.device_mesh.ndim
        result = DTensor.from_local(whole, like.device_mesh, copies, run_check=False).redistribute(placements=like.placements)
        return _local_tensor(result).to(local.device)

    def weight_tensors(self) -> Iterator[Tensor]:
        yield from self.network.model.parameters()
        yield from self.local_parameters.values()
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                yield from _gathered_from(module)

    def share_request(self, token_budget: int, *, whole_groups: bool = False, read_columns: bool = False) -> ShareRequest:
        padded = not self.network.packed
        rule = SplitRule(ranks=self.meshes.dims.data, token_budget=token_budget, padded=padded, whole_groups=whole_groups)
        rule = replace(rule, fills_up=self.meshes.dims.pipeline > 1)
        return ShareRequest(rule=rule, number=self.meshes.data_rank, read_columns=read_columns)

    def take_share(self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False) -> BatchShare:
        """Return this rank's share of a batch, or the given share itself. Raises ValueError for another rank's share."""
        request = self.share_request(token_budget, whole_groups=whole_groups)
        return take_share(batch, request.rule, request.number)

    def split_batch(
        self, batch: Batch | BatchShare, token_budget: int, *, whole_groups: bool = False
    ) -> tuple[Sequence[MicroBatch], Metrics]:
        share = self.take_share(batch, token_budget, whole_groups=whole_groups)
        micro_batches = [
            make_dummy(share.require_dummy(), zero_gradient=zero_gradient) if part is None else MicroBatch(part, zero_gradient)
            for part, zero_gradient in share.micro_batches()
        ]
        return micro_batches, {"tokens_per_rank_max_over_mean": metrics.mean(share.max_over_mean, 1)}

    def run_passes(
        self,
        micro_batches: Sequence[MicroBatch],
        compute: Callable[[Batch], OutputsT],
        loss: Callable[[MicroBatch, OutputsT], Tensor] | None = None,
        *,
        backward: bool = False,
    ) -> LocalOutputs[OutputsT]:
        self._reduce_gradients(False)
        with use_learner_layers(self.network, keep_copies=False):  # copies would keep the gathered weights of all layers
            results = run_in_turn(
                self.network,
                micro_batches,
                lambda batch: self._run(partial(compute, batch)),
                loss,
                backward=backward,
                before_last=lambda: self._reduce_gradients(True),
            )
        self._finish_passes()
        return results if self.is_leader else ()

    def _reduce_gradients(self, due: bool) -> None:
        """Set whether the next backward pass reduces all gradients so far and frees gathered weights. Without effect unless they stay."""
        if not self.stays_whole:
            return
        self.root.set_requires_gradient_sync(due)
        self.root.set_reshard_after_backward(due)
        if self.trunk is not None:
            self.trunk._reduce_gradients(due)

    def _run(self, compute: Callable[[], OutputsT]) -> OutputsT:
        """Return ``compute()``, with the network's weights gathered."""
        results: list[OutputsT] = []

        def compute_tensors() -> list[Tensor]:
            results.append(compute())
            return [tensor for _, tensor in tensor_fields(results[0])]

        tensors = self.root(compute_tensors)
        names = (name for name, _ in tensor_fields(results[0]))
        columns: dict[str, Any] = dict(zip(names, tensors, strict=True))
        return replace(results[0], **columns)  # type: ignore[type-var]

    def hidden(self, batch: Batch) -> Tensor:
        """Return ``Network.hidden`` of a language model, for a value head on it."""
        network = self.network
        assert isinstance(network, Network)
        hidden: Tensor = self.root(lambda: [network.hidden(batch)])[0]
        return hidden

    def _finish_passes(self) -> None:
        """Set the gradients of the trained parameters and free gathered weights."""
        for name, parameter in self.sharded.items():
            gradient: Any = parameter.grad
            if gradient is not None:
                self.local_parameters[name].grad = gradient.to_local()
        if self.trunk is not None:
            self.trunk._finish_passes()
        self.root.reset_iter_state()  # passes without gradient leave weights gathered, which would be stale after a step

    @torch.no_grad()
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        for name in self._partial:
            if (gradient := self.local_parameters[name].grad) is not None:
                summed = gradient.to(self.device)  # from the CPU with offload
                dist.all_reduce(summed, group=self.meshes.tensor)
                gradient.copy_(summed)
        with_grad = [parameter for parameter in parameters if parameter.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter in with_grad:
            norm = torch.linalg.vector_norm(parameter.grad).to(self.device, torch.float64)  # type: ignore[arg-type]
            squares += norm.square() / self._copy_counts[id(parameter)]
        dist.all_reduce(squares)
        norm = squares.sqrt()
        if with_grad and with_grad[0].dtype != torch.float64:
            norm = norm.float()
        nn.utils.clip_grads_with_norm_(with_grad, limit, norm)
        return norm

    def after_step(self) -> None:
        for parameter in self.sharded.values():
            parameter.grad = None

    def gather_stages(self, value: Any) -> Sequence[Any]:
        return [value]

    def add_over_ranks(self, tensor: Tensor) -> Tensor:
        total = tensor.to(self.network.device)
        dist.all_reduce(total)
        return total

    def save(self, folder: Path, state: TrainingState, *, optimizer: bool = True) -> None:
        sharded_checkpoint.take_snapshot(self, state, optimizer=optimizer, copies=False).save(folder, optimizer=optimizer)

    def load(self, folder: Path, state: TrainingState) -> None:
        sharded_checkpoint.load(self, folder, state)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights; all ranks must iterate to the end. Tied weights are one tensor under several names."""
        model = self.network.model
        counts = Counter(storage_key(tensor) for _, tensor, _ in weights_with_layers(model))
        tied: dict[int, Tensor] = {}

        def gather(tensor: Tensor) -> Tensor:
            if (pointer := storage_key(tensor)) not in tied:
                if counts[pointer] <= 1:
                    return self.full_tensor(tensor)
                tied[pointer] = self.full_tensor(tensor)
            return tied[pointer]

        return merged_weights(model, gather)

    def adapters(self) -> Mapping[str, Tensor]:
        return {name: self.full_tensor(tensor) for name, tensor in adapter_weights(self.network.model).items()}

    @torch.no_grad()
    def full_tensor(self, tensor: Tensor) -> Tensor:
        """Gather one of the model's tensors on this rank's device, in the dtype of the computation. All ranks must call it."""
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        dtype = self.param_dtype if self.param_dtype is not None and tensor.is_floating_point() else tensor.dtype
        full: Tensor = dtensor_like(tensor, _local_tensor(tensor).to(self.device, dtype)).full_tensor()
        return full


def _base_optimizer_name(kind: type) -> str:
    name = kind.__name__.removeprefix("Paged")
    for suffix in QUANTIZED_STATE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def dtensor_like(tensor: DTensor, local: Tensor) -> DTensor:
    """Return a DTensor with the local shard ``local`` and the sharding of ``tensor``."""
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def _gathered_from(module: FSDPModule) -> Iterator[Tensor]:
    """Yield the padded shards from which FSDP gathers a module's parameters; FSDP has no public name for them."""
    state: Any = module._get_fsdp_state()
    for group in state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]:
        for parameter in group.fsdp_params if group is not None else ():
            yield parameter._sharded_param_data


def _count_copies(parameter: DTensor, ranks: int) -> int:
    """Return the number of ``ranks`` with the same shard of a parameter."""
    mesh = parameter.device_mesh
    shards = 1
    for dimension, placement in enumerate(parameter.placements):
        shards *= 1 if placement.is_replicate() else mesh.size(dimension)
    return ranks // shards


@torch.no_grad()
def _local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's shard, sharing its memory."""
    local: Tensor = tensor.to_local().detach()
    return local
