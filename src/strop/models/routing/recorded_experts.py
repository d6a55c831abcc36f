"""The experts of tokens, the column ROUTES [T, layers, k]: the indices of the k experts that each layer chose for each token.

They are int8 where all indices fit, else int16. ``NO_ROUTE`` marks layers without experts, and all layers of a token whose
experts were not recorded: such a token is routed by the learner.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from strop import metrics
from strop.columns import TokenColumn
from strop.metrics import Metrics
from strop.models.routing.router_config import CHOICES, NO_ROUTE, ROUTES
from strop.types import Batch


def compact_dtype(experts: int) -> torch.dtype:
    """Return the smallest signed type that holds the indices of this many experts."""
    return torch.int8 if experts <= 128 else torch.int16


def compact(routes: Tensor) -> Tensor:
    """Return routes of any integer type in the smallest type that holds them."""
    return routes.to(compact_dtype(int(routes.max()) + 1 if routes.numel() else 1))


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a decoder that choose experts."""

    layers: int  # of the decoder, including layers without experts
    top_k: Mapping[int, int]  # layers of this process -> number of experts per token
    width: int  # the most experts per token of any layer
    experts: int  # of a layer

    column: ClassVar[TokenColumn] = ROUTES

    @property
    def shape(self) -> tuple[int, int]:
        return self.layers, self.width

    @property
    def dtype(self) -> torch.dtype:
        return compact_dtype(self.experts)

    def record(self) -> RecordedRoutes:
        return RecordedRoutes(self)

    def replay(self, routes: Tensor, weights: Tensor) -> ReplayedRoutes:
        return ReplayedRoutes(self, routes, weights)


class RecordedRoutes:
    """Records the experts that the routers choose."""

    def __init__(self, routed: RoutedLayers) -> None:
        self.routed = routed
        self._chosen: dict[int, Tensor] = {}

    def choose(self, layer: int, own: Tensor) -> None:
        self._chosen[layer] = own

    def stack(self) -> Tensor:  # [n, layers, k]
        """Return the recorded experts. Raises RuntimeError if a layer recorded none."""
        check_all_layers(self.routed.top_k, self._chosen)
        example = next(iter(self._chosen.values()))
        none = example.new_full((len(example), self.routed.width), NO_ROUTE)
        columns = [
            pad(self._chosen[layer], (0, self.routed.width - self.routed.top_k[layer]), value=NO_ROUTE)
            if layer in self._chosen
            else none
            for layer in range(self.routed.layers)
        ]
        return torch.stack(columns, dim=1).to(self.routed.dtype)


class Replayed:
    """Counts where the choices of a pass differ from recorded ones."""

    def __init__(self, weights: Tensor) -> None:
        """``weights`` [n]: of each token in the counts."""
        self.weights = weights.double()
        self.counts = torch.zeros(2, dtype=torch.float64, device=weights.device)  # (token, layer) pairs: differing, compared
        self._read: set[int] = set()

    def count(self, layer: int, differs: Tensor, compared: Tensor) -> None:
        """Count a layer's tokens [n] bool, once: a layer recomputed in the backward pass was already counted."""
        if layer not in self._read:
            self.counts += torch.stack([self.weights @ (differs & compared).double(), self.weights @ compared.double()])
        self._read.add(layer)


class ReplayedRoutes(Replayed):
    """Replaces the routers' choice by recorded experts, where they exist, and counts differences."""

    def __init__(self, routed: RoutedLayers, routes: Tensor, weights: Tensor) -> None:
        """``routes`` [n, layers, k] of the tokens of the pass, on their device, and the weight of each token in the counts [n].

        Raises ValueError for those of another model.
        """
        if routes.shape[1:] != routed.shape:
            raise ValueError(
                f"the recorded experts are of {routes.shape[1]} layers and {routes.shape[2]} experts a token, and the model has "
                f"{routed.layers} layers and {routed.width} experts a token: the engine runs another model; set "
                "policy.router_replay.enabled=false, or let it load the learner's configuration"
            )
        super().__init__(weights)
        self.routed = routed
        self.routes = routes

    def choose(self, layer: int, own: Tensor) -> Tensor:
        recorded = self.routes[:, layer, : own.shape[1]].to(own.dtype)
        if len(recorded) != len(own):
            raise RuntimeError(f"layer {layer} routes {len(own)} tokens, and the experts of {len(recorded)} were recorded")
        known = recorded[:, :1] >= 0
        chosen = torch.where(known, recorded, own)
        differs = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
        self.count(layer, differs, known.squeeze(1))
        return chosen

    def check(self, layers: Iterable[int]) -> None:
        """Raises RuntimeError if a layer that ran has not read its experts."""
        check_all_layers(layers, self._read)


def check_all_layers(layers: Iterable[int], seen: Container[int]) -> None:
    """Raises RuntimeError unless every layer was seen."""
    if missing := [layer for layer in layers if layer not in seen]:
        raise RuntimeError(
            f"the router of layer {missing[0]} was not reached: the model does not pass its keyword arguments to its layers, so its "
            "experts cannot be recorded or replayed; set policy.router_replay.enabled=false"
        )


# Router replay metrics: how far the learner's own choices would differ from the engine's.
#
# The N predicted tokens are counted, each by the token it is predicted from, so the metrics do not depend on how often a prompt is
# read.


def take_replay_counts(network: Any) -> dict[str, Tensor]:
    """Return the counts [2] of a torch learner's network since the last call, by the metric that they are of."""
    counts: dict[str, Tensor] = getattr(network, "replay_counts", {})
    found = {DISAGREEMENT[name]: values.cpu() for name, values in counts.items()}
    counts.clear()
    return found


def measure_missing_routes(routed: RoutedLayers | None, batch: Batch) -> Metrics:
    """Return ``tokens_without_routes``: the share of tokens whose experts were not recorded. None without router replay."""
    if routed is None:
        return {}
    recorded, missing = batch.read_columns.get(routed.column.name), 1.0
    if recorded is not None:
        missing = (recorded[batch.source] < 0).flatten(1).all(1).double().mean().item()
    return {"tokens_without_routes": metrics.mean(missing, len(batch.target))}


DISAGREEMENT = {ROUTES.name: "router_disagreement", CHOICES.name: "indexer_disagreement"}


def measure_disagreement(counts: Tensor | None, metric: str = DISAGREEMENT[ROUTES.name]) -> Metrics:
    """Return the share of (token, layer) pairs whose recorded set of experts, or of tokens, differs from the learner's choice.

    ``counts`` [2]: pairs that differ, pairs compared; None without replay.
    """
    if counts is None:
        return {}
    differ, compared = counts.tolist()
    return {metric: metrics.mean(differ / compared, compared)} if compared else {}
