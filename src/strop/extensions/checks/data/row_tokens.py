"""How the rows of a run become tokens, without its model: tokenizer, chat template, stop tokens, limits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from strop.config import EvalRunConfig, RecordedRunConfig
from strop.extensions.checks.data.checked_entries import CheckableConfig
from strop.models.chat_template import ChatTemplate
from strop.models.loading import ModelNotFound, load_tokenizer, read_model_config, read_stop_token_ids
from strop.models.vision.vision_processor import find_vision_processor
from strop.rollouts.recorded_tokens import RecordedRules
from strop.runs.models import TokenizerBundle, make_template
from strop.runs.recorded_run import make_recorded_rules


@dataclass(frozen=True)
class RowTokens:
    template: ChatTemplate
    rules: RecordedRules | None  # of recorded data
    limit: int  # tokens of a prompt, or of a whole recorded example
    limit_keys: str  # that set it


def make_check_template(config: CheckableConfig, name: str, tokenizer: Any) -> ChatTemplate:
    """Return the chat template of a model that is not loaded, with the images of one that reads them."""
    section: Any = config.tokenizer if isinstance(config, EvalRunConfig) else config.policy.tokenizer
    try:
        model_config = read_model_config(name)
    except (ModelNotFound, OSError, ValueError):  # of a tokenizer alone
        return ChatTemplate(tokenizer, options=section.chat_template_kwargs)
    if not isinstance(config, EvalRunConfig):
        return make_template(config.policy, tokenizer, model_config)
    vision = find_vision_processor(name, model_config, tokenizer)
    return ChatTemplate(tokenizer, options=section.chat_template_kwargs, vision=vision)


def load_row_tokens(config: CheckableConfig) -> tuple[RowTokens | None, list[str]]:
    """Return how rows become tokens, and what is to be said of it; None if the tokenizer is not on this machine."""
    section: Any
    if isinstance(config, EvalRunConfig):
        name, section = config.generation.model_name, config.tokenizer
        limits = {"generation.vllm_cfg.max_model_len": config.generation.max_total_sequence_length - 1}
        limits["data.max_input_seq_length"] = config.data.max_input_seq_length
    else:
        name, section = config.policy.model_name, config.policy.tokenizer
        limits = {"policy.max_total_sequence_length": config.policy.max_total_sequence_length - 1}
        limits["data.max_input_seq_length"] = config.data.max_input_seq_length
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokenizer = load_tokenizer(section.name or name, chat_template=section.chat_template)
            template = make_check_template(config, name, tokenizer)
            stops = read_stop_token_ids(name, tokenizer) if isinstance(config, RecordedRunConfig) else ()
    except (ModelNotFound, OSError, ValueError) as error:
        return None, [f"tokens and the chat template were not looked at: {error}"]
    notes = list(dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, UserWarning)))
    if isinstance(config, RecordedRunConfig):
        rules = make_recorded_rules(config, TokenizerBundle(tokenizer, template, stops))
        return RowTokens(template, rules, rules.max_length, "policy.max_total_sequence_length"), notes
    key = min(limits, key=lambda each: limits[each])
    return RowTokens(template, None, limits[key], key), notes
