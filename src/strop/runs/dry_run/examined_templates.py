"""Checks that configured chat templates are valid Jinja, that tool call formats exist, and that conversations can continue."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from strop.base_config import BaseConfig, iter_sections
from strop.config import EvalRunConfig, RolloutRunConfig
from strop.environments.handle import EnvironmentHandle
from strop.models.local_files import find_local_file
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem
from strop.tools.call_formats import FORMATS
from strop.user_code import describe_error, suggest_names

GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Transformers' own tag around the model's text


def find_template_problems(config: BaseConfig) -> Iterator[Problem]:
    """Yield a problem for each chat template that is not valid Jinja, and each tool call format that does not exist."""
    for key, section in iter_sections(config):
        name = section.tool_call_format if isinstance(section, TokenizerConfig) else None
        if name is not None and name not in FORMATS:
            yield Problem(f"{key}.tool_call_format", f"there is no tool call format {name!r}{suggest_names(name, FORMATS)}")
    texts = {
        f"{key}.chat_template": section.chat_template
        for key, section in iter_sections(config)
        if isinstance(section, TokenizerConfig) and section.chat_template not in (None, "default", "passthrough")
    }
    if not texts:
        return
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    reported = set()
    for key, text in texts.items():
        try:
            environment.parse(GENERATION.sub("", text or ""))
        except jinja2.TemplateSyntaxError as error:
            if text not in reported:
                reported.add(text)
                message = f"it is no Jinja template: {error.message} in its line {error.lineno}"
                yield Problem(key, message, "Mend the template, or set it to default, the tokenizer's own.")


def find_conversation_problems(
    config: RolloutRunConfig | EvalRunConfig, environments: Iterable[EnvironmentHandle[Any]]
) -> Iterator[Problem]:
    """Yield why the chat template of a local tokenizer cannot render the environments' tools or turns."""
    section, key = (
        (config.tokenizer, "tokenizer") if isinstance(config, EvalRunConfig) else (config.policy.tokenizer, "policy.tokenizer")
    )
    speaking = [each for each in environments if each.traits.responds]
    file = find_local_file(section.name, "tokenizer_config.json") if speaking else None
    if file is None:
        return
    from strop.models.chat_template import ChatTemplate
    from strop.models.loading import ModelNotFound, RemoteCodeRefused, load_tokenizer
    from strop.rollouts.tool_turns import describe_tool_calls
    from strop.types import user

    try:
        template = ChatTemplate(
            load_tokenizer(str(file.parent), chat_template=section.chat_template), options=section.chat_template_kwargs
        )
        describe_tool_calls(speaking, template, section.tool_call_format)
        template.encode_observation([user("?")], ())
    except (ModelNotFound, RemoteCodeRefused):
        return  # reported when the model is loaded
    except Exception as error:  # of the template, which may raise any exception
        yield Problem(key, str(error) if isinstance(error, ValueError) else f"the chat template fails: {describe_error(error)}")
