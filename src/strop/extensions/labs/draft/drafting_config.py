"""Keys of ``policy.generation.torch_cfg`` about drafts of a head (``policy.draft``)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from strop.generation.torch.speculation import Drafter, DraftingConfig, StateFuser

if TYPE_CHECKING:
    from strop.models.network import Network

log = logging.getLogger(__name__)


class HeadDraftingConfig(DraftingConfig):
    """How many tokens the policy's head proposes in the embedded engine, and how they are verified."""

    speculative_draft: int = Field(
        0,
        ge=0,
        le=32,
        description="Number of tokens proposed by the policy's draft head (policy.draft) per step; 0 turns it off (tokens).",
    )
    speculative_sampling: Literal["coupled", "rejection"] = Field(
        "coupled",
        description="How drafts of speculative_draft are verified. coupled: draft and token are drawn with the same random number, so "
        "the rollouts do not depend on the head; rejection keeps more drafts, but the drawn tokens depend on the head. Both are exact.",
    )

    def make_fuser(self, network: Network) -> StateFuser | None:
        if not self.speculative_draft or network.draft is None:
            return super().make_fuser(network)
        from strop.extensions.labs.draft.eagle_head import EagleFuser

        return EagleFuser(network)

    def make_drafter(self, network: Network, runner: Any) -> Drafter | None:
        """Create the drafter that uses the policy's head; None if there is none, with a warning if one was configured."""
        if not self.speculative_draft or network.draft is None:
            return super().make_drafter(network, runner)
        from strop.extensions.labs.draft.eagle_drafter import EagleDrafter
        from strop.generation.torch.paged.paged_runner import PagedRunner

        if isinstance(runner, PagedRunner) and runner.images is None:
            return EagleDrafter(network, runner, self.speculative_draft, rejection=self.speculative_sampling == "rejection")
        reason = (
            "needs a paged cache, which this engine does not have"
            if runner.images is None
            else "reads text, and this model images too"
        )
        log.warning("torch_cfg.speculative_draft %s: it decodes one token at a time", reason)
        return None
