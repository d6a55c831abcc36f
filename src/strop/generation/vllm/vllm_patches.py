"""Patches for bugs of the supported vLLM versions that change the sampled distribution or crash an engine, applied in worker processes.
Each names the versions it was tested with; a patch that does not fit another version raises an error, unless it only concerns drafts.

A draft model is loaded with the policy's load format, ignoring ``draft_load_config``. The policy starts with dummy weights, so the
draft would too, but it never receives an update. The other bugs are in the CPU build:

- Speculative decoding expands the temperature and top_k of a request to its draft positions in a temporary copy, and then uses
  uninitialized memory: tokens are sampled with a wrong temperature, and their log-probabilities are wrong too.
- A batch of requests with top-k or top-p and no draft tokens crashes.
- Chunked prefill rewinds the random generator after each chunk but the last, with a method that only CUDA generators have: the first
  chunked request with a seed crashes the engine.
- Expert weights that are reloaded are not repacked, and their kernel reads the plain weights as packed ones.
- The kernel of experts reads the number of an expert among those of all ranks as one among its own: expert parallelism reads memory
  that is not its own.
- Copies of a model that share its experts exchange their tokens by two collectives that are not there.
- The buffers in which a pipeline stage receives hidden states are made only by the warm-up, which is skipped if the size of the KV cache
  is given, as it always is here: the first request ends the engine.
- The kernel of rotary positions takes the distance between two heads as that between two tokens, where heads have their own dimension,
  as in the latent attention of DeepSeek: log-probabilities are wrong from the second token on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from strop.generation.vllm.vllm_config import installed_version

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class VllmPatch:
    """A vLLM bug that is fixed in worker processes."""

    bug: str
    apply: Callable[[], None]
    checked: tuple[str, ...]  # vLLM versions that have the bug and were tested with the patch
    platform: Literal["cpu", "gpu", "any"] = "cpu"
    only_drafts: bool = False  # for speculation.method=draft_model, which is refused with untested versions


def apply_patches() -> None:
    """Apply the patches for this platform. Raises RuntimeError if one does not fit the installed vLLM."""
    from vllm.platforms import current_platform

    for patch in PATCHES:
        if patch.platform in ("any", "cpu" if current_platform.is_cpu() else "gpu"):
            apply_patch(patch, installed_version() or "of an unknown version")


def apply_patch(patch: VllmPatch, version: str) -> None:
    if version not in patch.checked:
        log.warning("vLLM %s: the fix of a bug (%s) was tested only with %s", version, patch.bug, " and ".join(patch.checked))
    try:
        patch.apply()
    except (ImportError, AttributeError) as error:
        if patch.only_drafts:
            log.warning("vLLM %s: it is not applied (%s)", version, error)
            return
        raise RuntimeError(
            f"vLLM {version} lacks the code that the fix of one of its bugs changes ({patch.bug}): {error}. Install a version that it was "
            f"tested with, {' or '.join(patch.checked)} (constraints/cpu.txt, constraints/gpu.txt), or set "
            "policy.generation.backend=torch"
        ) from error


def _patch_draft_loading() -> None:
    from vllm.config.utils import replace
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    create = DraftModelProposer._create_draft_vllm_config

    def create_with_draft_load_config(self: Any) -> Any:
        created, load_config = create(self), self.speculative_config.draft_load_config
        return created if load_config is None else replace(created, load_config=load_config)

    DraftModelProposer._create_draft_vllm_config = create_with_draft_load_config


def _patch_v2_draft_loading() -> None:
    """The same for model runner V2, on GPUs. Its speculators for other methods read ``draft_load_config`` themselves."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator

    get_model = speculator.get_model

    def get_with_draft_load_config(*, vllm_config: Any, **options: Any) -> Any:
        return get_model(vllm_config=vllm_config, load_config=vllm_config.speculative_config.draft_load_config, **options)

    speculator.get_model = get_with_draft_load_config


