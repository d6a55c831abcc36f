"""Router replay metrics: how far the learner's own routing would differ from the engine's.

The N predicted tokens are counted, each by the token it is predicted from, so the metrics do not depend on how often a prompt is
read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from strop import metrics
from strop.metrics import Metrics
from strop.models.routing.recorded_experts import RoutedLayers
from strop.types import Batch


def take_router_counts(network: Any) -> Tensor | None:
    """Return the counts of a torch learner's network since the last call, [2]; None if it replayed nothing."""
    counts: Tensor | None = getattr(network, "router_counts", None)
    if counts is None:
        return None
    network.router_counts = None
    return counts.cpu()


def measure_missing_routes(routed: RoutedLayers | None, batch: Batch) -> Metrics:
    """Return ``tokens_without_routes``: the share of tokens whose experts were not recorded. None without router replay."""
    if routed is None:
        return {}
    recorded, missing = batch.read_columns.get(routed.column.name), 1.0
    if recorded is not None:
        missing = (recorded[batch.source] < 0).flatten(1).all(1).double().mean().item()
    return {"tokens_without_routes": metrics.mean(missing, len(batch.target))}


def measure_disagreement(counts: Tensor | None) -> Metrics:
    """Return ``router_disagreement``: the share of (token, layer) pairs whose recorded set of experts differs from the learner's
    choice.

    ``counts`` [2]: pairs that differ, pairs compared; None without router replay.
    """
    if counts is None:
        return {}
    differ, compared = counts.tolist()
    return {"router_disagreement": metrics.mean(differ / compared, compared)} if compared else {}
