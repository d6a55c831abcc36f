"""Load sequence classifiers with one label (reward models and critics in Transformers), and set their padding token."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from strop.models.adapters import adapter_folder, base_model_name, is_classifier_adapter, merge_adapters
from strop.models.load_report import LoadReport
from strop.models.loading import (
    apply_overrides,
    from_pretrained,
    load_base_config,
    load_dequantized,
    load_model,
    load_weights,
    locate_model,
)
from strop.models.quantization.quantized_checkpoint import check_quantized
from strop.models.value_network import get_score_layer
from strop.safety.remote_code import trusts_remote_code

log = logging.getLogger(__name__)

_CLASSIFIER = "ForSequenceClassification"
OUTPUT_LAYERS = ("lm_head.", "embed_out.")  # names in language models, absent in their classifiers


def load_classifier(
    name: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    device: str = "cpu",
    seed: int = 0,
    init_std: float | None = None,
    dequantize: bool = False,
) -> Any:
    """Load a Hugging Face sequence classifier with one label and float32 weights, from a saved classifier or a causal LM.

    Either may be a folder with adapters, which are merged. A causal LM gets a new score layer whose weights are drawn from a normal
    distribution with ``seed`` and the standard deviation ``init_std`` (None: the model's ``initializer_range``; 0: zeros, so that all
    initial scores are 0). A saved classifier keeps its score layer. Raises ModelNotFound, and ValueError for a model with
    several labels or without a classifier in Transformers. ``dequantize``: weights may be quantised.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    if (adapters := adapter_folder(name)) is not None and is_classifier_adapter(adapters):
        return _load_with_adapters(adapters, overrides).to(device)
    folder, gguf = locate_model(name)
    if gguf or adapters:
        return _init_score_layer(
            _convert_language_model(load_model(name, overrides=overrides, dequantize=dequantize)), seed, init_std
        ).to(device)
    config = from_pretrained(AutoConfig, folder)
    _check_single_label(name, config)
    config = apply_overrides(config, overrides)
    config.num_labels = 1
    _check_supported(name, config)
    method, kind = check_quantized(name, config, dequantize=dequantize), AutoModelForSequenceClassification
    if method is not None:
        model, report = load_dequantized(kind, name, folder, config, method)
    else:
        model, report = load_weights(partial(from_pretrained, kind), name, folder, config=config, dtype=torch.float32)
    head = get_score_layer(model)
    fresh = any(getattr(model, key.partition(".")[0]) is head for key in report.missing)
    (_forget_head(report, model) if fresh else report).refuse(name, type(model).__name__)
    return (_init_score_layer(model, seed, init_std) if fresh else model).to(device)


def _forget_head(report: LoadReport, model: Any) -> LoadReport:
    """Remove the score layer, which will be initialized, and the language model's output layer from a report."""
    inside = f"{model.base_model_prefix}."
    return replace(
        report,
        missing=[name for name in report.missing if name.startswith(inside)],
        unexpected=[name for name in report.unexpected if not name.startswith(OUTPUT_LAYERS)],
    )


def _load_with_adapters(adapters: Path, overrides: Mapping[str, Any] | None) -> Any:
    """Load the base classifier and merge the adapters, with their score layer and padding token."""
    model = load_classifier(base_model_name(adapters), overrides=overrides)
    if (saved := load_base_config(adapters)) is not None:
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = saved.pad_token_id
    return merge_adapters(model, adapters)


def _convert_language_model(model: Any) -> Any:
    """Return a classifier that reuses the base model of a causal LM."""
    from transformers import AutoModelForSequenceClassification

    config = model.config
    config.num_labels = 1
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trusts_remote_code())
    setattr(classifier, classifier.base_model_prefix, model.base_model)
    get_score_layer(classifier).to_empty(device="cpu")
    return classifier


def _init_score_layer(model: Any, seed: int, init_std: float | None) -> Any:
    """Initialize the model's score layer; its weights depend on ``seed`` only."""
    layer = get_score_layer(model)
    with torch.no_grad():
        layer.weight.copy_(draw_score_weight(model.config, layer.weight.shape, seed, init_std))
        if layer.bias is not None:
            layer.bias.zero_()
    return model


def draw_score_weight(config: Any, shape: torch.Size, seed: int, init_std: float | None) -> torch.Tensor:
    """Return the initial weight of a score layer, from a normal distribution; ``init_std`` None is the model's initializer_range."""
    deviation = float(getattr(config, "initializer_range", 0.02)) if init_std is None else init_std
    return deviation * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _check_single_label(name: str, config: Any) -> None:
    saved = any(kind.endswith(_CLASSIFIER) for kind in config.architectures or ())
    if saved and config.num_labels != 1:
        raise ValueError(
            f"policy.model_name: {name} is a classifier with {config.num_labels} labels, and a reward model or critic needs one; set it "
            "to a language model, or to a classifier saved with num_labels=1"
        )


def _check_supported(name: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    if type(config) not in KNOWN:
        raise ValueError(
            f"policy.model_name: {name} is a {config.model_type} model, for which Transformers has no sequence classifier; set it to a "
            "model of another family"
        )


def to_classifier_config(name: str, config: Any) -> Any:
    """Change a model's configuration, in place, into that of a classifier with one label. Raises ValueError if the family has
    none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING as KNOWN

    _check_single_label(name, config)
    _check_supported(name, config)
    config.num_labels = 1
    config.architectures = [KNOWN[type(config)].__name__]
    return config


def set_pad_token(model: Any, tokenizer: Any, stop_ids: Collection[int]) -> str:
    """Set a padding token of a classifier and its tokenizer that does not end rollouts, and return it.

    Transformers reads the score at the last token that is not padding. Many tokenizers pad with the token that ends a turn; the score in a
    padded batch would then be read before that token. The first candidate that is not a stop token is used: the tokenizer's own padding
    token, then other special tokens, first those named for padding, then unused and unknown ones. The vocabulary does not grow. Raises
    ValueError if every special token ends rollouts.
    """
    token_id = choose_pad_token(tokenizer, stop_ids, int(model.get_input_embeddings().weight.shape[0]))
    model.config.get_text_config().pad_token_id = model.config.pad_token_id = token_id
    return str(tokenizer.pad_token)


def choose_pad_token(tokenizer: Any, stop_ids: Collection[int], size: int) -> int:
    """Set the padding token of a tokenizer as ``set_pad_token`` does, for a vocabulary of ``size`` tokens, and return its id."""
    stops = {*stop_ids, tokenizer.eos_token_id}
    for token in _pad_token_candidates(tokenizer):
        token_id = tokenizer.convert_tokens_to_ids(token)
        if token_id is not None and token_id not in stops and token_id < size:
            if token != tokenizer.pad_token:
                log.warning("%r becomes the padding token: %r is a stop token or is not set", token, tokenizer.pad_token)
            tokenizer.pad_token = token
            return int(token_id)
    raise ValueError(
        "every special token of the tokenizer ends rollouts; with one of them as padding, a classifier's score in a padded batch is read "
        "at the wrong position; set policy.tokenizer.name to a tokenizer with its own padding token"
    )


def _pad_token_candidates(tokenizer: Any) -> Iterator[str]:
    """Yield candidates for the padding token, best first."""
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