def _patch_rejection_sampler() -> None:
    from vllm.v1.sample import rejection_sampler

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_drafts(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        return constrain(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrain_drafts
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Expand [B] values of requests to [num_tokens], replacing ``replace_from`` by ``replace_to``.

    Request i ends before ``cu_num_tokens[i]``.
    """
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def _patch_chunked_prefill() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, bookkeep = GPUModelRunner._sample, GPUModelRunner._bookkeeping_sync

    def sample_and_restore_generators(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = self.input_batch
        unfinished = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()  # their token will be discarded
        generators = [batch.generators[index] for index in unfinished if index in batch.generators]
        states = [generator.get_state() for generator in generators]
        output = sample(self, *args, **kwargs)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        return output

    def bookkeep_without_generators(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return bookkeep(self, *args, **kwargs)
        finally:
            self.input_batch.generators = generators

    GPUModelRunner._sample = sample_and_restore_generators
    GPUModelRunner._bookkeeping_sync = bookkeep_without_generators


def _patch_expert_packing() -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    setup_kernel = UnquantizedFusedMoEMethod._setup_kernel

    def setup_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
        old_kernel = self.moe_kernel
        setup_kernel(self, *args, **kwargs)
        if old_kernel is not None:
            old_kernel.fused_experts.process_weights_after_loading(kwargs.get("layer") or args[0])

    UnquantizedFusedMoEMethod._setup_kernel = setup_and_pack


def _patch_expert_parallelism() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    compute = CPUUnquantizedExperts.apply

    def compute_own_experts(
        self: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **given: Any
    ) -> None:
        if expert_map is not None:
            topk_ids, topk_weights = choose_own_experts(topk_ids, topk_weights, expert_map)
        compute(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **given)

    CPUUnquantizedExperts.apply = compute_own_experts


def choose_own_experts(chosen: Tensor, weights: Tensor, expert_map: Tensor) -> tuple[Tensor, Tensor]:
    """Return the experts [n, k] of this rank among ``chosen``, as local slots, and their weights: 0 for experts of other ranks.

    ``expert_map`` [experts]: the slot of each expert, -1 if it is on another rank.
    """
    slots = expert_map[chosen.long()]
    return slots.clamp(min=0).to(chosen.dtype), weights.masked_fill(slots < 0, 0)


def _patch_exchange_of_copies() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = gather_unequal
    CpuCommunicator.reduce_scatterv = reduce_scatter_unequal


def gather_unequal(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Gather tensors [n_i, ...] of all ranks into [sum of n_i, ...]; of a list, each one. ``sizes``: n_i; None if all are equal."""
    if isinstance(input_, list):
        return [gather_unequal(self, each, dim, sizes) for each in input_]
    counts = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros(max(counts), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def reduce_scatter_unequal(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """Add tensors [sum of n_i, ...] of all ranks and return this rank's n_i rows."""
    counts = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    rows: Tensor = total.split(counts)[self.rank_in_group]
    return rows.contiguous()


def _patch_stage_buffers() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    gather = GPUModelRunner.sync_and_gather_intermediate_tensors

    def make_buffers_and_gather(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    GPUModelRunner.sync_and_gather_intermediate_tensors = make_buffers_and_gather


def _patch_rotary_positions() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate = RotaryEmbedding.forward_cpu

    def rotate_rows(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        rotated, rotated_key = rotate(self, positions, join_heads(query), None if key is None else join_heads(key))
        return rotated.view(query.shape), None if key is None else rotated_key.view(key.shape)

    RotaryEmbedding.forward_cpu = rotate_rows


def join_heads(states: Tensor) -> Tensor:
    """[tokens, heads, size] -> [tokens, heads * size], copied unless contiguous; rows [tokens, n] are returned unchanged."""
    return states.reshape(len(states), -1) if states.dim() == 3 else states


PATCHES = (
    VllmPatch(
        bug="a draft model starts with random weights",
        apply=_patch_draft_loading,
        checked=("0.32.0",),
        platform="any",
        only_drafts=True,
    ),
    VllmPatch(
        bug="a draft model starts with random weights in model runner V2",
        apply=_patch_v2_draft_loading,
        checked=("0.32.0",),
        platform="gpu",
        only_drafts=True,
    ),
    VllmPatch(
        bug="drafts are sampled with uninitialised memory as temperature", apply=_patch_rejection_sampler, checked=("0.32.0",)
    ),
    VllmPatch(bug="a prompt read in chunks crashes the engine", apply=_patch_chunked_prefill, checked=("0.32.0",)),
    VllmPatch(bug="experts use the weights from before the last update", apply=_patch_expert_packing, checked=("0.32.0",)),
    VllmPatch(
        bug="with expert parallelism experts read memory that is not theirs", apply=_patch_expert_parallelism, checked=("0.32.0",)
    ),
    VllmPatch(bug="copies that share experts cannot exchange tokens", apply=_patch_exchange_of_copies, checked=("0.32.0",)),
    VllmPatch(bug="a pipeline stage has no buffers for hidden states", apply=_patch_stage_buffers, checked=("0.32.0",)),
    VllmPatch(bug="latent attention rotates positions wrongly", apply=_patch_rotary_positions, checked=("0.32.0",)),
)
