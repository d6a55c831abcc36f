"""Low-rank adapters added to the linear layers that tensor-parallel ranks divide: y = W x + scale * B A x."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from strop.extensions.megatron.megatron_config import MegatronPeftConfig
from strop.extensions.megatron.models.recurrent_layers import shard_parts

Divided = Literal["rows", "columns"]


class ParallelAdapter(nn.Module):
    """B A of a divided linear layer, in at least float32. The half that its ranks do not divide is on each of them.

    Beside a layer whose rows are divided, B has the same rows, and every rank has A; with sequence parallelism it reads the rank's tokens,
    so that its gradient is a part of the whole one. Beside divided columns A has the same columns, and every rank has B. The ranks exchange
    A x, which is narrow.
    """

    def __init__(
        self, weight: Tensor, divided: Divided, config: MegatronPeftConfig, *, sequence_parallel: bool, gated: bool
    ) -> None:
        """``weight``: that of the layer on this rank. ``gated``: its rows are those of a gate, and of what it multiplies."""
        super().__init__()
        rows, columns = weight.shape
        kind: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32), "bias": False}
        self.linear_in, self.linear_out = nn.Linear(columns, config.dim, **kind), nn.Linear(config.dim, rows, **kind)
        self.divided, self.sequence_parallel, self.gated = divided, sequence_parallel, gated
        self.scale = config.alpha / config.dim
        self.dropout, self.dropout_position = config.dropout, config.dropout_position
        self.enabled, self.training_pass = True, False
        self.group: Any = parallel_state.get_tensor_model_parallel_group()
        halves = (self.linear_out.weight, self.linear_in.weight)
        of_rank, shared = halves if divided == "rows" else halves[::-1]
        tensor_parallel.set_tensor_model_parallel_attributes(of_rank, True, 0 if divided == "rows" else 1, 1)
        if hasattr(weight, "part_sizes"):  # only of divided rows
            self.linear_out.weight.part_sizes = weight.part_sizes  # type: ignore[attr-defined]
        # Megatron Core adds such gradients over the tensor-parallel ranks, each of which has those of its own tokens.
        shared.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return scale * B A x: [T, 1, inputs] -> [T, 1, outputs], of the tokens and features that the layer has on this rank."""
        hidden = self._drop("pre", hidden.to(self.linear_in.weight.dtype))
        low = self.linear_in(hidden)  # [T, 1, dim]
        if self.divided == "rows":
            exchange = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
        else:
            exchange = (
                mappings.reduce_scatter_to_sequence_parallel_region
                if self.sequence_parallel
                else mappings.reduce_from_tensor_model_parallel_region
            )
        return self._drop("post", self.linear_out(exchange(low, group=self.group)) * self.scale)

    def _drop(self, position: str, values: Tensor) -> Tensor:
        """Apply dropout in a pass of training. Ranks that have the same values drop the same ones."""
        if not self.dropout or position != self.dropout_position or not self.training_pass:
            return values
        if not self.sequence_parallel and (position == "pre") == (self.divided == "rows"):
            return F.dropout(values, self.dropout)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(values, self.dropout)

    @torch.no_grad()
    def merged_weight(self, weight: Tensor) -> Tensor:
        """Return this rank's part of W + scale B A, in at least float32."""
        up, down = self.linear_out.weight, self.linear_in.weight
        return weight.to(up.dtype) + (up @ down).mul_(self.scale)


@cache
def with_adapter(linear: Any, divided: Divided) -> type:
    """Return ``linear``, a layer of Megatron Core, with room for an adapter."""

    class AdaptedLinear(linear):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.adapter: ParallelAdapter | None = None

        def add_adapter(self, config: MegatronPeftConfig, *, gated: bool) -> ParallelAdapter:
            self.adapter = ParallelAdapter(
                self.weight, divided, config, sequence_parallel=self.config.sequence_parallel, gated=gated
            )
            return self.adapter

        def forward(self, hidden: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
            output, bias = super().forward(hidden, *arguments, **options)
            if self.adapter is not None and self.adapter.enabled:
                output = (output + self.adapter(hidden)).to(output.dtype)
            return output, bias

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
            """Return the shards for dist_checkpointing, under the names of Megatron Bridge: ...linear_qkv.adapter.linear_in.weight."""
            adapter, self.adapter = self.adapter, None  # the layer's own would take both halves for whole tensors
            try:
                shards: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            finally:
                self.adapter = adapter
            if adapter is None:
                return shards
            axes = {"linear_out.weight": 0} if divided == "rows" else {"linear_in.weight": 1}
            parts = make_sharded_tensors_for_checkpoint(
                adapter.state_dict(prefix="", keep_vars=True),
                f"{prefix}adapter.",
                axes,
                sharded_offsets,
                tp_group=adapter.group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            name, sizes = f"{prefix}adapter.linear_out.weight", getattr(adapter.linear_out.weight, "part_sizes", None)
            if adapter.gated:  # as Megatron Core does with the layer's weight
                parts[name] = apply_swiglu_sharded_factory(parts[name], sharded_offsets)
            elif sizes is not None:
                parts[name] = shard_parts(parts[name], sizes)
            shards.update(parts)
            return shards

    return AdaptedLinear


def make_room(linear: Any) -> None:
    """Give a built layer with divided rows room for an adapter."""
    kind: Any = type(linear)
    assert "Row" not in kind.__name__, f"{kind.__name__} has divided columns: its spec must make room"
    linear.__class__ = with_adapter(kind, "rows")
    linear.adapter = None


class AdaptedBackend:
    """Makes the linear layers of another backend with room for adapters; experts' stay as they are."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def column_parallel_linear(self) -> type:
        return with_adapter(self.backend.column_parallel_linear(), "rows")

    def row_parallel_linear(self) -> type:
        return with_adapter(self.backend.row_parallel_linear(), "columns")
