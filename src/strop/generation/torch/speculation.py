"""What proposes tokens in the embedded engine besides a look-up: an extension, by keys that it adds to ``torch_cfg``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from strop.base_config import BaseConfig

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.network import Network
    from strop.sampling import Sampling


class DraftedRequest(Protocol):
    """The attributes of a running request that are read."""

    prompt: tuple[int, ...]
    tokens: list[int]
    sampling: Sampling
    seed: int


class Drafter(Protocol):
    """Proposes tokens for all running requests together."""

    count: int  # tokens that are proposed at most
    rejection: bool  # whether ``verify`` decides; else a draft is right where the policy samples the same token

    def propose(self, running: Sequence[DraftedRequest], limits: Sequence[int]) -> list[list[int]]:
        """Return up to ``limits`` tokens for each request, in the order of the slots."""
        ...

    def verify(
        self, running: Sequence[DraftedRequest], drafts: Sequence[list[int]], logits: Tensor
    ) -> dict[int, tuple[int, float]]:
        """Keep or redraw the latest proposals, given the policy's ``logits`` [T, V]: return the token and its log-probability by
        row.
        """
        ...

    def forget(self, request: DraftedRequest) -> None:
        """Free the memory of a request that has ended or will be read again."""
        ...

    def forget_all(self) -> None: ...


class StateFuser(Protocol):
    """Makes a state [n, ``size``] of each token from the outputs of some layers, which a paged cache holds alongside the token's keys."""

    size: int
    layers: Tensor  # [layers] int64: those whose outputs it reads

    def capturing(self) -> AbstractContextManager[None]:
        """Watch a pass inside the context, for ``take``."""
        ...

    def take(self) -> Tensor:
        """Fuse the outputs of the pass that was watched last."""
        ...

    def empty(self, tokens: int) -> Tensor:
        """Return room for the outputs of the layers, [tokens, layers, H] float32, which compiled kernels fill."""
        ...

    def fuse(self, states: Tensor) -> Tensor:
        """[n, layers * H] -> [n, ``size``] float32."""
        ...


class DraftingConfig(BaseConfig):
    """Keys of ``torch_cfg`` by which something proposes tokens; without an extension's, nothing does."""

    def make_fuser(self, network: Network) -> StateFuser | None:
        return None

    def make_drafter(self, network: Network, runner: Any) -> Drafter | None:
        """``runner``: a ``ModelRunner``."""
        return None
