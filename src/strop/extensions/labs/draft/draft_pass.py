"""The pass of a draft head over a micro-batch that the policy has just read, with its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop import metrics
from strop.extensions.labs.draft.draft_rows import DraftRows, make_draft_rows
from strop.extensions.labs.draft.drafted_policy import DraftedPolicy
from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.extensions.labs.draft.soft_cross_entropy import fit_draft
from strop.metrics import Metrics
from strop.models.attention.tree_plan import TreePlan
from strop.sampling import Sampling
from strop.types import Batch

METRICS = ("draft_loss", "draft_acceptance", "draft_same_top")


@dataclass(frozen=True, eq=False)
class DraftPass:
    """What trains a head alongside a policy: only the head's gradient. Nothing of it reaches the policy."""

    policy: DraftedPolicy
    head: EagleHead
    sampling: Sampling
    loss_weight: float = 1.0

    def accumulate(self, batch: Batch, states: Tensor, last: Tensor) -> Metrics:
        """Add the gradient of a micro-batch to the head's, and return metrics of it.

        ``states`` [T, layers * H] and ``last`` [T, H] are the policy's, of the same pass. The loss is summed over the trained tokens and
        divided by all of the optimizer step that count (``Totals``), so it does not depend on how the batch is cut.
        """
        rows = make_draft_rows(batch)
        if not len(rows.trained):
            return {name: metrics.mean(0.0, 0.0) for name in METRICS}
        device = states.device
        weight = batch.mask[rows.predicted].to(device)
        with torch.enable_grad(), self.policy.autocast():
            normed = self._read(batch, rows, states)
            fit = fit_draft(
                normed,
                self.head.lm_head.weight,
                last.index_select(0, batch.source[rows.predicted].to(device)),
                self.policy.head,
                weight * (self.loss_weight / max(batch.totals.tokens, 1)),
                self.sampling.temperature or 1.0,
                self.head.token_ids if self.head.reduced else None,
                max(16, min(self.policy.chunk, 1 << 20) // 4),
            )
            torch.autograd.backward([normed, self.head.lm_head.weight], [fit.grad_hidden, fit.grad_weight])
        count = float(weight.sum())
        columns = zip(METRICS, (fit.loss, fit.overlap, fit.same_top), strict=True)
        return {name: metrics.mean(float((column * weight).sum()) / max(count, 1.0), count) for name, column in columns}

    def _read(self, batch: Batch, rows: DraftRows, states: Tensor) -> Tensor:
        """Return the head's normed states at the rows that are trained on, [M, H]."""
        device = states.device
        with torch.no_grad():
            embedded = self.policy.embed_tokens(batch.tokens[rows.token].to(device)).detach()
        segments = (rows.segment_start, rows.segment_length, rows.segment_parent)
        plan = TreePlan(*segments, device, self.policy.attention_kernel)
        fused = self.head.fuse(states.index_select(0, rows.predecessor.to(device)))
        hidden = self.head(embedded, fused, rows.positions.to(device), plan)
        normed: Tensor = self.head.norm(hidden.index_select(0, rows.trained.to(device)))
        return normed
