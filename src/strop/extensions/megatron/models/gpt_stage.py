"""One stage of a decoder: embedding, layers, final norm and output layer, as far as they are in this stage, and router replay in it.

A row carries its recorded experts (``StageRow.experts``). A layer hands them to its router before it runs, so that it does not matter
which micro-batches a pipeline schedule has under way, nor whether the whole layer is computed again in the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from megatron.core import tensor_parallel
from megatron.core.enums import ModelType
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor, nn

from strop.extensions.megatron.families.architecture import Architecture, Rotary
from strop.models.attention.attention_plan import AttentionPlan
from strop.models.routing.recorded_experts import ReplayedRoutes, RoutedLayers


class LayerReplay:
    """The ``router_replay`` of a router of Megatron Core: in place of its own, which keeps all routers of a process in one list."""

    def __init__(self, layer: int, *, recomputed: bool) -> None:
        """``recomputed``: the router alone is computed again in the backward pass, without its layer."""
        self.layer, self.recomputed = layer, recomputed
        self._experts: ReplayedRoutes | None = None
        self._waiting: deque[ReplayedRoutes | None] = deque()  # of the passes whose backward pass is to come, in their order

    def hand_down(self, _: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the experts of the row that the layer is about to read."""
        self._experts = kwargs["packed_seq_params"].experts
        if self.recomputed and torch.is_grad_enabled():
            self._waiting.append(self._experts)

    def forget(self) -> None:
        self._waiting.clear()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices [n, k] of the recorded experts; of those with the best scores [n, E] where there are none."""
        assert default_compute_topk is not None
        best, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        # Megatron Core's checkpointing computes without gradients first, and with them when it computes again.
        experts = self._waiting.popleft() if self.recomputed and torch.is_grad_enabled() else self._experts
        if experts is None:
            return best, own
        chosen = experts.choose(self.layer, own)
        return scores.gather(1, chosen), chosen


def install_stage_replay(stages: Sequence[Any]) -> tuple[RoutedLayers, list[LayerReplay]]:
    """Make the routers of a rank's stages able to replay. Return its layers with experts, and what their routers ask.

    Raises ValueError for a model without experts, or with routers that fused kernels compute.
    """
    config, architecture = stages[0].config, stages[0].architecture
    if not config.num_moe_experts:
        raise ValueError(
            "policy.router_replay.enabled: the model has no routers that choose experts for a token; set it to false"
        )
    if getattr(config, "moe_router_fusion", False):
        raise ValueError(
            "policy.router_replay.enabled is true, but with megatron_cfg.moe_router_fusion the choice of experts is inside of a kernel; "
            "set one of them to false"
        )
    modules = config.recompute_modules or ()
    recomputed = config.recompute_granularity == "selective" and "moe" in modules
    replays = []
    for layer, router in _find_layers(stages):
        replay = LayerReplay(layer.layer_number - 1, recomputed=recomputed)
        router.router_replay = replay
        layer.register_forward_pre_hook(replay.hand_down, with_kwargs=True)
        replays.append(replay)
    width = int(config.moe_router_topk)
    top_k = {replay.layer: width for replay in replays}
    return RoutedLayers(architecture.num_layers, top_k, width, int(config.num_moe_experts)), replays


def _find_layers(stages: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    for stage in stages:
        for layer in stage.decoder.layers:
            if (router := getattr(layer.mlp, "router", None)) is not None:
                yield layer, router


@dataclass(frozen=True, eq=False)
class StageRow:
    """A flat row of T tokens, or the part of this context-parallel rank. Megatron Core carries it as its ``packed_seq_params``.

    It hands any object whose format is not "thd" through to the core attention, untouched, also where it recomputes activations.
    """

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    plan: AttentionPlan
    experts: ReplayedRoutes | None = None  # the recorded experts of the tokens that this rank's layers read
    chosen: dict[int, Tensor] = field(default_factory=dict)  # by the layer: what its indexer chose (``indexers``)

    qkv_format: ClassVar[str] = "tree"
    cp_group: ClassVar[None] = None
    local_cp_size: ClassVar[None] = None
    cu_seqlens_q: ClassVar[None] = None
    cu_seqlens_kv: ClassVar[None] = None


def rotation_tables(rotaries: Sequence[Rotary], positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cosines and sines of positions [T] for each of R rotary embeddings: [R, 2, T, 1, 1, D]."""
    frequencies = torch.stack([rotary.frequencies for rotary in rotaries]).to(positions.device)
    angles = positions.float()[None, :, None] * frequencies[:, None]
    angles = torch.cat((angles, angles), -1)[:, :, None, None]
    scales = torch.tensor([rotary.scale for rotary in rotaries], device=positions.device)
    return (torch.stack((angles.cos(), angles.sin()), 1) * scales.view(-1, 1, 1, 1, 1, 1)).to(dtype)


