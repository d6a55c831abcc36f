"""A prompt as tokens, with its images."""

from __future__ import annotations

from dataclasses import dataclass

from strop.types import PromptImage


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """Tokens, and the images among them; positions count from the first token."""

    tokens: list[int]
    images: tuple[PromptImage, ...] = ()
