"""Keys of the tokenizer and of the image processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from strop.base_config import NAMES_FILE, BaseConfig, PathText, follows
from strop.problems import Problem
from strop.storage.files import read_text_file


class TokenizerConfig(BaseConfig):
    """The tokenizer and its chat template."""

    identity_keys: ClassVar[tuple[str, ...]] = ("*",)

    name: PathText = follows("..model_name", standalone=..., min_length=1, description="A hub name or a folder.")
    chat_template: str | None = Field(
        None,
        json_schema_extra=NAMES_FILE,
        description="Jinja template, or a file that holds one; null or default uses the tokenizer's, passthrough joins the contents of "
        "the messages.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables of the chat template, such as enable_thinking."
    )

    tool_call_format: str | None = Field(
        None,
        min_length=1,
        description="How the model writes tool calls: hermes, qwen_xml, xml, llama3_json, mistral, gpt_oss or deepseek; null follows the "
        "chat template.",
    )

    @field_validator("chat_template")
    @classmethod
    def _read_file(cls, value: str | None) -> str | None:
        """Replace a file path by the file's text, so that a saved run does not depend on the file."""
        try:
            return value if value == "passthrough" else read_chat_template(value)
        except ValueError:
            return value  # described by ``errors``

    def errors(self, key: str) -> Iterator[Problem]:
        try:
            read_chat_template(self.chat_template)
        except ValueError as error:
            fix = "Set it to an existing file, a template, default or passthrough."
            yield Problem(f"{key}.chat_template", f"found {self.chat_template!r:.300}; {error}", fix)


PASSTHROUGH = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def read_chat_template(value: str | None) -> str | None:
    """Return the configured template: the text of a file, or the value itself. Raises ValueError."""
    if value is None or value == "default" or "{%" in value or "{{" in value:
        return value
    if value == "passthrough":
        return PASSTHROUGH
    try:
        return read_text_file(value)
    except (OSError, ValueError, RuntimeError) as error:  # not UTF-8, an invalid file name, or an unknown user's home
        raise ValueError(
            f"it is neither a Jinja template nor a file with one: {Path(value).absolute()!s:.300} cannot be read"
        ) from error


# Section ``image_processor`` of a vision-language model.


class ImageProcessorConfig(BaseConfig):
    """Image processing, the same for learner and engines."""

    identity_keys: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "options")
    unrelated_keys: ClassVar[tuple[str, ...]] = ("allow_addresses",)

    min_pixels: int | None = Field(
        None,
        ge=1,
        description="Smaller images are enlarged to this (pixels); null is the model's default. For models that accept any size.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="Larger images are shrunk to this (pixels), which takes fewer tokens; null is the model's default.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Other settings of the model's image processor in Transformers, such as do_image_splitting or backend: pil.",
    )
    allow_addresses: bool = Field(
        False, description="Download images that the data references by http or https URLs, when they are read."
    )

    def settings(self) -> Mapping[str, Any]:
        """Return the arguments used to load the image processor."""
        pixels = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
        return {**{key: value for key, value in pixels.items() if value is not None}, **self.options}
