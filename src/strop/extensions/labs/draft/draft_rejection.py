"""Rejection sampling of drafts (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).

A draft d that was drawn from q is kept with probability min(1, p(d) / q(d)); otherwise the token is drawn from max(p - q, 0), normalized.
The resulting token has the distribution p, and a draft is kept with the highest possible probability, sum_v min(p(v), q(v)).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.determinism import running_sums
from strop.sampling import Sampling, filtered_logits


def keep_or_redraw(
    logits: Tensor,
    draft_probs: Tensor,
    drafts: Tensor,
    samplings: Sequence[Sampling],
    kept_below: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the tokens and their log-probabilities under the policy, [R] each.

    Args:
        logits: [R, V], the policy's at each drafted token.
        draft_probs: [R, V], the distributions of the drafts.
        drafts: [R] int64.
        samplings: Of each row; none is greedy.
        kept_below: [R], uniform numbers that decide whether a draft is kept.
        uniforms: [R], that a token is drawn with instead.
    """
    scaled = torch.stack([filtered_logits(row[None], sampling)[0] for row, sampling in zip(logits, samplings, strict=True)])
    logs = scaled.float().log_softmax(-1)
    probs = logs.exp()
    row = torch.arange(len(drafts), device=logits.device)
    kept = kept_below * draft_probs[row, drafts] < probs[row, drafts]
    rest = (probs - draft_probs).clamp(min=0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)  # p = q except for rounding
    running = running_sums(rest.double())
    mass = torch.minimum(uniforms.double() * running[:, -1], torch.nextafter(running[:, -1], torch.zeros_like(running[:, -1])))
    redrawn = torch.searchsorted(running, mass[:, None], right=True).squeeze(1)
    tokens = torch.where(kept, drafts, redrawn)
    return tokens, logs[row, tokens]
