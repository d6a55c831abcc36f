"""What router replay says of a micro-batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strop import metrics
from strop.metrics import Metrics
from strop.models.routing.routes import RoutedLayers
from strop.types import Batch


def router_metrics(network: Any, batch: Batch) -> Metrics:
    """Return how far the learner would route otherwise than the engine did, after a network read a micro-batch.

    Counted are the N predicted tokens, by the token that each is predicted from: so it does not depend on how often a prompt is read.
    ``router_disagreement``: share of (token, layer) pairs whose recorded set of experts is not the learner's choice;
    ``tokens_without_routes``: share of tokens whose experts were not recorded. Empty without router replay.
    """
    routed: RoutedLayers | None = getattr(network, "routed", None)
    if routed is None:
        return {}
    layer = min(routed.top_k)
    missing = 1.0 if batch.routes is None else (batch.routes[batch.source, layer, 0] < 0).double().mean().item()
    logged = {"tokens_without_routes": metrics.mean(missing, len(batch.target))}
    counts: Tensor | None = network.router_counts
    if counts is None:
        return logged
    differ, compared = counts.tolist()
    return {**logged, "router_disagreement": metrics.mean(differ / max(compared, 1.0), compared)}
