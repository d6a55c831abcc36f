"""A network with a scalar head, a critic or a reward model: a Hugging Face sequence classifier with one label, and how one is loaded.

The head is applied to the hidden state of every sampled token for a critic, and of the last token of a rollout for a reward model. A saved
model loads as AutoModelForSequenceClassification.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.algorithms.base import ValueOutputs
from strop.models.adapters import adapter_folder, base_model_name, is_classifier_adapter, merge_adapters
from strop.models.layers.compiled_layers import CompiledLayers
from strop.models.layers.fused_layers import FusedLayers
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
from strop.models.network import Network, places_of_tokens, probe_batch
from strop.models.packing_probe import CannotPack, LayerProbe, check_structure
from strop.models.quantization.quantized_checkpoint import check_quantized
from strop.safety.remote_code import trusts_remote_code
from strop.sampling import Sampling, at_least_float32
from strop.types import Batch


class ValueNetwork(Network):
    """A sequence classifier with one label behind one call: batch -> values [N]."""

    @property
    def decoder(self) -> nn.Module:
        decoder: nn.Module = self.model.base_model
        return decoder

    def outputs(self, batch: Batch, sampling: Sampling) -> ValueOutputs:  # type: ignore[override]
        with self.autocast():
            hidden = self.hidden(batch)
        return self.token_sharding.gather_outputs(
            ValueOutputs(apply_score_layer(get_score_layer(self.model), hidden)), len(batch.target)
        )

    @torch.no_grad()
    def _probe(self) -> bool:
        """Return whether packed rows yield the same hidden states as single sequences with the model's native attention."""
        batch = probe_batch(int(self.model.get_input_embeddings().weight.shape[0]))
        probe = LayerProbe(self.decoder, places_of_tokens(batch))
        self.use_native_attention()
        with probe.read_alone():
            expected = self._hidden_padded(batch)
        self.use_plan_attention()
        try:
            check_structure(self.decoder)
            with probe.read_together():
                packed = self._hidden_packed(batch)
            probe.check()
        except CannotPack as reason:
            self.fallback = str(reason)
        except (TypeError, RuntimeError, KeyError, AttributeError, IndexError, AssertionError) as error:
            self.fallback = f"{type(error).__name__}: {error}"
        else:
            relative_error = ((packed - expected).abs().max() / expected.abs().max()).item()
            if relative_error < 1e-3:
                return True
            self.fallback = f"its hidden states differ by {relative_error:.2g} of their size when sequences share a row"
        warnings.warn(
            f"{type(self.model).__name__} cannot read packed rows ({self.fallback}); it reads padded rows instead", stacklevel=3
        )
        return False


def get_score_layer(model: Any) -> nn.Linear:
    """Return the score layer of a sequence classifier with one label. Raises ValueError if there is none."""
    for name in ("score", "classifier"):
        layer = getattr(model, name, None)
        if isinstance(layer, nn.Linear) and layer.out_features == 1:
            return layer
    raise ValueError(
        f"{type(model).__name__} has no linear layer for one label; load it as a sequence classifier with num_labels=1"
    )


def apply_score_layer(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply the score layer, [N, H] -> [N], in at least float32: differences between scores are small relative to the scores."""
    weight, bias = at_least_float32(layer.weight), layer.bias
    with torch.autocast(hidden.device.type, enabled=False):
        scores = nn.functional.linear(at_least_float32(hidden), weight, None if bias is None else at_least_float32(bias))
        return scores.squeeze(-1)


# A critic that is one linear layer on the policy's hidden states: no second model in memory, and no gradient into the policy.
#
# Its features are trained only by the policy. A separate critic (``strop.models.value_network``) learns its own features, at the
# cost of a second model.

WEIGHTS_FILE, CONFIG_FILE = "model.safetensors", "value_head.json"


class ScalarHead(nn.Module):
    """H -> 1, initialized to zero: at first every value is 0, and advantages are plain rewards."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.score.bias)

    def save_pretrained(self, folder: Path | str, **_: Any) -> None:
        """Write the head as safetensors and its size as JSON."""
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS_FILE)
        (folder / CONFIG_FILE).write_text(json.dumps({"hidden_size": self.score.in_features}))

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> ScalarHead:
        """Load what ``save_pretrained`` wrote. Raises FileNotFoundError."""
        from safetensors.torch import load_file

        folder = Path(folder)
        head = cls(int(json.loads((folder / CONFIG_FILE).read_text())["hidden_size"]))
        head.load_state_dict(load_file(folder / WEIGHTS_FILE))
        return head

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """Do nothing: the trunk runs without gradient and keeps no activations."""


class ValueHead:
    """A critic for a learner: batch -> values [N]. ``model`` is only the head; the trunk is the policy with its current weights."""

    def __init__(self, trunk: Network, head: ScalarHead | None = None) -> None:
        """Raises ValueError if the head does not fit the size of the trunk's hidden states."""
        size = int(trunk.model.config.get_text_config().hidden_size)
        if head is not None and head.score.in_features != size:
            raise ValueError(
                f"the value head reads {head.score.in_features} features and {type(trunk.model).__name__} has {size}: the head "
                "was trained on another model; start with a new one"
            )
        wide = torch.promote_types(next(trunk.model.parameters()).dtype, torch.float32)
        self.trunk = trunk
        self.compute_hidden: Callable[[Batch], Tensor] = trunk.hidden
        self.device: torch.device = trunk.device
        self.packed = trunk.packed
        # On ranks that have not received it yet, the trunk is on the meta device; the head is the same zeros on all of them.
        device = torch.device("cpu") if trunk.device.type == "meta" else trunk.device
        self.model = (ScalarHead(size) if head is None else head).to(device=device, dtype=wide)

    @property
    def fused_layers(self) -> FusedLayers:
        return self.trunk.fused_layers

    @property
    def reads_plain_rows(self) -> bool:
        return self.trunk.reads_plain_rows

    @property
    def compiled_layers(self) -> CompiledLayers | None:
        return self.trunk.compiled_layers

    def outputs(self, batch: Batch, sampling: Sampling) -> ValueOutputs:
        """Return the values at each sampled token, [N]. ``sampling`` has no effect."""
        values = ValueOutputs(apply_score_layer(self.model.score, self._compute_features(batch)))
        return self.trunk.token_sharding.gather_outputs(values, len(batch.target))

    @torch.no_grad()
    def _compute_features(self, batch: Batch) -> Tensor:  # [N, H], as Network.hidden
        with self.trunk.autocast():
            return self.compute_hidden(batch)


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
