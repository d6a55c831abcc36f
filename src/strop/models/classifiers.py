"""Sequence classifiers with one label, which is what reward models and critics are to Transformers: loading them, and their padding."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from strop.models.adapters import adapter_folder, base_name, of_classifier, with_adapters_merged
from strop.models.loading import load_model, locate, overridden, quiet, saved_config
from strop.models.value import score_layer

log = logging.getLogger(__name__)

_CLASSIFIER = "ForSequenceClassification"


def load_classifier(
    name: str, *, overrides: Mapping[str, Any] | None = None, device: str = "cpu", seed: int = 0, spread: float | None = None
) -> Any:
    """A Hugging Face sequence classifier with one label and float32 weights, from a saved one or from a causal LM, which may be a
    folder with adapters of either: they come merged.

    A causal LM has no score layer: it gets one with weights drawn from a normal distribution with ``seed`` and the standard deviation
    ``spread`` (None: the model's own ``initializer_range``; 0: zeros, so that every first score is 0). A saved classifier keeps its own.
    Raises ModelNotFound, and ValueError for a model that has several labels or no classifier in Transformers.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if (adapters := adapter_folder(name)) is not None and of_classifier(adapters):
        return _with_adapters(adapters, overrides).to(device)
    folder, gguf = locate(name)
    if gguf or adapters:
        return _drawn(_from_language_model(load_model(name, overrides=overrides)), seed, spread).to(device)
    config = AutoConfig.from_pretrained(folder)
    _refuse_several_labels(name, config)
    config = overridden(config, overrides)
    config.num_labels = 1
    _refuse_unknown(name, config)
    with quiet():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True
        )
    fresh = [key for key in info["missing_keys"] if getattr(model, key.partition(".")[0]) is score_layer(model)]
    if missing := sorted(set(info["missing_keys"]) - set(fresh)):
        raise ValueError(f"policy.model_name: {name} lacks weights of a {type(model).__name__}: {', '.join(missing[:3])}")
    return (_drawn(model, seed, spread) if fresh else model).to(device)


def _with_adapters(adapters: Path, overrides: Mapping[str, Any] | None) -> Any:
    """The classifier that was trained, with its own score layer and padding."""
    model = load_classifier(base_name(adapters), overrides=overrides)
    if (saved := saved_config(adapters)) is not None:
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = saved.pad_token_id
    return with_adapters_merged(model, adapters)


def _from_language_model(model: Any) -> Any:
    """A classifier on the trunk of a causal LM, which it takes over."""
    from transformers import AutoModelForSequenceClassification

    config = model.config
    config.num_labels = 1
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    score_layer(classifier).to_empty(device="cpu")
    return classifier


def _drawn(model: Any, seed: int, spread: float | None) -> Any:
    """The model with a score layer of its own. The weights follow from the seed alone, not from what was drawn before."""
    deviation = float(getattr(model.config, "initializer_range", 0.02)) if spread is None else spread
    layer = score_layer(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(deviation * torch.randn(layer.weight.shape, generator=generator))
        if layer.bias is not None:
            layer.bias.zero_()
    return model


def _refuse_several_labels(name: str, config: Any) -> None:
    saved = any(kind.endswith(_CLASSIFIER) for kind in config.architectures or ())
    if saved and config.num_labels != 1:
        raise ValueError(
            f"policy.model_name: {name} is a classifier with {config.num_labels} labels, and a reward model or critic has one score; name "
            "a language model, or a classifier saved with num_labels=1"
        )


def _refuse_unknown(name: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    if type(config) not in KNOWN:
        raise ValueError(
            f"policy.model_name: {name} is a {config.model_type} model, for which Transformers has no sequence classifier; name a model of "
            "another family"
        )


def set_pad_token(model: Any, tokenizer: Any, stop_ids: Collection[int]) -> str:
    """Give a classifier and its tokenizer a padding token that no rollout ends with, and return it.

    Transformers reads the score at the last token that is not padding. Many tokenizers pad with the token that ends a turn, and then the
    score in a padded batch would be the one before the end. The first of these that is no stop token is taken: the tokenizer's own
    padding token; another special token, first those that are named for padding, then unused and unknown ones. The vocabulary does not
    grow. Raises ValueError where every special token ends rollouts.
    """
    size = int(model.get_input_embeddings().weight.shape[0])
    stops = {*stop_ids, tokenizer.eos_token_id}
    for token in _candidates(tokenizer):
        place = tokenizer.convert_tokens_to_ids(token)
        if place is not None and place not in stops and place < size:
            if token != tokenizer.pad_token:
                log.warning("%r becomes the padding token: %r ends rollouts, or is none", token, tokenizer.pad_token)
            tokenizer.pad_token = token
            model.config.get_text_config().pad_token_id = model.config.pad_token_id = place
            return token
    raise ValueError(
        "the tokenizer has no special token to pad with besides those that end a rollout, and then a classifier's score in a padded batch "
        "is read at the wrong place; name a tokenizer with a padding token of its own (policy.tokenizer.name)"
    )


def _candidates(tokenizer: Any) -> Iterator[str]:
    """Tokens to pad with, the best first."""
    added = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items()) if token.special]
    if tokenizer.pad_token is not None:
        yield tokenizer.pad_token
    for hint in ("pad", "unused", "reserved", "unk"):
        yield from (token for token in added if hint in token.lower())
    if tokenizer.unk_token is not None:
        yield tokenizer.unk_token
    yield from (token for token in added if token != tokenizer.bos_token)
    if tokenizer.bos_token is not None:
        yield tokenizer.bos_token
