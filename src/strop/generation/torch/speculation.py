"""Tokens that the embedded engine proposes ahead: by a drafter of an extension, or looked up in the prompt."""

from __future__ import annotations

from collections import OrderedDict
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


# Drafts of the next tokens, looked up in the sequence itself (prompt-lookup decoding, Saxena 2023; n-grams in vLLM), and in
# other samples of its prompt (as suffix decoding, Oliaro et al. 2024, arXiv 2411.04975).
#
# A draft is a guess. The engine draws the token at each position as it would without the draft, and keeps the draft as far as the
# draws agree. This equals accepting a drafted token d with probability p(d) and otherwise drawing from p without d, so the
# distribution is the model's, and a seed gives the same tokens with or without drafts.

LONGEST_NGRAM = 4  # tokens
SHORTEST_NGRAM = 2
MOST_PROMPTS = 256  # whose samples are remembered

Ngram = tuple[int, ...]


class SiblingNgrams:
    """The n-grams of all samples of one prompt, running or ended."""

    def __init__(self) -> None:
        self._ends: dict[Ngram, tuple[list[int], int]] = {}  # n-gram -> a sample, and the index after its latest occurrence

    def add(self, ngram: Ngram, sample: list[int], end: int) -> None:
        self._ends[ngram] = sample, end

    def find(self, ngram: Ngram, count: int) -> list[int]:
        """Return up to ``count`` tokens that followed the latest occurrence of an n-gram; none if it is new."""
        sample, end = self._ends.get(ngram, ([], 0))
        return sample[end : end + count]


class PromptSamples:
    """The n-grams of the samples of each of the most recent prompts."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[tuple[int, ...], SiblingNgrams] = OrderedDict()

    def of(self, prompt: tuple[int, ...]) -> SiblingNgrams:
        found = self._prompts.setdefault(prompt, SiblingNgrams())
        self._prompts.move_to_end(prompt)
        if len(self._prompts) > MOST_PROMPTS:
            self._prompts.popitem(last=False)
        return found


class PromptLookup:
    """Finds where the last tokens of a sequence occurred before, and proposes what followed."""

    def __init__(self, siblings: SiblingNgrams | None = None, prompt: int = 0) -> None:
        """``siblings``: n-grams of all samples of the prompt, which has ``prompt`` tokens."""
        self._tokens: list[int] = []
        self._ends: dict[Ngram, int] = {}  # n-gram -> index after its latest occurrence that has a successor
        self._siblings, self._prompt = siblings, prompt

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """Propose up to ``count`` tokens that may follow. ``tokens`` begin with those of the previous call."""
        for token in tokens[len(self._tokens) :]:
            self._index_last()
            self._tokens.append(token)
        for size in range(min(LONGEST_NGRAM, len(self._tokens)), SHORTEST_NGRAM - 1, -1):
            ngram = tuple(self._tokens[-size:])
            end = self._ends.get(ngram)
            found = [] if end is None else self._tokens[end : end + count]
            if not found and self._siblings is not None:
                found = self._siblings.find(ngram, count)
            if found:
                return found
        return []

    def _index_last(self) -> None:
        """Index the n-grams that end with the last token, before another one follows."""
        end = len(self._tokens)
        for size in range(SHORTEST_NGRAM, min(LONGEST_NGRAM, end) + 1):
            ngram = tuple(self._tokens[-size:])
            self._ends[ngram] = end
            if self._siblings is not None and end >= self._prompt:
                self._siblings.add(ngram, self._tokens, end)
