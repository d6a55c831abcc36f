"""A network with a scalar head, a critic or a reward model: a Hugging Face sequence classifier with one label.

The head is applied to the hidden state of every sampled token for a critic, and of the last token of a rollout for a reward model. A saved
model loads as AutoModelForSequenceClassification.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from strop.algorithms.base import ValueOutputs
from strop.models.network import Network, probe_batch
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
        self.use_native_attention()
        expected = self._hidden_padded(batch)
        self.use_plan_attention()
        try:
            packed = self._hidden_packed(batch)
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
