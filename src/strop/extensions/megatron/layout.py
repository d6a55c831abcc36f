"""Where one model is on the ranks: Megatron Core's process groups.

Megatron Core keeps its groups in globals of a module, which one model sets once. A rank may have a policy, a critic and a teacher of
different sizes here: each has a layout with its own groups, and ``activate`` makes them the ones that Megatron Core finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from strop.extensions.megatron.cpu_shim import prepare_megatron
from strop.extensions.megatron.megatron_dims import MegatronDims

dist: Any = torch.distributed
Group = Any  # torch.distributed.ProcessGroup

_STATE = re.compile(r"_[A-Z][A-Z_]*")  # the names of Megatron Core's globals


class MegatronLayout:
    """The process groups of one model. All ranks create it at the same time, after the default process group."""

    def __init__(self, dims: MegatronDims, device: str, *, gloo_groups: bool = False, seed: int = 0) -> None:
        """``gloo_groups``: also make groups over gloo, for tensors in CPU memory. Raises ValueError for another number of ranks."""
        if dist.get_world_size() != dims.world_size:
            raise ValueError(f"{dims} needs {dims.world_size} ranks, and there are {dist.get_world_size()}")
        prepare_megatron(device)
        from megatron.core import parallel_state, tensor_parallel

        self.dims = dims
        kind = torch.device(device).type
        self.device = torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        self._state: Mapping[str, Any] = dict.fromkeys(_take_state(parallel_state), None) | {"_HYBRID_DP_CP_GROUPS": {}}
        with self.activate():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=dims.tensor,
                pipeline_model_parallel_size=dims.pipeline,
                virtual_pipeline_model_parallel_size=dims.virtual if dims.virtual > 1 else None,
                context_parallel_size=dims.context,
                expert_model_parallel_size=dims.expert,
                expert_tensor_parallel_size=dims.expert_tensor,
                create_gloo_process_groups=gloo_groups,
            )
            tensor_parallel.model_parallel_cuda_manual_seed(seed + 1)  # 0 is refused
            self.tensor: Group = parallel_state.get_tensor_model_parallel_group()
            self.context: Group = parallel_state.get_context_parallel_group()
            self.pipeline: Group = parallel_state.get_pipeline_model_parallel_group()
            self.data: Group = parallel_state.get_data_parallel_group()
            self.data_and_context: Group = parallel_state.get_data_parallel_group(with_context_parallel=True)

    @contextmanager
    def activate(self) -> Iterator[MegatronLayout]:
        """Make these the groups that Megatron Core uses, also in a thread that has not used it before."""
        prepare_megatron(self.device.type)
        from megatron.core import parallel_state

        outer = _take_state(parallel_state)
        vars(parallel_state).update(self._state)
        try:
            yield self
        finally:
            self._state = _take_state(parallel_state)
            vars(parallel_state).update(outer)

    @property
    def data_rank(self) -> int:
        """The index of this rank's micro-batches among ``dims.data``."""
        return int(dist.get_rank(self.data))

    @property
    def is_last_stage(self) -> bool:
        return int(dist.get_rank(self.pipeline)) == self.dims.pipeline - 1

    @property
    def is_leader(self) -> bool:
        """Whether this rank reports the results of all ranks that read the same micro-batches."""
        return self.is_last_stage and dist.get_rank(self.tensor) == 0 and dist.get_rank(self.context) == 0


def _take_state(parallel_state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if _STATE.fullmatch(name)}
