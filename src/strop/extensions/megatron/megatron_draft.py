"""A draft head alongside a policy that Megatron Core trains: every rank has all of the head, as it has all of the policy.

Ranks read other rollouts, so the gradients of the head are added over them before its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.extensions.labs.draft.draft_config import DraftConfig
from strop.extensions.labs.draft.draft_trainer import DraftOptions
from strop.extensions.megatron.megatron_config import MegatronConfig
from strop.extensions.megatron.megatron_network import MegatronNetwork
from strop.learner.torch.optimizer_config import OptimizerConfig
from strop.models.attention.kernel_choice import AttentionKernel
from strop.models.logprobs.lm_head import LMHead, make_lm_head

OPTIMIZERS = {"adam": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}


class MegatronDraftedPolicy:
    """The policy as its head reads it, on a rank that has all layers."""

    attention_kernel: AttentionKernel = "auto"

    def __init__(self, network: MegatronNetwork) -> None:
        self.network = network
        self.chunk: int | None = network.chunk

    @property
    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.network.last_stage.decoder
        return decoder

    @property
    def head(self) -> LMHead:
        network = self.network
        network.wait_for_output_weights()
        return make_lm_head(network.hf_config, network.last_stage.output_weight[: network.vocab_size])

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.network.last_stage.embedding.word_embeddings.weight)

    def autocast(self) -> torch.autocast:
        half = self.network.last_stage.output_weight.dtype == torch.bfloat16
        return torch.autocast(self.network.device.type, dtype=torch.bfloat16, enabled=half)


def make_megatron_draft_options(config: MegatronConfig, draft: DraftConfig | None) -> DraftOptions:
    """Return how a head is trained alongside a policy: by torch's optimizer of the same kind, at the policy's rate of each step."""
    optimizer = config.optimizer
    rate = optimizer.lr if draft is None or draft.head_lr is None else draft.head_lr
    kwargs: dict[str, Any] = {"lr": rate, "weight_decay": optimizer.weight_decay}
    if optimizer.optimizer == "adam":
        kwargs |= {"betas": [optimizer.adam_beta1, optimizer.adam_beta2], "eps": optimizer.adam_eps}
    else:
        kwargs |= {"momentum": optimizer.sgd_momentum}
    return DraftOptions(
        optimizer=OptimizerConfig(
            name=OPTIMIZERS[optimizer.optimizer], kwargs=kwargs, decay_vectors=False, no_decay=(), groups=()
        ),
        max_grad_norm=optimizer.clip_grad or None,
        loss_weight=1.0 if draft is None else draft.loss_weight,
    )


def add_over_ranks(gradients: Sequence[Tensor], group: Any) -> None:
    """Add the gradients of all data-parallel ranks, in place."""
    if dist.get_world_size(group) == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
