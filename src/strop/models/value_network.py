"""A network with a scalar head, a critic or a reward model: a Hugging Face sequence classifier with one label.

The head is applied to the hidden state of every sampled token for a critic, and of the last token of a rollout for a reward model. A saved
model loads as AutoModelForSequenceClassification.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from strop.algorithms.base import ValueOutputs
from strop.models.layers.compiled_layers import CompiledLayers
from strop.models.layers.fused_layers import FusedLayers
from strop.models.network import Network, places_of_tokens, probe_batch
from strop.models.packing_probe import CannotPack, LayerProbe, check_structure
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
