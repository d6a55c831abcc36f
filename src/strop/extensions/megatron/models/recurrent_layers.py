"""Recurrent layers over the tree of a row: gated delta nets and Mamba 2. Tensor-parallel ranks divide their heads.

Megatron Core's own need Triton kernels, and rows without shared prompts. These have its linear layers, and the row's plan computes their
convolutions and scans, as in the models of Transformers: by flash-linear-attention's and mamba-ssm's kernels where they are, and starting
from the states of shared prompts. In a layer they are its ``self_attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from strop.extensions.megatron.families.architecture import DeltaNetSizes, MambaSizes
from strop.extensions.megatron.models.stage_norms import normalize_rms
from strop.models.mixers.mixer_interface import FUNCTIONS, MixerCall
from strop.sampling import at_least_float32


class RecurrentLayer(MegatronModule):  # type: ignore[misc]
    """A projection whose parts ranks divide by heads, a convolution of some of the parts, a scan, and a projection of its outputs.

    [T, 1, H] -> [T, 1, H]; [T / TP, 1, H] with sequence parallelism.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *,
        sizes: DeltaNetSizes | MambaSizes,
        backend: Any,
        pg_collection: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer, self.group, ranks = layer_number - 1, pg_collection.tp, pg_collection.tp.size()
        self.parts, self.convolved = ([rows // ranks for rows in each] for each in (sizes.parts, sizes.convolved))
        options: dict[str, Any] = {"config": config, "bias": False, "is_expert": False, "tp_group": self.group}
        self.in_proj = backend.column_parallel_linear()(
            config.hidden_size,
            sum(sizes.parts),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        self.out_proj = backend.row_parallel_linear()(
            sizes.parts[0] if isinstance(sizes, MambaSizes) else sizes.convolved[2],
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        self.in_proj.weight.part_sizes = self.parts
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        channels, heads = sum(self.convolved), self.parts[-1]
        self.conv1d = nn.Conv1d(channels, channels, sizes.kernel, groups=channels, bias=sizes.conv_bias, **kind)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads, **kind)), nn.Parameter(torch.zeros(heads, **kind))
        for parameter in self.conv1d.parameters():
            divide_rows(parameter)
            parameter.part_sizes = self.convolved  # type: ignore[attr-defined]
        for parameter in (self.A_log, self.dt_bias):
            divide_rows(parameter)

    def forward(
        self, hidden: Tensor, attention_mask: None, *, packed_seq_params: Any, **unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        call = MixerCall(packed_seq_params.plan, self.layer)
        outputs: tuple[Tensor, Tensor | None] = self.out_proj(self._mix(call, self.in_proj(hidden)[0].squeeze(1)).unsqueeze(1))
        return outputs

    def _mix(self, call: MixerCall, projected: Tensor) -> Tensor:
        """[T, sum of parts] -> [T, outputs]"""
        raise NotImplementedError

    def _convolve(self, call: MixerCall, channels: Tensor) -> tuple[Tensor, ...]:
        """Convolve and split channels: [T, C] -> a part [T, ...] for each of ``convolved``."""
        weight = self.conv1d.weight.squeeze(1)
        mixed: Tensor = FUNCTIONS["causal_conv1d_fn"](call, channels.T[None], weight, self.conv1d.bias, activation="silu")
        return torch.split(mixed[0].T, self.convolved, -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the shards for dist_checkpointing."""
        projections = {"in_proj": self.in_proj, "out_proj": self.out_proj}
        own = {name: each for name, each in self.named_parameters() if name.partition(".")[0] not in projections}
        axes = {name: 0 for name, each in own.items() if each.tensor_model_parallel}  # type: ignore[attr-defined]
        shards: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            own, prefix, axes, sharded_offsets, tp_group=self.group, dp_cp_group=metadata["dp_cp_group"]
        )
        for name, linear in projections.items():
            shards.update(linear.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata))
        for name, parameter in self.named_parameters():
            if hasattr(parameter, "part_sizes") and ".adapter." not in name:  # which does it itself
                shards[prefix + name] = shard_parts(shards[prefix + name], parameter.part_sizes)
        return shards


def divide_rows(parameter: nn.Parameter) -> None:
    """Say that tensor-parallel ranks have different rows of a parameter."""
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)


def shard_parts(sharded: ShardedTensor, sizes: Sequence[int]) -> ShardedTensorFactory:
    """Return the shards of a tensor-parallel rank's parameter, whose parts have ``sizes`` rows: the whole has those of all ranks
    together, in every layout."""
    axis = sharded.prepend_axis_num
    rank, ranks = (shape[axis] // sum(sizes) for shape in (sharded.global_offset, sharded.global_shape))

    def build(key: str, values: Tensor, replica_id: Any, flattened_range: None) -> list[ShardedTensor]:
        shards, start = [], 0
        for part in values.split(sizes):
            offset = list(sharded.global_offset)
            offset[axis] = start * ranks + rank * len(part)
            changes: dict[str, Any] = {"dtype": part.dtype, "local_shape": tuple(part.shape), "replica_id": replica_id}
            shards.append(replace(sharded, key=key, data=part, global_offset=tuple(offset), axis_fragmentations=None, **changes))
            start += len(part)
        return shards

    return ShardedTensorFactory(sharded.key, sharded.data, build, torch.cat, sharded.replica_id)


class GatedDeltaNet(RecurrentLayer):
    """The gated delta rule of Qwen3-Next and Qwen3.5."""

    def __init__(self, config: Any, layer_number: int, *, sizes: DeltaNetSizes, **options: Any) -> None:
        super().__init__(config, layer_number, sizes=sizes, **options)
        self.sizes, self.eps = sizes, config.layernorm_epsilon
        self.out_norm = nn.Module()
        self.out_norm.weight = nn.Parameter(
            torch.ones(sizes.value_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        tensor_parallel.set_tensor_model_parallel_attributes(self.out_norm.weight, False, -1, 1)

    def _mix(self, call: MixerCall, projected: Tensor) -> Tensor:
        sizes = self.sizes
        convolved, gate, beta, decay = projected.split([sum(self.convolved), *self.parts[3:]], -1)
        query, key, value = self._convolve(call, convolved)
        query, key = (
            each.unflatten(-1, (-1, sizes.key_size)).repeat_interleave(sizes.value_heads // sizes.key_heads, 1)
            for each in (query, key)
        )
        value, gate = (each.unflatten(-1, (-1, sizes.value_size)) for each in (value, gate))
        decay = -at_least_float32(self.A_log).exp() * F.softplus(at_least_float32(decay) + self.dt_bias)
        rows = (each[None] for each in (query, key, value, decay, beta.sigmoid()))
        outputs, _ = FUNCTIONS["torch_chunk_gated_delta_rule"](call, *rows, use_qk_l2norm_in_kernel=True)
        # Each rank has the norm of all heads: the ranks add its gradients.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.group)
        normed = weight * normalize_rms(outputs[0], self.eps).to(projected.dtype)
        gated: Tensor = (normed * F.silu(at_least_float32(gate))).to(projected.dtype)
        return gated.flatten(1)


class Mamba2(RecurrentLayer):
    """The state space layer of Nemotron-H, whose norm is of each group of heads."""

    def __init__(self, config: Any, layer_number: int, *, sizes: MambaSizes, **options: Any) -> None:
        super().__init__(config, layer_number, sizes=sizes, **options)
        self.sizes, self.eps = sizes, config.layernorm_epsilon
        kind: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.D, self.norm = nn.Parameter(torch.zeros(self.parts[-1], **kind)), nn.Module()
        weight = self.norm.weight = nn.Parameter(torch.ones(self.parts[0], **kind))
        for parameter in (self.D, weight):
            divide_rows(parameter)

    def _mix(self, call: MixerCall, projected: Tensor) -> Tensor:
        sizes = self.sizes
        gate, convolved, step = projected.split([self.parts[0], sum(self.convolved), self.parts[-1]], -1)
        inputs, read_in, read_out = self._convolve(call, convolved)
        inputs = inputs.unflatten(-1, (-1, sizes.head_size))
        read_in, read_out = (each.unflatten(-1, (-1, sizes.state_size)) for each in (read_in, read_out))
        rates = -at_least_float32(self.A_log).exp()
        outputs: Tensor = FUNCTIONS["mamba2_chunk_scan"](
            call,
            inputs[None],
            step[None],
            rates,
            read_in[None],
            read_out[None],
            D=self.D,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            dt_limit=sizes.step_limit,
        )
        gated = at_least_float32(outputs[0].flatten(1)) * F.silu(at_least_float32(gate))
        grouped = gated.unflatten(-1, (-1, sizes.inner // sizes.groups))
        weight: Tensor = self.norm.get_parameter("weight")
        return weight * normalize_rms(grouped, self.eps).flatten(1).to(projected.dtype)
