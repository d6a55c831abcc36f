"""Section ``tokenizer`` of a model."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from strop.base_config import BaseConfig, follows


class TokenizerConfig(BaseConfig):
    """The tokenizer and its chat template."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    name: str = follows("..model_name", standalone=..., min_length=1, description="A hub name or a folder.")
    chat_template: str | None = Field(None, description="Jinja template; null or default is the tokenizer's own.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )
