"""Are the chat templates that a configuration sets Jinja, and are there the forms of calls?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from strop.base_config import BaseConfig, iter_sections
from strop.models.tokenizer_config import TokenizerConfig
from strop.problems import Problem
from strop.tools.formats.choose_format import FORMATS
from strop.user_code import suggest_names

GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # Transformers' own tag around what a model wrote


def find_template_problems(config: BaseConfig) -> Iterator[Problem]:
    """Yield a problem for each chat template that Jinja cannot read, and each form of calls that does not exist."""
    for key, section in iter_sections(config):
        name = section.tool_call_format if isinstance(section, TokenizerConfig) else None
        if name is not None and name not in FORMATS:
            yield Problem(f"{key}.tool_call_format", f"there is no form of calls {name!r}{suggest_names(name, FORMATS)}")
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
