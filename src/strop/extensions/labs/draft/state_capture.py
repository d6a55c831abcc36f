"""Hidden states of a policy's layers, taken from its own forward passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from strop.extensions.labs.draft.eagle_head import EagleHead
from strop.models.layers.decoder_layers import decoder_layers
from strop.models.network import Network


class StateCapture:
    """Takes the outputs of some layers, and of the whole decoder, while it is ``active``. It changes nothing of the pass."""

    def __init__(self, decoder: nn.Module, layers: Sequence[int]) -> None:
        """Raises ValueError if the decoder has fewer layers."""
        self.decoder = decoder
        found = decoder_layers(decoder)
        if max(layers) >= len(found):
            raise ValueError(
                f"policy.draft reads the output of layer {max(layers)}, and the policy has {len(found)}: set "
                "policy.draft.aux_layer_indices to layers that it has"
            )
        self.layers = [found[index] for index in layers]
        self._states: dict[int, Tensor] = {}
        self.last: Tensor | None = None  # [T, H], of the whole decoder

    @contextmanager
    def active(self) -> Iterator[None]:
        self._states.clear()
        self.last = None
        handles = [layer.register_forward_hook(self._keep(index)) for index, layer in enumerate(self.layers)]
        handles.append(self.decoder.register_forward_hook(self._keep_last))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self._states[index] = hidden.detach().flatten(0, 1)  # [1, T, H] or [T, 1, H]

        return keep

    def _keep_last(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.last = getattr(output, "last_hidden_state", output).detach().flatten(0, 1)

    def take(self) -> Tensor:
        """Return the layers' outputs side by side, [T, layers * H], and forget them."""
        states = torch.cat([self._states[index] for index in range(len(self.layers))], dim=-1)
        self._states.clear()
        return states


class EagleFuser:
    """Makes the fused states [n, H] of tokens in the embedded engine, from what some layers of the policy put out."""

    def __init__(self, network: Network) -> None:
        assert isinstance(network.draft, EagleHead)
        self.network, self.head = network, network.draft
        self.capture = StateCapture(network.decoder, self.head.shape.aux_layers)
        self.layers = torch.tensor(self.head.shape.aux_layers)
        self.size = self.head.shape.hidden_size

    def capturing(self) -> AbstractContextManager[None]:
        return self.capture.active()

    def empty(self, tokens: int) -> Tensor:
        """Allocate memory for the outputs of the layers, [tokens, layers, H] float32."""
        return torch.empty(tokens, len(self.layers), self.size)

    def take(self) -> Tensor:
        """Fuse the outputs captured in the last pass."""
        return self.fuse(self.capture.take())

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """[n, layers * H] -> [n, H] float32."""
        with self.network.autocast():
            return self.head.fuse(states).float()