def rotate(heads: Tensor, table: Tensor) -> Tensor:
    """Rotate the first D dimensions of heads [T, 1, heads, head_dim] by cosines and sines [2, T, 1, 1, D]."""
    size = table.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * table[0] + torch.cat((-second, first), -1) * table[1]
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


Head = Literal["lm", "scalar"]


class GptStage(LanguageModule):  # type: ignore[misc]
    """A virtual pipeline stage: a row of T tokens -> hidden states [T, 1, H], [T / TP, 1, H] with sequence parallelism.

    The last stage returns them after the final norm. Its output layer, ``output_weight``, is applied by who needs logits, where a token is
    predicted; that of a value network is ``score``.
    """

    def __init__(
        self,
        config: Any,
        architecture: Architecture,
        block: TransformerBlockSubmodules,
        *,
        vocab_size: int,
        head: Head,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config=config)
        self.architecture, self.vocab_size, self.head = architecture, vocab_size, head
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.share_embeddings_and_output_weights = architecture.tied and head == "lm"
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, max_sequence_length=0, position_embedding_type="rope", tp_group=self.tp_group
            )
        self.decoder = TransformerBlock(
            config=config, spec=block, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        self.output_layer: Any = None
        if post_process and head == "lm":
            self.output_layer = self._make_output_layer()
        elif post_process:
            self.score = nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
            nn.init.zeros_(self.score.weight)
        if head == "lm" and (pre_process or post_process):
            self.setup_embeddings_and_output_layer()
        elif pre_process:
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True

    def _make_output_layer(self) -> Any:
        return tensor_parallel.ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            skip_weight_param_allocation=self.pre_process and self.share_embeddings_and_output_weights,
            tp_group=self.tp_group,
        )

    @property
    def output_weight(self) -> Tensor:
        """The rows of the output layer of this tensor-parallel rank: [padded vocabulary / TP, H], also where it is tied."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the shards of this stage for dist_checkpointing. Megatron Core's own asks a value network for its output layer."""
        metadata = {"non_homogeneous_layers": self.architecture.layers_differ, **(metadata or {})}
        if self.head == "lm":
            shards: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        else:
            shards = super(LanguageModule, self).sharded_state_dict(
                prefix, sharded_offsets, ensure_metadata_has_dp_cp_group(metadata)
            )
        return shards

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Take the hidden states of the stage before. Megatron Core's schedules call this."""
        self.decoder.set_input_tensor(input_tensor[0] if isinstance(input_tensor, list) else input_tensor)

    def _freeze_padding(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Stop the gradient of the embeddings [t, 1, H] that are the padding token's. ``tokens``: of the row, [T]."""
        padding = self.architecture.padding_token
        if padding is None:
            return hidden
        own = tokens.view(-1, len(hidden))[self.tp_group.rank() if self.config.sequence_parallel else 0]
        return torch.where((own == padding)[:, None, None], hidden.detach(), hidden)

    def forward(self, row: StageRow) -> Tensor:
        hidden = None
        if self.pre_process:
            hidden = self._freeze_padding(self.embedding(input_ids=row.tokens[None], position_ids=None), row.tokens)
            if self.architecture.embedding_scale != 1.0:
                scale = torch.tensor(self.architecture.embedding_scale)  # through float32, as Transformers does
                hidden = hidden * scale.to(hidden.device, hidden.dtype)
        if hidden is not None and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # of a frozen embedding: a layer that is recomputed has gradients only if its input has
        rotaries = self.architecture.rotaries
        tables = rotation_tables(rotaries, row.positions, self.config.params_dtype) if rotaries else None
        output: Tensor = self.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=tables, packed_seq_params=row)
        return output
